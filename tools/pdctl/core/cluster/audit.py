"""Read the API server's audit log: who did what. Tests count writes and collect verbs with it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

WRITE_VERBS: Final = frozenset({"create", "update", "patch", "delete", "deletecollection"})
ANSWERED: Final = "ResponseComplete"


@dataclass(frozen=True, slots=True)
class AuditEvent:
    """One stage of one request. ``resource`` is `resource.group/subresource`, with group and subresource where any."""

    stage: str
    user: str
    user_agent: str
    verb: str
    resource: str
    namespace: str
    name: str
    code: int
    uri: str
    at: str
    message: str = ""
    """What the client was told, where it was refused."""

    @property
    def is_write(self) -> bool:
        """Did it ask for a change that was not a dry run?"""
        return self.verb in WRITE_VERBS and "dryRun=" not in self.uri

    @property
    def answered(self) -> bool:
        """Is this the last stage? A watch has an earlier one, too, when it begins."""
        return self.stage == ANSWERED


def parse_events(lines: Iterable[bytes | str]) -> list[AuditEvent]:
    """Events of JSON lines. A last line without an end of line must be kept back by the caller."""
    return [_parse(json.loads(line)) for line in lines if line.strip()]


def _parse(raw: dict[str, Any]) -> AuditEvent:
    target = raw.get("objectRef") or {}
    resource = target.get("resource", "")
    if group := target.get("apiGroup"):
        resource += f".{group}"
    if subresource := target.get("subresource"):
        resource += f"/{subresource}"
    return AuditEvent(
        stage=raw["stage"],
        user=(raw.get("user") or {}).get("username", ""),
        user_agent=raw.get("userAgent", ""),
        verb=raw["verb"],
        resource=resource,
        namespace=target.get("namespace", ""),
        name=target.get("name", ""),
        code=(raw.get("responseStatus") or {}).get("code", 0),
        uri=raw["requestURI"],
        at=raw["stageTimestamp"],
        message=(raw.get("responseStatus") or {}).get("message", ""),
    )
