"""Which configurations refuse to start, each with a sentence that says what to change.

vLLM reads `kv_connector_extra_config` with defaults and ignores what it does not know, so a misspelt key or a flag on a
device that can't use it fails in silence and costs a day. All problems are returned at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pd_wire import names
from pd_wire.lease import DEFAULT_SECONDS, DEFAULT_SHARE, MAX_SECONDS

EXPIRY_MARGIN_SECONDS: Final = 5
"""P declines a read this long before the deadline, so a shorter lease can never be used."""
_PUSH_KEYS: Final = ("push_registration_timeout", "transfer_mode")
_ANY_ADDRESS: Final = ("", "0.0.0.0", "::", "*")
# vLLM draws a version-4 UUID when no engine id is configured, and appends the data-parallel rank.
_DRAWN_ENGINE_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}(_dp\d+)*")


class HandleInStream(StrEnum):
    """Whether streamed answers of this engine carry the handle."""

    NATIVE = "vLLM does it"
    PATCHED = "patched by the plugin"
    NOT_IN_MESSAGES = "vLLM does it, but not in messages"
    """From 0.33 on, where the API server has not loaded the plugin."""
    MISSING = "missing"
    UNKNOWN = "unknown"
    """The API server can't be seen from here (another machine started the engine)."""


class ConfigurationRefused(ValueError):
    """The engine must not start with this configuration."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What of vLLM's configuration decides about a start."""

    connector: str | None
    role: str | None
    engine_id: str | None
    buffer_device: str | None
    device: str
    """The platform's device type: cpu, cuda, …"""
    extra: Mapping[str, Any]
    side_channel_host: str | None = None
    """Address that peers are told to dial; ``None`` when it isn't known yet."""
    stream: HandleInStream = HandleInStream.UNKNOWN
    rust_frontend: bool = False


def configuration_faults(config: Configuration) -> list[str]:
    """Every reason not to start, as sentences; an empty list means that the engine may start."""
    faults = [*_connector_faults(config), *_key_faults(config.extra), *_value_faults(config.extra)]
    if config.engine_id is not None and not _DRAWN_ENGINE_ID.fullmatch(config.engine_id):
        faults.append(
            f"engine_id {config.engine_id!r} is fixed in --kv-transfer-config: remove it, because an engine that "
            "restarts with the same id is taken by its peers for the old memory"
        )
    if config.side_channel_host in _ANY_ADDRESS:
        faults.append(
            f"VLLM_NIXL_SIDE_CHANNEL_HOST is {config.side_channel_host!r}, which no peer can dial: set it to this "
            "pod's own address"
        )
    if config.extra.get("bidirectional_kv_xfer") is True:
        faults += _bidirectional_faults(config)
    return faults


def _connector_faults(config: Configuration) -> list[str]:
    if config.connector and "push" in config.connector.lower():
        return [
            f"kv_connector {config.connector} pushes KV: use {names.CONNECTOR_CLASS}, reading back needs the pull mode"
        ]
    if config.role not in names.KV_ROLES.values():
        roles = " or ".join(sorted(names.KV_ROLES.values(), reverse=True))
        return [f"kv_role must be {roles}, got {config.role!r}"]
    return []


def _key_faults(extra: Mapping[str, Any]) -> list[str]:
    faults = []
    for key in sorted(str(key) for key in extra if key not in names.EXTRA_CONFIG_KEYS):
        if key in _PUSH_KEYS:
            faults.append(
                f"kv_connector_extra_config.{key} belongs to the push connector: remove it, only pull is supported"
            )
            continue
        near = difflib.get_close_matches(key, names.EXTRA_CONFIG_KEYS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(sorted(names.EXTRA_CONFIG_KEYS))}"
        faults.append(f"kv_connector_extra_config.{key} is unknown and vLLM would ignore it: {hint}")
    return faults


def _value_faults(extra: Mapping[str, Any]) -> list[str]:
    faults = []
    for key in ("bidirectional_kv_xfer", "enforce_handshake_compat"):
        if not isinstance(extra.get(key, False), bool):
            faults.append(f"kv_connector_extra_config.{key} must be true or false, got {extra[key]!r}")
    retention = extra.get(names.RETENTION_OPTION, names.MODE_PINNED)
    if retention not in names.RETENTIONS:
        allowed = " or ".join(names.RETENTIONS)
        faults.append(f"kv_connector_extra_config.{names.RETENTION_OPTION} must be {allowed}, got {retention!r}")
    faults += _lease_faults(extra, retention)
    threshold = extra.get("kv_recompute_threshold", 64)
    if isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0:
        faults.append(f"kv_connector_extra_config.kv_recompute_threshold must be tokens from 0, got {threshold!r}")
    ttl = extra.get("decoder_kv_blocks_ttl", 480)
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not EXPIRY_MARGIN_SECONDS < ttl < float("inf"):
        faults.append(
            f"kv_connector_extra_config.decoder_kv_blocks_ttl must be more than {EXPIRY_MARGIN_SECONDS} seconds, "
            f"because P declines reads that close to the end, got {ttl!r}"
        )
    backends = extra.get("backends", ["UCX"])
    if not isinstance(backends, list) or not backends or not all(isinstance(name, str) and name for name in backends):
        faults.append(f'kv_connector_extra_config.backends must be a list such as ["UCX"], got {backends!r}')
    return faults


def _lease_faults(extra: Mapping[str, Any], retention: Any) -> list[str]:
    faults = []
    for key in (names.LEASE_SECONDS_OPTION, names.LEASE_SHARE_OPTION):
        if key in extra and retention != names.MODE_LEASED:
            faults.append(
                f"kv_connector_extra_config.{key} means nothing without {names.RETENTION_OPTION} {names.MODE_LEASED}: "
                "set that, or remove it"
            )
    seconds = extra.get(names.LEASE_SECONDS_OPTION, DEFAULT_SECONDS)
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not 1 <= seconds <= MAX_SECONDS:
        faults.append(
            f"kv_connector_extra_config.{names.LEASE_SECONDS_OPTION} must be whole seconds from 1 to {MAX_SECONDS}, "
            f"got {seconds!r}"
        )
    share = extra.get(names.LEASE_SHARE_OPTION, DEFAULT_SHARE)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share < 1:
        faults.append(
            f"kv_connector_extra_config.{names.LEASE_SHARE_OPTION} must be a part of all blocks, more than 0 and less "
            f"than 1, got {share!r}"
        )
    return faults


def _bidirectional_faults(config: Configuration) -> list[str]:
    faults = []
    if config.device != "cpu" and config.buffer_device == "cpu":
        faults.append(
            f"kv_buffer_device cpu on a {config.device} platform can't read KV back: set kv_buffer_device to "
            f"{config.device}, or bidirectional_kv_xfer to false"
        )
    if config.role != names.KV_ROLES[names.ROLE_DECODE]:
        # Only a decode engine's stream has to carry the handle.
        return faults
    native = config.stream in (HandleInStream.NATIVE, HandleInStream.NOT_IN_MESSAGES)
    if config.rust_frontend and not native:
        faults.append(
            "VLLM_USE_RUST_FRONTEND replaces the API server that this plugin patches, and this vLLM does not put the "
            "handle into streamed answers: unset it, use vLLM 0.33, or set bidirectional_kv_xfer to false"
        )
    elif config.stream is HandleInStream.MISSING:
        faults.append(
            "the API server process has not loaded the plugin, so streamed answers would carry no handle: start it "
            "with the same --kv-transfer-config and PYTHONPATH as the engine and without "
            "--disable-hybrid-kv-cache-manager, or use vLLM 0.33"
        )
    return faults
