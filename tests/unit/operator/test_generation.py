"""Which fields change the generation. Every field of the API is in one of the two tables; a new one must be placed."""

from __future__ import annotations

from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from pd_operator.core.generation import LENGTH, generation
from pd_operator.core.model import PDDeploymentSpec
from pd_operator.core.problems import field_alias
from support.pddeployments import deployment

Edit = tuple[str, Any]

NUM_THREADS = [{"name": "num_threads", "value": "4"}]
OTHER_IMAGE = "vllm/vllm-openai:v0.33.0"
CUSTOM: list[Edit] = [("spec.nodeProfile", "Custom"), ("spec.customProfile", {})]
WITHOUT_REUSE: Edit = ("spec.kvTransfer.bidirectional", "Disabled")

CHANGES: dict[str, list[Edit]] = {
    "model.name": [("spec.model.name", "Qwen/Qwen3-8B")],
    "model.servedName": [("spec.model.servedName", "other")],
    "model.revision": [("spec.model.revision", "abc")],
    "model.maxModelLen": [("spec.model.maxModelLen", 4096)],
    "model.dtype": [("spec.model.dtype", "float16")],
    "engine.image": [("spec.engine.image", OTHER_IMAGE)],
    "engine.vllmVersion": [("spec.engine.vllmVersion", "0.33.0")],
    "engine.blockSize": [("spec.engine.blockSize", 32)],
    "engine.extraArgs": [("spec.engine.extraArgs", ["--kv-cache-dtype", "fp8"])],
    "engine.env": [("spec.engine.env", [{"name": "VLLM_KV_CACHE_LAYOUT", "value": "HND"}])],
    "engine.volumes": [("spec.engine.volumes", [{"name": "a", "mountPath": "/a", "configMap": {"name": "b"}}])],
    "nodeProfile": [("spec.nodeProfile", "CPU")],
    "customProfile": [("spec.customProfile", {"device": "CPU"})],
    "prefill.tensorParallelSize": [("spec.prefill.tensorParallelSize", 2)],
    "decode.tensorParallelSize": [("spec.decode.tensorParallelSize", 2)],
    "kvTransfer.bidirectional": [("spec.kvTransfer.bidirectional", "Disabled")],
    "kvTransfer.backend": [("spec.kvTransfer.backend", "LIBFABRIC")],
    "kvTransfer.connector": [("spec.kvTransfer.connector", "Stock")],
    "kvTransfer.leaseDurationSeconds": [("spec.kvTransfer.leaseDurationSeconds", 60)],
    "kvTransfer.extraConfig": [("spec.kvTransfer.extraConfig", NUM_THREADS)],
}

BEFORE: dict[str, list[Edit]] = {
    "customProfile": CUSTOM,
    "kvTransfer.backend": CUSTOM,
    "prefill.tensorParallelSize": [WITHOUT_REUSE],
    "decode.tensorParallelSize": [WITHOUT_REUSE],
}
"""What has to be set first, so that the edit alone is legal."""

SAME: dict[str, list[Edit]] = {
    "model.source": [("spec.model.source", {"emptyDir": {}})],
    "engine.maxNumSeqs": [("spec.engine.maxNumSeqs", 4)],
    "engine.gpuMemoryUtilizationPercent": [("spec.engine.gpuMemoryUtilizationPercent", 80)],
    "engine.startupTimeoutSeconds": [("spec.engine.startupTimeoutSeconds", 600)],
    "engine.shutdownTimeoutSeconds": [("spec.engine.shutdownTimeoutSeconds", 1)],
    "engine.imagePullPolicy": [("spec.engine.imagePullPolicy", "Always")],
    "engine.preStopSeconds": [("spec.engine.preStopSeconds", 0)],
    "engine.sharedMemoryGiB": [("spec.engine.sharedMemoryGiB", 1)],
    "engine.securityProfile": [("spec.engine.securityProfile", "Privileged")],
    "engine.runAsUser": [("spec.engine.securityProfile", "Restricted"), ("spec.engine.runAsUser", 1000)],
    "engine.hostNetwork": [("spec.engine.hostNetwork", "Enabled")],
    "engine.selfTest": [("spec.engine.selfTest", "Disabled")],
    "kvTransfer.connectorImage": [("spec.kvTransfer.connectorImage", "r.example/pd-connector:2")],
    "topology": [("spec.topology", {"zone": "Any"})],
    "networkPolicy": [("spec.networkPolicy", {"mode": "Disabled"})],
    "imagePullSecrets": [("spec.imagePullSecrets", [{"name": "pull"}])],
    "router": [("spec.router", {"replicas": 5, "auth": {"anonymous": "Allowed"}})],
    "kvTransfer.decoderBlocksTTLSeconds": [("spec.kvTransfer.decoderBlocksTTLSeconds", 60)],
    "kvTransfer.routerTTLSeconds": [("spec.kvTransfer.routerTTLSeconds", 60)],
    "kvTransfer.recomputeThresholdTokens": [("spec.kvTransfer.recomputeThresholdTokens", 0)],
    "kvTransfer.retention": [("spec.kvTransfer.retention", "Pinned")],
    "kvTransfer.lease": [("spec.kvTransfer.retention", "Leased"), ("spec.kvTransfer.lease", {"seconds": 30})],
    "kvTransfer.loadFailurePolicy": [("spec.kvTransfer.loadFailurePolicy", "Recompute")],
} | {
    f"{role}.{field}": [(f"spec.{role}.{field}", value)]
    for role in ("prefill", "decode")
    for field, value in (
        ("replicas", 7),
        ("scaling", "External"),
        ("maxNumSeqs", 2),
        ("prefixCaching", False),
        ("extraArgs", ["--enforce-eager"]),
        ("env", [{"name": "A", "value": "b"}]),
        ("resources", {"requests": {"cpu": "3"}}),
        ("pod", {"labels": {"team": "x"}}),
        ("updateStrategy", {"type": "OnDelete"}),
        ("minReadySeconds", 0),
        ("podDisruptionBudget", "Disabled"),
    )
}

