"""`/status`, `/debug/explain` and `/debug/fleet` of a router with several workers, from what each of them says.

Separate from the metrics, which are numbers with one rule each. The shapes are those of a single process, so whoever
reads them need not know how many there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

Page = Mapping[str, Any]


def merge_status(reuse: bool, started: float, pages: Sequence[Page], funnel: Mapping[str, int]) -> dict[str, Any]:
    """One `/status`.

    Args:
        reuse: whether it is on.
        started: the router's start, as Unix time.
        pages: of each worker that answers.
        funnel: counted over all workers since the start, ended ones included.
    """
    engines: dict[str, dict[str, Any]] = {}
    for page in pages:
        for engine in page["engines"]:
            known = engines.setdefault(engine["engine"], dict(engine))
            known["ready"] = known["ready"] and engine["ready"]
            known["draining"] = known["draining"] or engine["draining"]
            if not known["retention"]:  # a worker that has kept no handle of it does not know
                known["retention"], known["fallback"] = engine["retention"], engine["fallback"]
    for known in engines.values():
        # A worker that has not found an engine yet sends it nothing.
        known["ready"] = known["ready"] and all(
            any(engine["engine"] == known["engine"] for engine in page["engines"]) for page in pages
        )
    leases: Counter[str] = Counter()
    for page in pages:
        leases.update(page["leases"])
    merged: dict[str, Any] = {
        "reuse": "on" if reuse else "off",
        "started": started,
        "engines": list(engines.values()),
        "funnel": dict(funnel),
        "leases": leases,
        "workers": len(pages),
    }
    discoveries = [page["discovery"] for page in pages if "discovery" in page]
    return {**merged, "discovery": _worst(discoveries)} if discoveries else merged


def _worst(discoveries: Sequence[Page]) -> Page:
    """The worker that knows least about the pods: one that has not listed them, is in trouble, or listed them first."""
    return max(
        discoveries,
        key=lambda one: (not one["listed"], one["trouble"] is not None, one["list_age"] or 0.0),
    )


def merge_decisions(pages: Mapping[int, Sequence[Page]], kept: int) -> list[dict[str, Any]]:
    """The last decisions of all workers, oldest first as each of them has it; each says which worker's it is.

    Args:
        pages: by worker.
        kept: how many to give.
    """
    found = [{**item, "worker": worker} for worker, page in pages.items() for item in page]
    found.sort(key=lambda item: item["ended_at"])
    return found[-kept:]


def merge_fleets(pages: Mapping[int, Sequence[Page]]) -> list[dict[str, Any]]:
    """Engines as each worker sees them: load and breakers are each worker's own."""
    return [{**item, "worker": worker} for worker, page in pages.items() for item in page]
