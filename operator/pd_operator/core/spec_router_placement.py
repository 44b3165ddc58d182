"""`spec.router.placement`: which engines serve a turn, and how long a router trusts them.

Separate from the rest of the router's section because these are the settings that a performance engineer turns.
"""

from __future__ import annotations

from pydantic import Field

from pd_operator.core.fields import Seconds, SpecModel


class RouterBypass(SpecModel):
    """Turns that go to decode alone, because it has nearly all of the prompt from the turn before. All limits hold
    together. Such a turn keeps no new handle; the one of the turn before stays good."""

    max_new_tokens: int = Field(
        default=0,
        strict=True,
        ge=0,
        le=1_000_000,
        description="Most tokens that decode would have to compute, as the router estimates them. 0: never.",
    )
    max_new_percent: int = Field(
        default=10, strict=True, ge=1, le=100, description="The same as a share of the prompt, in per cent."
    )
    max_decode_turns: int = Field(
        default=4,
        strict=True,
        ge=0,
        le=100_000,
        description="No bypass while that decode engine serves more turns: its running streams wait while it computes "
        "a prompt.",
    )


class RouterPlacement(SpecModel):
    """How engines are chosen for a turn."""

    decode_overload_turns: int = Field(
        default=4,
        strict=True,
        ge=0,
        le=100_000,
        description="A conversation leaves the decode engine that holds its KV when that one serves more turns than "
        "this beyond those of the least loaded.",
    )
    pair_quarantine_seconds: Seconds = Field(
        default=30,
        description="A prefill and a decode engine between which three transfers failed in a row get none for so "
        "long; then one turn tries. Each failure doubles it, up to 20 times.",
    )
    retry_percent: int = Field(
        default=20,
        strict=True,
        ge=0,
        le=100,
        description="Most turns, in per cent of all, that are tried again in the long run when engines answer with "
        "failures, so that retries do not make an overload worse. Bursts of 50 are allowed, except with 0. Turns whose "
        "engine is gone, or whose handle failed, are tried again in any case.",
    )
    bypass: RouterBypass = Field(default=RouterBypass(), description="When prefill is left out. Off by default.")
