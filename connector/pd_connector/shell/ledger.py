"""What the plugin remembers about each live request with KV parameters.

Separate from the hooks so that they hold no state of their own: an entry is made on arrival and goes when vLLM's
scheduler forgets the request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from vllm.logger import init_logger

from pd_connector.core.admission import Admission
from pd_connector.core.progress import Completions, Event, IllegalTransition, Progress, admit_completions, step
from pd_connector.shell.asking import Asked
from pd_wire.report import READ_FAILED, Report

logger = init_logger("vllm.pd_connector")


@dataclass(slots=True)
class Entry:
    """One request. ``request`` is vLLM's object; its token counts are read when a read is over."""

    request: Any
    admission: Admission
    progress: Progress = Progress.WAITING
    local_tokens: int = 0
    """Prompt tokens that the engine's own prefix cache had when vLLM last asked."""
    offered_tokens: int = 0
    """Prompt tokens that vLLM allocated blocks for, to be read."""
    pulled_tokens: int = 0
    load_failed: bool = False
    asked: Asked | None = None
    """The holder is being asked what of its blocks is intact."""
    gone_tokens: int = 0
    """Proven, but the holder had reused the blocks before the read."""
    wasted_tokens: int = 0
    """Read, but the holder reused the blocks meanwhile."""

    def report(self) -> Report | None:
        """What P tells the router about the handle that it was given, or ``None`` without one."""
        admission = self.admission
        if admission.verdict is None:
            return None
        reason = admission.reason
        if self.load_failed:
            reason = READ_FAILED
        elif self.wasted_tokens:
            reason = "the holder reused blocks while they were read"
        elif admission.may_pull and not self.pulled_tokens:
            reason = "nothing left to read: in the local cache, or below kv_recompute_threshold"
        return Report(
            admission.verdict,
            reason,
            admission.proven_tokens,
            self.local_tokens,
            self.pulled_tokens,
            self.gone_tokens,
            self.wasted_tokens,
        )


class Ledger:
    """Entries by request id. Used by the scheduler's thread only."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def add(self, request: Any, admission: Admission) -> Entry:
        entry = Entry(request, admission)
        self._entries[request.request_id] = entry
        return entry

    def get(self, request_id: str) -> Entry | None:
        return self._entries.get(request_id)

    def advance(self, entry: Entry, event: Event) -> None:
        """Move an entry; forget it when vLLM does."""
        try:
            entry.progress = step(entry.progress, event)
        except IllegalTransition:
            # Raising here would end the engine, which is what the guards are there to prevent.
            logger.exception("Unexpected order of hooks for %s; vLLM's own view stands", entry.request.request_id)
            return
        if entry.progress is Progress.GONE:
            self._entries.pop(entry.request.request_id, None)

    def admit_completions(
        self, received: Iterable[str], sent: Iterable[str], failed: Collection[str] | None = None
    ) -> Completions:
        """Check one step's completions and move the entries that the kept ones concern.

        Args:
            received: requests whose read is over.
            sent: requests whose blocks were read, or whose lease ended.
            failed: those of ``received`` whose transfer failed; ``None`` where this vLLM doesn't say.
        """
        states = {request_id: entry.progress for request_id, entry in self._entries.items()}
        result = admit_completions(states, received, sent)
        for request_id in result.received:
            entry = self._entries[request_id]
            # vLLM has already cut the count to what was loaded when a read failed.
            entry.pulled_tokens = max(0, int(entry.request.num_computed_tokens) - entry.local_tokens)
            if entry.admission.moment is None or failed is None:
                entry.load_failed = not entry.pulled_tokens
            else:
                # Blocks that were overwritten are reported to vLLM as failed loads, too, but the transfer was well.
                entry.load_failed = request_id in failed
                entry.wasted_tokens = 0 if entry.load_failed else entry.offered_tokens - entry.pulled_tokens
        for request_id, progress in result.states.items():
            self._entries[request_id].progress = progress
            if progress is Progress.GONE:
                del self._entries[request_id]
        return result