BASE = generation(deployment())


@pytest.mark.parametrize("field", CHANGES)
def test_engines_must_agree_on(field: str) -> None:
    before = BEFORE.get(field, [])
    assert generation(deployment(*before, *CHANGES[field])) != generation(deployment(*before))


@pytest.mark.parametrize("field", SAME)
def test_engines_may_differ_in(field: str) -> None:
    assert generation(deployment(*SAME[field])) == BASE


@pytest.mark.parametrize("edit", [("metadata.name", "other"), ("metadata.namespace", "team"), ("metadata.labels", {})])
def test_names_do_not_count(edit: Edit) -> None:
    assert generation(deployment(edit)) == BASE


def test_one_changed_width_is_enough() -> None:
    widths = [(1, 1), (2, 1), (1, 2), (2, 2)]
    found = {
        generation(
            deployment(WITHOUT_REUSE, ("spec.prefill.tensorParallelSize", p), ("spec.decode.tensorParallelSize", d))
        )
        for p, d in widths
    }
    assert len(found) == len(widths)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ([], [("spec.kvTransfer.backend", "LIBFABRIC")]),
        ([], [("spec.model.servedName", "Qwen/Qwen3-32B")]),
        ([], [("spec.kvTransfer.connector", "Verified")]),
        (
            [("spec.engine.env", [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}])],
            [("spec.engine.env", [{"name": "B", "value": "2"}, {"name": "A", "value": "1"}])],
        ),
    ],
)
def test_another_spelling_of_the_same_is_the_same(one: list[Edit], two: list[Edit]) -> None:
    assert generation(deployment(*one)) == generation(deployment(*two))


def test_the_order_of_arguments_counts_because_the_last_one_wins() -> None:
    one, two = ["--seed", "1"], ["--max-logprobs", "2"]
    first = deployment(("spec.engine.extraArgs", one + two))
    second = deployment(("spec.engine.extraArgs", two + one))
    assert generation(first) != generation(second)


def test_it_is_a_short_label_value_that_never_changes_by_itself() -> None:
    assert len(BASE) == LENGTH
    assert int(BASE, 16) >= 0
    assert generation(deployment()) == BASE


def test_every_field_is_in_exactly_one_table() -> None:
    placed = set(CHANGES) | set(SAME)
    assert not set(CHANGES) & set(SAME)
    assert _fields() == placed


def _fields() -> set[str]:
    """First two levels of the spec: a block that counts as a whole stands under its own name."""
    found: set[str] = set()
    for name, info in PDDeploymentSpec.model_fields.items():
        block = field_alias(name, info)
        model = info.annotation
        whole = block in CHANGES or block in SAME or not _is_model(model)
        if whole:
            found.add(block)
        else:
            assert model is not None
            found |= {f"{block}.{field_alias(inner, one)}" for inner, one in model.model_fields.items()}
    return found


def _is_model(annotation: Any) -> bool:
    return get_origin(annotation) is None and not get_args(annotation) and issubclass(annotation, BaseModel)
