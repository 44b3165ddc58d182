"""Named deployments that several test modules share, because each costs the start of a router."""

from __future__ import annotations

from support.deployment import Spec

STOCK = Spec(mode="stock")
"""One pair with vLLM's own connector."""

TWO_BY_TWO = Spec(prefills=2, decodes=2)
"""Two pairs, patient timeouts."""

QUICK = Spec(
    prefills=2,
    decodes=2,
    flags=(
        ("--pull-timeout", "0.6"),
        ("--prefill-timeout", "1.0"),
        ("--first-byte-timeout", "1.0"),
        ("--answer-timeout", "1.0"),
        ("--idle-timeout", "0.6"),
    ),
)
"""Two pairs behind a router that loses patience at once: for engines that fall silent."""

WATCHED = Spec(prefills=2, decodes=2, flags=(*QUICK.flags, ("--probe-timeout", "0.3")))
"""`QUICK`, and a health probe that is late after 0.3 s: for engines whose health falls silent too."""

NARROW = Spec(
    flags=(("--handle-ttl", "0.6"), ("--max-inflight", "1"), ("--max-queue", "1"), ("--max-body-bytes", "20000"))
)
"""One turn at a time, one waiting, small bodies, handles that are soon too old."""

NARROW_STOCK = Spec(mode="stock", flags=NARROW.flags)

NEVER_PULLS = Spec(connector=(("recompute_threshold", 1_000_000),))
"""Prefill takes every handle and finds no overlap worth a transfer."""
