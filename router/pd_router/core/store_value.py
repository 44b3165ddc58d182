"""How keys and handles are written in a shared store, and what is made of what is read there.

Separate from the client because a store that others can write to is not believed: whatever stands in it, reading it
gives an entry that passes the checks of an engine's answer, or `DamagedEntry`. An entry is one line that the scripts
read (`store_scripts`), a seal, one line of JSON about the holder, and the handle as its engine wrote it. The seal is a
MAC over the rest, the keys included: nobody without the routers' key can make an entry, or lay a tenant's under the
key of another (IS-03).
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import orjson

from pd_router.core.cutting import Handle
from pd_router.core.store import Entry
from pd_wire import lease
from pd_wire.handle import decoder_handle_fault

_PREFIX_DIGITS: Final = 12
_SINGLE: Final = b"1"
_SHARED: Final = b"2"
"""Marks that the scripts read: whether a take removes the entry."""


Seal = Callable[[bytes], bytes]
"""`Keyring.seal` of the routers' key."""


class DamagedEntry(ValueError):
    """What stands in the store is no entry of ours."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry as it was read, before this router has said what it thinks of its holder."""

    handle: Handle
    holder: str
    identity: str
    generation: str
    inexact: str | None
    behind: int
    writer: str
    lease: str


def prefix(realm: str, run: str) -> bytes:
    """What the keys of one deployment on one server process begin with.

    With another process everything begins anew: a replica that took over, or a server that read its file, may not know
    what was taken last, and has another clock (HL-03).

    Args:
        realm: names the deployment.
        run: the server's `run_id`.
    """
    digest = hashlib.blake2b(f"{len(realm)}:{realm}{run}".encode(), digest_size=8).hexdigest()
    return f"pd:{digest[:_PREFIX_DIGITS]}:".encode()


def key_name(key: bytes) -> bytes:
    """A store key in printable characters: its mark and its MAC."""
    return key[:1] + base64.urlsafe_b64encode(key[1:]).rstrip(b"=")


def write_entry(
    entry: Entry, names: list[bytes], era: int, arrived_ms: int, sent_ms: int, writer: str, seal: Seal
) -> bytes:
    """One entry. `names`: of its keys. Times are the server's, in ms."""
    head = b"|".join(
        (_SHARED if entry.shared else _SINGLE, b"%d" % era, b"%d" % arrived_ms, b"%d" % sent_ms, b",".join(names))
    )
    about = {
        "holder": entry.holder,
        "identity": entry.identity,
        "generation": entry.generation,
        "inexact": entry.inexact,
        "behind": entry.behind,
        "writer": writer,
        "lease": entry.lease,
    }
    rest = b"\n".join((orjson.dumps(about), entry.raw))
    return b"\n".join((head, seal(head + rest), rest))


def read_entry(value: bytes, name: bytes, seal: Seal) -> Stored:
    """What `write_entry` wrote, found by the key of that name. Raises DamagedEntry."""
    head, _, sealed = value.partition(b"\n")
    mac, _, rest = sealed.partition(b"\n")
    if not hmac.compare_digest(mac, seal(head + rest)):
        raise DamagedEntry("no router with this key wrote it")
    if name not in head.rpartition(b"|")[2].split(b","):
        raise DamagedEntry("it lies under a key that is not its own")
    line, _, raw = rest.partition(b"\n")
    try:
        about, parsed = orjson.loads(line), orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise DamagedEntry("its JSON cannot be read") from error
    if not isinstance(about, dict) or not isinstance(parsed, dict):
        raise DamagedEntry("it is no object")
    if decoder_handle_fault(parsed) is not None:
        raise DamagedEntry("its handle is malformed")
    handle = Handle(parsed)
    handle.raw = raw
    inexact = about.get("inexact")
    if inexact is not None and not isinstance(inexact, str):
        raise DamagedEntry("inexact is no text")
    behind = about.get("behind")
    if type(behind) is not int or behind < 0:
        raise DamagedEntry("behind is no count")
    return Stored(
        handle,
        _text(about, "holder"),
        _text(about, "identity"),
        _text(about, "generation"),
        inexact,
        behind,
        _text(about, "writer"),
        str(lease.parse(about.get("lease")) or ""),
    )


def read_lease(head: bytes) -> tuple[str, str] | None:
    """Holder and lease of an entry, from its beginning; None where it has none, or where that is not to be read.

    Nothing is believed: who can write to the store can make a router ask a holder to end a promise whose token it
    knows, and could do so itself.
    """
    lines = head.split(b"\n", 3)
    if len(lines) < 4:
        return None
    try:
        about = orjson.loads(lines[2])
    except orjson.JSONDecodeError:
        return None
    found = lease.parse(about.get("lease")) if isinstance(about, dict) else None
    holder = about.get("holder") if found is not None else None
    return (holder, str(found)) if isinstance(holder, str) else None


def _text(about: dict[str, Any], name: str) -> str:
    value = about.get(name)
    if not isinstance(value, str):
        raise DamagedEntry(f"{name} is no text")
    return value
