"""What every turn of one router shares: made once at start, passed in, never global."""

from __future__ import annotations

import itertools
import re
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pd_router.core.linking import Keyring
from pd_router.core.passed_health import PassedHealth
from pd_router.core.placement import Loads
from pd_router.core.response_store import Responses
from pd_router.core.retry_budget import RetryBudget
from pd_router.core.settings import Settings
from pd_router.core.store import HandleStore
from pd_router.shell.admission import Admission
from pd_router.shell.fleet import Fleet, Member
from pd_router.shell.guard import Guard
from pd_router.shell.lease_keeper import LeaseKeeper
from pd_router.shell.logs import current
from pd_router.shell.metrics import Metrics
from pd_router.shell.upstream import EnginePool
from pd_router.shell.versions import EngineVersions

if TYPE_CHECKING:
    from pd_router.shell.tracing import Tracing

DECISIONS_KEPT = 512
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


@dataclass(slots=True)
class Context:
    """The parts of one router."""

    settings: Settings
    now: Callable[[], float]
    metrics: Metrics
    pool: EnginePool
    fleet: Fleet
    store: HandleStore
    keyring: Keyring
    admission: Admission
    loads: Loads
    nudge: Callable[[str], None]
    guard: Guard
    leases: LeaseKeeper
    versions: EngineVersions
    responses: Responses
    tracing: Tracing | None = None
    decisions: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=DECISIONS_KEPT))
    passed: PassedHealth = field(default_factory=PassedHealth)
    retries: RetryBudget = field(init=False)
    _request_ids: itertools.count[int] = field(default_factory=itertools.count)
    _prefix: str = field(default_factory=lambda: secrets.token_hex(6))

    def __post_init__(self) -> None:
        self.retries = RetryBudget(self.settings.limits.retry_share)

    def request_id(self, headers: Mapping[str, str]) -> str:
        """The client's X-Request-Id when it is harmless, else one of ours; from here on in what the task logs."""
        given = headers.get("x-request-id", "")
        found = given if _REQUEST_ID.fullmatch(given) else f"pd-{self._prefix}-{next(self._request_ids):x}"
        current.set((found, ""))
        return found

    def models(self) -> frozenset[str]:
        """Names that are served; empty when any may be."""
        return self.settings.models

    def member(self, key: str) -> Member:
        """An engine that a snapshot named."""
        member = self.fleet.member(key)
        assert member is not None
        return member

    def suspect(self, member: Member, *, gone: bool) -> None:
        """An engine could not be reached: look again now, and if nothing listens send it nothing until then."""
        if gone and self.fleet.member(member.key) is member:
            self.fleet.set_ready(member.key, False)
        self.nudge(member.key)
