"""Whose turn is this, and under which keys may its conversation's handle lie?

Separate because this is where one tenant is kept from another: a key is a MAC over tenant, scope and id or history, so
that a handle is found only by the principal that left it, under the same prompt-shaping options (IS-03, IS-04). The id
is chosen by the client and proves nothing; what a handle found by it may be used for is `policy`'s question.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from pd_wire.names import ID_FIELDS, ID_HEADERS, TENANT_HEADER

if TYPE_CHECKING:
    from pd_router.core.history import Reply
    from pd_router.core.request import Prepared

ANONYMOUS: Final = "anonymous"
HISTORY: Final = "history"
MIN_SECRET_BYTES: Final = 16
_MAC_BYTES: Final = 16
_CREDENTIALS: Final = ("authorization", "x-api-key")
_RESPONSE: Final = "previous_response_id"
_CONVERSATION_FIELDS: Final = frozenset({"conversation_id", "session_id"})
"""Ids that stand for one conversation from its first turn to its last, so that a client may end it by them."""
_WHOLE: Final = b"c"
"""Mark of what is made from such an id alone."""

_MARKS: Final[Mapping[str, bytes]] = {HISTORY: b"h"} | {name: b"%d" % place for place, name in enumerate(ID_FIELDS)}
"""First byte of a key, so that a key says what it was made from without saying what it is."""
_KINDS: Final[Mapping[bytes, str]] = {mark: kind for kind, mark in _MARKS.items()}
_FIELD_OF: Final[Mapping[str, str]] = {name: name for name in ID_FIELDS} | {
    header: header.removeprefix("x-").replace("-", "_") for header in ID_HEADERS
}
"""A header names the same conversation as the body field that it is called after."""


class Keyring:
    """Makes store keys with one secret; keys of two secrets never meet. The MAC is keyed BLAKE2b (RFC 7693).

    Args:
        secret: random bytes, the same for all replicas that share a store.

    Raises:
        ValueError: a secret shorter than `MIN_SECRET_BYTES`.
    """

    __slots__ = ("_mac", "_secret")

    def __init__(self, secret: bytes) -> None:
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"the key secret must have at least {MIN_SECRET_BYTES} bytes, got {len(secret)}")
        self._secret = hashlib.blake2b(secret, digest_size=32, person=b"pd-key-1").digest()
        self._mac = hashlib.blake2b(key=self._secret, digest_size=_MAC_BYTES)

    def key(self, tenant: str, scope: bytes, kind: str, value: bytes | str) -> bytes:
        """One store key. `kind` is `HISTORY` or a field of `ID_FIELDS`."""
        return self._finish(_begin(tenant, scope), kind, value)

    def conversation(self, tenant: str, value: str) -> str:
        """What stands for all turns of a tenant with this conversation or session id, whatever their options."""
        mac = self._mac.copy()
        mac.update(_begin(tenant, b"") + _WHOLE + value.encode("utf-8", "surrogatepass"))
        return mac.hexdigest()

    def conversations(self, tenant: str, prepared: Prepared) -> tuple[str, ...]:
        """The same of a turn's ids."""
        if not prepared.ids:
            return ()
        values = [value for source, value in prepared.ids if _FIELD_OF[source] in _CONVERSATION_FIELDS]
        return tuple([self.conversation(tenant, value) for value in dict.fromkeys(values)])

    def seal(self, data: bytes) -> bytes:
        """A MAC over what is kept outside this process, in hexadecimal; of another use than a key."""
        return hashlib.blake2b(data, key=self._secret, digest_size=_MAC_BYTES, person=b"pd-seal").hexdigest().encode()

    def lookup_keys(self, tenant: str, prepared: Prepared) -> tuple[bytes, ...]:
        """Keys under which the previous turn may lie: its history, longest first, then the ids, most trusted first.

        History comes first because it is evidence and an id is a hint. Empty exactly when the turn can neither use a
        handle nor leave one: the prompt itself is always among the keys of a chat, so that a first turn has one.
        """
        if prepared.link_fault is not None:
            return ()
        base = _begin(tenant, prepared.scope)
        prompt = prepared.prompt_digest()
        digests = prepared.history if prompt is None else dict.fromkeys((prompt, *prepared.history))
        return (*[self._finish(base, HISTORY, digest) for digest in digests], *self._id_keys(base, prepared))

    def store_keys(
        self, tenant: str, prepared: Prepared, reply: Reply | None, response_id: str | None = None
    ) -> tuple[bytes, ...]:
        """Keys under which the next turn will look for the handle that this one left.

        Args:
            reply: what the client will echo; None when it is not known, then only ids lead here.
            response_id: of the answer; a client may name it as `previous_response_id`.
        """
        if prepared.link_fault is not None:
            return ()
        base = _begin(tenant, prepared.scope)
        keys = self._id_keys(base, prepared)
        digest = prepared.history_with(reply) if reply is not None else None
        if digest is not None:
            keys.insert(0, self._finish(base, HISTORY, digest))
        if response_id:
            keys.append(self._finish(base, _RESPONSE, response_id))
        return tuple(keys)

    def _id_keys(self, base: bytes, prepared: Prepared) -> list[bytes]:
        keys = [self._finish(base, _FIELD_OF[source], value) for source, value in prepared.ids]
        return keys if len(keys) < 2 else list(dict.fromkeys(keys))

    def _finish(self, base: bytes, kind: str, value: bytes | str) -> bytes:
        mark = _MARKS[kind]
        raw = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
        mac = self._mac.copy()  # costs less than to begin with the secret again
        mac.update(base + mark + raw)
        return mark + mac.digest()


def kind_of(key: bytes) -> str:
    """What a key was made from: `HISTORY` or an id field."""
    return _KINDS[key[:1]]


def is_id_key(key: bytes) -> bool:
    """Whether a key stays the same from turn to turn of a conversation."""
    return key[:1] != b"h"


def tenant_of(headers: Mapping[str, str], mode: str, anonymous: bool) -> str | None:
    """The principal of a request, or None when it has none and may have no reuse.

    Args:
        headers: lower-case names.
        mode: `authorization` = each credential is a tenant; `header` = a trusted gateway names it.
        anonymous: whether requests without a principal share one tenant.
    """
    if mode == "header":
        name = headers.get(TENANT_HEADER, "").strip()
        if name:
            return "name:" + name
    else:
        for header in _CREDENTIALS:
            value = headers.get(header, "").strip()
            scheme, _, token = value.partition(" ")
            if scheme.lower() == "bearer":
                value = token.strip()
            if value:
                # The credential itself is not kept.
                return "key:" + hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()
    return ANONYMOUS if anonymous else None


def _begin(tenant: str, scope: bytes) -> bytes:
    name = tenant.encode("utf-8", "surrogateescape")
    return b"%d:%b%d:%b" % (len(name), name, len(scope), scope)
