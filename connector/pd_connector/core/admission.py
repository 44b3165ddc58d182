"""What a request that arrives with KV parameters may do: the decision before vLLM's own code sees them.

vLLM trusts the parameters: it never compares tokens, tests keys for presence only, and asserts in the worker when block
lists do not fit. So the parameters are judged once, on arrival, and replaced by ones that vLLM's hooks can take:

* a prefill request (P) may pull the leading blocks whose tokens are proven, or nothing;
* a decode request (D) may pull a prefill handle of the right shape, or computes its prompt itself;
* of blocks that the holder does not keep (Unpinned), what is proven may be offered, and the holder is asked before and
  after the read which of them are still intact: the hooks do that, the admission says that they must;
* anything else is no transfer at all, whatever the parameters hold (HL-09).

Whenever a holder that keeps its blocks is named and nothing will be read, it gets a release notice, so that it does not
keep them until their lease ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pd_connector.core.spent import SpentHandles
from pd_wire import moment, names, proof
from pd_wire.handle import (
    address_fault,
    decoder_handle_fault,
    group_count,
    is_unpinned,
    prefill_handle_fault,
)
from pd_wire.moment import Moment
from pd_wire.report import Verdict


class Leg(StrEnum):
    """What the router wants from this engine."""

    NONE = "none"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Engine:
    """What is fixed from the engine's start."""

    block_tokens: int
    """Tokens per KV block."""
    groups: int
    """KV cache groups that take part in transfers."""
    pull_obstacle: str | None = None
    """Why this engine can't read a decode engine's blocks at all (flag off, host buffer), or ``None``."""
    unpinned_obstacle: str | None = None
    """Why this engine can't read blocks that the holder does not keep, or ``None``."""
    proof_obstacle: str | None = None
    """Why block positions and tokens don't line up here (context parallelism), or ``None``."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The request's prompt as this engine tokenised it."""

    tokens: Sequence[int]
    scope: bytes = b""
    obstacle: str | None = None
    """Why this request may not load KV, or ``None``."""
    length: int | None = None
    """Prompt positions to be loaded from P on the decode leg; ``None`` means all of ``tokens``."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The decision. ``params`` is what vLLM may see; ``declined`` is the same request without a pull."""

    leg: Leg
    params: dict[str, Any] | None
    declined: dict[str, Any] | None = None
    may_pull: bool = False
    notify: bool = False
    """A reachable holder keeps blocks for this request and must hear when it may free them."""
    retain: bool = True
    """Decode leg: keep the blocks after the turn."""
    verdict: Verdict | None = None
    """Prefill leg with a handle: how far it got; ``None`` when no handle was given."""
    reason: str = ""
    proven_tokens: int = 0
    moment: Moment | None = None
    """The holder keeps nothing: ask it which blocks are as they were then."""


NOTHING: Final = Admission(Leg.NONE, None)
_HOLDER_KEYS: Final = ("remote_engine_id", "remote_request_id", "remote_block_ids")


def leg_of(raw: Any) -> Leg:
    """Which leg the parameters ask for. Both flags, none, or anything but booleans is no leg."""
    if not isinstance(raw, Mapping):
        return Leg.NONE
    prefill, decode = raw.get("do_remote_decode"), raw.get("do_remote_prefill")
    if prefill is True and not decode:
        return Leg.PREFILL
    if decode is True and not prefill:
        return Leg.DECODE
    return Leg.NONE


def admit(raw: Any, prompt: Prompt, engine: Engine, spent: SpentHandles) -> Admission:
    """Judge the parameters of an arriving request.

    Args:
        raw: what stands in the request under ``kv_transfer_params``, any type.
        prompt: this engine's own view of the prompt.
        engine: what this engine can do.
        spent: handles used before; the one that a prefill request names is added.

    Returns:
        The decision; never raises, whatever ``raw`` is.
    """
    leg = leg_of(raw)
    if leg is Leg.PREFILL:
        return _admit_prefill(raw, prompt, engine, spent)
    if leg is Leg.DECODE:
        return _admit_decode(raw, prompt, engine)
    return NOTHING


def _admit_prefill(raw: Mapping[str, Any], prompt: Prompt, engine: Engine, spent: SpentHandles) -> Admission:
    if all(raw.get(key) is None for key in _HOLDER_KEYS):
        return Admission(Leg.PREFILL, _without_holder(raw))
    unpinned = is_unpinned(raw)
    notify = address_fault(raw) is None and not unpinned
    if notify and not spent.spend(raw["remote_engine_id"], raw["remote_request_id"]):
        # The first use released the blocks: there is nobody to notify either.
        return Admission(
            Leg.PREFILL, _without_holder(raw), verdict=Verdict.UNPROVEN, reason="this engine has used the handle before"
        )
    declined = {**_own_keys_removed(raw), "remote_block_ids": [], "remote_num_tokens": 0}
    if not notify:
        declined = _without_holder(raw)
    verdict, reason, tokens = _judge(raw, prompt, engine)
    if not tokens:
        return Admission(Leg.PREFILL, declined, declined, notify=notify, verdict=verdict, reason=reason)
    return Admission(
        Leg.PREFILL,
        _trimmed(raw, tokens, engine),
        declined,
        may_pull=True,
        notify=notify,
        verdict=verdict,
        reason=reason,
        proven_tokens=tokens,
        moment=moment.parse(raw.get(names.MOMENT_KEY)) if unpinned else None,
    )


