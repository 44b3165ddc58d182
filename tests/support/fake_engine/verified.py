"""What our connector adds to a fake engine: the connector's own decisions, applied to a fake run.

Separate from `connector`, which stays vLLM's rules alone. The decisions are not imitated but imported from
`pd_connector.core`, so that router tests meet the judgement that a real engine makes.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from pd_connector.core.admission import Admission, Engine, Prompt, admit
from pd_connector.core.scope import Shape, proof_obstacle, pull_obstacle, scope_bytes
from pd_connector.core.spent import SpentHandles
from pd_wire import names, proof
from pd_wire.report import READ_FAILED, Report
from support.fake_engine.tokens import IMAGE


class Verifier:
    """Our connector's scheduler side, for one engine process."""

    def __init__(self, block_tokens: int, *, bidirectional: bool) -> None:
        obstacle = None if bidirectional else "bidirectional_kv_xfer is off on this engine"
        self._engine = Engine(block_tokens, groups=1, pull_obstacle=obstacle)
        self._spent = SpentHandles()
        self._key = secrets.token_bytes(proof.KEY_BYTES)

    def judge(self, raw: Any, tokens: Sequence[int], model: str, salt: str) -> Admission:
        """The decision on an arriving request's params."""
        shape = _shape(tokens, model, salt)
        return admit(raw, Prompt(tokens, scope_bytes(shape), pull_obstacle(shape)), self._engine, self._spent)

    def prove(self, tokens: Sequence[int], model: str, salt: str, mode: str) -> dict[str, Any] | None:
        """Keys for the handle of a finished decode turn; None when its blocks could never be used."""
        shape = _shape(tokens, model, salt)
        if proof_obstacle(shape):
            return None
        shown = proof.prove(tokens, self._engine.block_tokens, self._key, scope_bytes(shape))
        if not shown.blocks:
            return None
        return {names.PROOF_KEY: proof.encode(shown), names.MODE_KEY: mode}


def report_of(
    admission: Admission, local: int, pulled: int, gone: int, wasted: int, *, read_failed: bool = False
) -> dict[str, Any] | None:
    """What P's answer says about the handle that it was given; counts in tokens."""
    if admission.verdict is None:
        return None
    reason = admission.reason
    if read_failed:
        reason = READ_FAILED
    elif wasted:
        reason = "the holder reused blocks while they were read"
    elif admission.may_pull and not pulled:
        reason = "nothing left to read: in the local cache, or below kv_recompute_threshold"
    return Report(admission.verdict, reason, admission.proven_tokens, local, pulled, gone, wasted).as_json()


def _shape(tokens: Sequence[int], model: str, salt: str) -> Shape:
    return Shape(
        adapter_name=model, adapter_id=1, cache_salt=salt or None, media_items=sum(token == IMAGE for token in tokens)
    )
