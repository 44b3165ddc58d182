"""The body of a request to `/pd/v1/leases`: what it must look like, and what is said about one that does not.

Separate from the server so that every malformed body can be tested. Keys that nobody knows are ignored, so that a later
router may say more; a known key with another type is refused, never guessed.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from pd_connector.core.lease_message import NewEnd
from pd_wire.lease import MAX_BATCH, MAX_SECONDS, TOKEN_DIGITS

MAX_BYTES: Final = 128 << 10
_TOKEN: Final = re.compile(rf"[0-9a-f]{{{TOKEN_DIGITS}}}")


class Refused(ValueError):
    """The request can't be taken; ``status`` and ``param`` stand in the answer."""

    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status

    def body(self) -> bytes:
        """The answer's body, in the shape of vLLM's own errors."""
        kinds = {400: "BadRequestError", 503: "ServiceUnavailableError"}
        kind = kinds.get(self.status, "InvalidRequestError")
        error = {"message": str(self), "type": kind, "param": self.param, "code": self.status}
        return json.dumps({"error": error}).encode()


def parse(body: bytes) -> list[NewEnd]:
    """Read a request's body.

    Raises:
        Refused: whatever else ``body`` is; the message names the field.
    """
    if len(body) > MAX_BYTES:
        raise Refused(f"the body may have {MAX_BYTES} bytes", status=413)
    try:
        value = json.loads(body)
    # Bytes that are no text and numbers that are too long are ValueErrors; brackets may be nested without end.
    except (ValueError, RecursionError) as error:
        raise Refused("the body is not JSON") from error
    items = value.get("leases") if isinstance(value, dict) else None
    if not isinstance(items, list):
        raise Refused('the body must be an object with a list, {"leases": [...]}', "leases")
    if not 1 <= len(items) <= MAX_BATCH:
        raise Refused(f"leases must have 1 to {MAX_BATCH} items, got {len(items)}", "leases")
    return [_item(item, f"leases[{place}]") for place, item in enumerate(items)]


def _item(item: Any, where: str) -> NewEnd:
    if not isinstance(item, dict):
        raise Refused(f"{where} must be an object", where)
    token, seconds = item.get("token"), item.get("seconds")
    # The value itself is not shown: a token that is nearly right may be somebody's.
    if not isinstance(token, str) or not _TOKEN.fullmatch(token):
        raise Refused(f"{where}.token must be {TOKEN_DIGITS} hexadecimal digits in lower case", f"{where}.token")
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not 0 <= seconds <= MAX_SECONDS:
        raise Refused(f"{where}.seconds must be a whole number from 0 to {MAX_SECONDS}", f"{where}.seconds")
    return NewEnd(token, seconds)


def answer(batch: list[NewEnd], left: list[int]) -> bytes:
    """The body of the answer: seconds left per item, in the order of the request."""
    pairs = zip(batch, left, strict=True)
    return json.dumps({"leases": [{"token": item.token, "seconds": seconds} for item, seconds in pairs]}).encode()