def _judge(raw: Mapping[str, Any], prompt: Prompt, engine: Engine) -> tuple[Verdict, str, int]:
    """Verdict, reason, and how many leading tokens may be pulled."""
    fault = decoder_handle_fault(raw)
    if fault is None and group_count(raw) != engine.groups:
        fault = f"remote_block_ids has {group_count(raw)} groups, this engine has {engine.groups}"
    if fault:
        return Verdict.MALFORMED, fault, 0
    obstacle = engine.pull_obstacle or engine.proof_obstacle or prompt.obstacle
    if is_unpinned(raw):
        obstacle = obstacle or engine.unpinned_obstacle
    elif raw.get(names.MODE_KEY) != names.MODE_PINNED:
        modes = " nor ".join((names.MODE_PINNED, names.MODE_UNPINNED, names.MODE_LEASED))
        obstacle = obstacle or f"{names.MODE_KEY} is neither {modes}"
    if obstacle:
        return Verdict.UNPROVEN, obstacle, 0
    try:
        shown = proof.decode(raw.get(names.PROOF_KEY))
    except proof.ProofError as error:
        return Verdict.UNPROVEN, str(error), 0
    if shown.block_tokens != engine.block_tokens:
        sizes = f"{shown.block_tokens} tokens per block there, {engine.block_tokens} here"
        return Verdict.UNPROVEN, f"block sizes differ: {sizes}", 0
    if engine.groups > 1:
        return _judge_whole(raw, shown, prompt)
    return _judge_leading_blocks(raw, shown, prompt, engine)


def _judge_leading_blocks(
    raw: Mapping[str, Any], shown: proof.Proof, prompt: Prompt, engine: Engine
) -> tuple[Verdict, str, int]:
    size = engine.block_tokens
    total: int = raw["remote_num_tokens"]
    if len(raw["remote_block_ids"][0]) != -(-total // size):
        return Verdict.MALFORMED, "remote_block_ids and remote_num_tokens disagree", 0
    whole = min(shown.blocks, total // size)
    possible = min(whole, len(prompt.tokens) // size)
    matching = min(proof.matching_blocks(shown, prompt.tokens, prompt.scope), possible)
    if not matching:
        return Verdict.UNPROVEN, "no block holds the tokens of this prompt", 0
    if matching < possible:
        return Verdict.TRIMMED, f"{matching} of {whole} blocks hold the tokens of this prompt", matching * size
    return Verdict.PROVEN, "", matching * size


def _judge_whole(raw: Mapping[str, Any], shown: proof.Proof, prompt: Prompt) -> tuple[Verdict, str, int]:
    # A window or state group holds what belongs to exactly one position, so it can't be cut; and the reader must
    # compute at least one token after it, because a state can't be rolled back to sample from it.
    total: int = raw["remote_num_tokens"]
    if shown.tokens != total:
        return Verdict.UNPROVEN, "the proof does not reach the end of the blocks, and several groups can't be cut", 0
    if len(prompt.tokens) <= total:
        return Verdict.UNPROVEN, "the prompt ends inside the blocks, and several groups can't be cut", 0
    if not proof.covers_all(shown, prompt.tokens, prompt.scope):
        return Verdict.UNPROVEN, "not every token matches, and several groups can't be cut", 0
    return Verdict.PROVEN, "", total


def _trimmed(raw: Mapping[str, Any], tokens: int, engine: Engine) -> dict[str, Any]:
    groups = [list(group) for group in raw["remote_block_ids"]]
    if engine.groups == 1:
        groups = [groups[0][: tokens // engine.block_tokens]]
    return {**_own_keys_removed(raw), "remote_num_tokens": tokens, "remote_block_ids": groups}


def _admit_decode(raw: Mapping[str, Any], prompt: Prompt, engine: Engine) -> Admission:
    retain = raw.get(names.RETAIN_KEY) is not False
    fault = prefill_handle_fault(raw) or _misfit(raw, prompt, engine)
    notify = address_fault(raw) is None
    local = _without_holder(raw) if not notify else {**_own_keys_removed(raw), "remote_block_ids": []}
    local.update(do_remote_prefill=False, do_remote_decode=False)
    if fault:
        return Admission(Leg.DECODE, local, local, notify=notify, retain=retain, reason=fault)
    # vLLM itself tells P when it has read, or needs nothing: no notice of ours.
    return Admission(Leg.DECODE, _own_keys_removed(raw), local, may_pull=True, retain=retain)


def _misfit(raw: Mapping[str, Any], prompt: Prompt, engine: Engine) -> str | None:
    """Why P's blocks can't be laid over this prompt position by position, or ``None``."""
    groups = raw["remote_block_ids"]
    if len(groups) != engine.groups:
        return f"remote_block_ids has {len(groups)} groups, this engine has {engine.groups}"
    size, total = engine.block_tokens, raw["remote_num_tokens"]
    if engine.groups > 1 or engine.proof_obstacle or len(groups[0]) != -(-total // size):
        # Other block sizes and layouts are for vLLM to map; it does so without assertions.
        return None
    wanted = len(prompt.tokens) if prompt.length is None else prompt.length
    if -(-wanted // size) != len(groups[0]):
        return f"P computed {total} tokens, this prompt needs {wanted}"
    return None


def _own_keys_removed(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if not str(key).startswith(names.OWN_PREFIX)}


def _without_holder(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _own_keys_removed(raw).items() if not str(key).startswith("remote_")}
