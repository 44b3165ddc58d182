"""A vLLM engine without a GPU, for tests: it enforces the engine contract and answers with a hash of the KV it used.

Import from here; the modules behind are an arrangement.
"""

from support.fake_engine.answers import Answer, AnswerStyle, expected_answer
from support.fake_engine.behaviour import (
    EARLY_FAULTS,
    Behaviour,
    Fault,
    Gate,
    Kind,
    Point,
    Rule,
    any_request,
    with_handle,
    without_handle,
)
from support.fake_engine.connector import Connector, ConnectorConfig, LoadFailed, Parked, Run
from support.fake_engine.engine import EngineConfig, FakeEngine, Record
from support.fake_engine.fabric import SECRET, Clock, Fabric, stopped_clock
from support.fake_engine.leases import LeaseCall, LeaseFault
from support.fake_engine.tokens import Template, completion_prompts, encode

__all__ = [
    "EARLY_FAULTS",
    "SECRET",
    "Answer",
    "AnswerStyle",
    "Behaviour",
    "Clock",
    "Connector",
    "ConnectorConfig",
    "EngineConfig",
    "Fabric",
    "FakeEngine",
    "Fault",
    "Gate",
    "Kind",
    "LeaseCall",
    "LeaseFault",
    "LoadFailed",
    "Parked",
    "Point",
    "Record",
    "Rule",
    "Run",
    "Template",
    "any_request",
    "completion_prompts",
    "encode",
    "expected_answer",
    "stopped_clock",
    "with_handle",
    "without_handle",
]
