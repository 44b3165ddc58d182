"""The self-test's checks that touch the world: installed packages, vLLM's files, NIXL's backends."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pd_connector import compat
from pd_connector.core.backend_log import failure_reason, network_fault
from pd_connector.core.startup import Configuration, HandleInStream, configuration_faults
from pd_connector.core.verdicts import Check
from pd_wire import names

BACKEND_SECONDS: Final = 120
"""Longest wait for one backend: some wait for a device that never comes instead of failing."""
_NIXL_DISTRIBUTIONS: Final = ("nixl", "nixl-cu13", "nixl-cu12")


def check_vllm() -> Check:
    """Whether the installed vLLM is a supported release."""
    try:
        version = compat.installed_version()
        compat.require_supported(version)
    except ImportError as error:
        return Check("vLLM", fault=str(error))
    return Check("vLLM", version)


def check_nixl() -> Check:
    """Whether NIXL's Python package can be imported."""
    try:
        importlib.import_module("nixl._api")
    # A wheel for another CUDA or libc fails with OSError as well as ImportError.
    except (ImportError, OSError) as error:
        return Check("NIXL", fault=f"can't be imported: {error}. Install nixl in the engine's image")
    versions = (f"{name} {metadata.version(name)}" for name in _NIXL_DISTRIBUTIONS if _is_installed(name))
    return Check("NIXL", ", ".join(versions) or "version unknown")


def found_versions() -> dict[str, str]:
    """The installed versions of vLLM and NIXL, as far as they are known."""
    nixl = next((metadata.version(name) for name in _NIXL_DISTRIBUTIONS if _is_installed(name)), "")
    return {names.FOUND_VLLM: compat.installed_version(), names.FOUND_NIXL: nixl}


def check_hooks() -> Check:
    """Whether vLLM's pull scheduler has the methods that the plugin overrides and calls."""
    name = "pull connector's hooks"
    try:
        module = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler")
    except ImportError as error:
        return Check(name, fault=f"vLLM's pull connector can't be imported: {error}")
    faults = compat.hook_faults(module.NixlPullConnectorScheduler)
    return Check(name, f"{len(compat.SCHEDULER_HOOKS)} as expected", "; ".join(faults) or None)


def check_stream(version: tuple[int, int]) -> Check:
    """Whether streamed answers will carry the handle: by vLLM itself, or because its generators can be patched.

    The API server's modules are read, not imported: that would take as long as starting the server.
    """
    name = "handle in streamed answers"
    native = compat.handle_in_stream(version)
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "").lower() in ("1", "true"):
        if native:
            return Check(name, HandleInStream.NOT_IN_MESSAGES.value)
        return Check(name, fault="VLLM_USE_RUST_FRONTEND is set: the plugin can't patch that server; unset it")
    faults = [fault for target in compat.stream_targets(version) if (fault := _target_fault(target))]
    seen = HandleInStream.NATIVE if native else HandleInStream.PATCHED
    return Check(name, seen.value, "; ".join(faults) or None)


def check_backend(backend: str) -> Check:
    """Whether NIXL can create this backend here, with the real reason when it can't."""
    name = f"NIXL backend {backend}"
    environ = {**os.environ, "NIXL_LOG_LEVEL": "INFO"}
    command = [sys.executable, "-m", "pd_connector.shell.nixl_probe", backend]
    try:
        done = subprocess.run(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BACKEND_SECONDS
        )
    except subprocess.TimeoutExpired:
        return Check(
            name, fault=f"was not created within {BACKEND_SECONDS} s: is its device visible in this container?"
        )
    if done.returncode != 0:
        return Check(name, fault=failure_reason(done.stdout, backend))
    return Check(name, "created", network_fault(done.stdout, os.environ.get("FI_PROVIDER")))


def check_configuration(text: str) -> Check:
    """Whether the engine would start with this value of ``--kv-transfer-config``."""
    name = "--kv-transfer-config"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return Check(name, fault=f"is not JSON: {error}")
    if not isinstance(value, dict):
        return Check(name, fault="must be a JSON object")
    faults = configuration_faults(_configuration(value))
    if value.get("kv_connector") != names.CONNECTOR_CLASS:
        faults.insert(0, f"kv_connector must be {names.CONNECTOR_CLASS}, got {value.get('kv_connector')!r}")
    if value.get("kv_connector_module_path") != names.CONNECTOR_MODULE:
        found = value.get("kv_connector_module_path")
        faults.append(f"kv_connector_module_path must be {names.CONNECTOR_MODULE}, got {found!r}")
    return Check(name, "accepted", "; ".join(faults) or None)


def _configuration(value: dict[str, Any]) -> Configuration:
    from vllm.platforms import current_platform

    extra = value.get("kv_connector_extra_config")
    return Configuration(
        connector=value.get("kv_connector"),
        role=value.get("kv_role"),
        engine_id=value.get("engine_id"),
        buffer_device=value.get("kv_buffer_device", current_platform.device_type),
        device=current_platform.device_type,
        extra=extra if isinstance(extra, dict) else {},
    )


def _target_fault(target: compat.StreamTarget) -> str | None:
    spec = importlib.util.find_spec(target.module)
    if spec is None or spec.origin is None:
        return f"{target.module} does not exist"
    for item in ast.walk(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))):
        if isinstance(item, ast.ClassDef) and item.name == target.owner:
            for method in item.body:
                if isinstance(method, ast.AsyncFunctionDef) and method.name == target.method:
                    taken = [argument.arg for argument in method.args.args]
                    return None if target.source in taken else f"{target.method} takes no {target.source}"
    return f"{target.module} has no {target.owner}.{target.method}"


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
