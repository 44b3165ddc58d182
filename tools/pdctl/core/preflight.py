"""What an engine's Python must have before an engine is started with it, and what to do when it hasn't.

Separate from the models' rules because those judge a file and this judges a machine. The engine would refuse the same
things itself, half a minute later and in the middle of a stack trace.
"""

from __future__ import annotations

from dataclasses import dataclass

from pd_operator.core.choices import Connector
from pd_operator.core.model import PDDeployment
from pd_operator.core.versions import SUPPORTED_TEXT, is_supported, version_of, version_text


@dataclass(frozen=True, slots=True)
class EnginePython:
    """What was found in an interpreter. A version is None when the distribution is missing."""

    path: str
    vllm: str | None
    nixl: str | None
    connector: bool
    """Our plugin can be imported."""


def engine_python_problems(deployment: PDDeployment, found: EnginePython) -> tuple[str, ...]:
    """Why no engine of this deployment can run with that interpreter, each with what to change; empty when one can."""
    problems: list[str] = []
    if found.vllm is None:
        problems.append(
            f"vLLM is not installed for {found.path}: install pd-operator[engine-cpu] or [engine], "
            "or name another interpreter with --engine-python"
        )
    else:
        problems += _version_problems(deployment, found.vllm)
    if found.nixl is None:
        problems.append(f"NIXL is not installed for {found.path}: install the distribution nixl of the same platform")
    if deployment.spec.kv_transfer.connector is Connector.VERIFIED and not found.connector:
        problems.append(
            f"the plugin pd_connector is not installed for {found.path}, and spec.kvTransfer.connector is Verified: "
            "install pd-operator there, or set spec.kvTransfer.connector to Stock"
        )
    return tuple(problems)


def _version_problems(deployment: PDDeployment, text: str) -> list[str]:
    version = version_of(text)
    if version is None or not is_supported(version):
        return [f"vLLM {text} is installed, which is not supported; install one of {SUPPORTED_TEXT}"]
    wanted = deployment.spec.engine.vllm_version
    if wanted is not None and version_of(wanted) != version:
        return [
            f"spec.engine.vllmVersion is {wanted} and vLLM {text} is installed: "
            f"set the field to {version_text(version)} or leave it out"
        ]
    return []
