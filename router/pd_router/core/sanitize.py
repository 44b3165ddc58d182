"""What a client may not say: `kv_transfer_params` in any place and spelling, and our own `pd_` keys (IS-01).

Separate because this is the security boundary of a request and should be readable on one screen. A client that could
set the field would point an engine's network reads at a host of its choice, read another tenant's blocks by number, or
pin blocks for ever. Works on the freshly parsed body, before anything else looks at it.
"""

from __future__ import annotations

from typing import Any, Final

from pd_router.core.fields import CARRIERS, STRIPPED
from pd_wire.names import OWN_PREFIX

_SHORTEST: Final = min(map(len, STRIPPED))
_FIRST_LOST: Final = 2.0**63
"""The smallest magnitude of a float that an integer can have become on parsing."""


def strip_body(body: dict[str, Any], prompt_field: str) -> None:
    """Remove forbidden keys from `body`, in place, everywhere but below `prompt_field` (see `strip_deep`)."""
    bad = [name for name in body if name.startswith(OWN_PREFIX) or is_forbidden(name)]
    for name in bad:
        del body[name]
    for name, value in body.items():
        kind = type(value)
        if (kind is dict or kind is list) and name != prompt_field:
            strip_deep(value)
    for name in CARRIERS:
        carrier = body.get(name)
        if type(carrier) is dict:
            for key in [key for key in carrier if key.startswith(OWN_PREFIX)]:
                del carrier[key]


def strip_deep(value: Any) -> bool:
    """Remove forbidden keys at any depth of `value`, in place. A tool parameter of that name goes too, on purpose.

    Returns:
        Whether there is a number that may have been an integer beyond 64 bits before it was parsed.
    """
    stack = [value]
    lossy = False
    while stack:
        item = stack.pop()
        if type(item) is dict:
            bad = None
            for name, inner in item.items():
                if len(name) >= _SHORTEST and is_forbidden(name):
                    bad = [*(bad or ()), name]
                    continue
                kind = type(inner)
                if kind is dict or kind is list:
                    stack.append(inner)
                elif kind is float and abs(inner) >= _FIRST_LOST:
                    lossy = True
            for name in bad or ():
                del item[name]
        elif type(item) is list:
            stack.extend([inner for inner in item if type(inner) is dict or type(inner) is list])
            lossy = lossy or any(type(inner) is float and abs(inner) >= _FIRST_LOST for inner in item)
    return lossy


def is_forbidden(name: str) -> bool:
    """Whether a key is one of those, however spelt: `KV_Transfer_Params`, `kvTransferParams`, `kv-transfer-params`."""
    if len(name) < _SHORTEST:
        return False
    return name.replace("_", "").replace("-", "").replace(" ", "").casefold() in STRIPPED
