"""May this request come in, and whose is it?

Separate from `linking`, which only keeps tenants apart once they are known: here a principal has to be proven, by a key
whose hash is in a file, or by a gateway that proves itself. Keys are long random texts, so one SHA-256 is enough to
store them by; a slow password hash would protect nothing more and cost each request its time. Nothing in here, and no
message from here, holds a key.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Final

from pd_router.core.errors import ApiError, unauthorized
from pd_router.core.linking import ANONYMOUS, tenant_of
from pd_wire.names import GATEWAY_SECRET_HEADER, TENANT_HEADER

OPEN_PATHS: Final = frozenset({"/health"})
"""Answered to anybody: load balancers ask, and the answer tells nothing."""

MAX_KEYS: Final = 100_000
MIN_SECRET_CHARACTERS: Final = 16
_LINE: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._@-]{0,63}):([0-9a-fA-F]{64})")
_TOKEN: Final = re.compile(r"[!-~]{8,4096}")
_UNHASHED: Final = b"\0" * 32
Network = IPv4Network | IPv6Network


class FileProblem(ValueError):
    """A file cannot be used. The message says where and what is allowed, and quotes nothing from the file."""


class KeyTable:
    """API keys by the hash of each. A tenant may have several keys, so that one can be replaced by another."""

    __slots__ = ("_names",)

    def __init__(self, names: Mapping[bytes, str]) -> None:
        self._names = dict(names)

    def __len__(self) -> int:
        return len(self._names)

    def tenant(self, key: str) -> str | None:
        """The name that `key` belongs to, or None.

        The dict is searched by a hash of a hash with a per-process seed, which tells a guesser nothing about the keys
        in it; what it finds is compared in constant time all the same.
        """
        digest = _digest(key)
        name = self._names.get(digest)
        known = digest if name is not None else _UNHASHED
        return name if hmac.compare_digest(digest, known) else None


def parse_keys(text: str) -> KeyTable:
    """Read an API keys file: lines `NAME:SHA256-HEX`; empty lines and lines that begin with # are skipped.

    Raises:
        FileProblem: with the number of the first bad line, or when there is no key at all.
    """
    names: dict[bytes, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        found = _LINE.fullmatch(line)
        if found is None:
            raise FileProblem(
                f"line {number} must be NAME:HASH, with a name of letters, digits and . _ @ - (64 at most) and the "
                "key's SHA-256 as 64 hex digits"
            )
        digest = bytes.fromhex(found[2])
        if digest in names:
            raise FileProblem(f"line {number} has a key that an earlier line has")
        names[digest] = found[1]
        if len(names) > MAX_KEYS:
            raise FileProblem(f"it has more than {MAX_KEYS} keys")
    if not names:
        raise FileProblem("it has no key; a line is NAME:HASH")
    return KeyTable(names)


def parse_secrets(text: str) -> tuple[bytes, ...]:
    """Read a file of shared secrets, one a line (several while one replaces another), as hashes. Raises FileProblem."""
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line]
    if not found or any(len(line) < MIN_SECRET_CHARACTERS or not _TOKEN.fullmatch(line) for line in found):
        raise FileProblem(
            f"it must have one secret a line, each at least {MIN_SECRET_CHARACTERS} printable ASCII characters "
            "without spaces"
        )
    return tuple(_digest(line) for line in found)


def parse_engine_key(text: str) -> str:
    """Read the one key that engines expect (vLLM's --api-key). Raises FileProblem."""
    key = text.strip()
    if not _TOKEN.fullmatch(key):
        raise FileProblem("it must hold one key of at least 8 printable ASCII characters without spaces")
    return key


def parse_networks(values: Iterable[str]) -> tuple[Network, ...]:
    """CIDRs as networks. Raises FileProblem naming the first that is none."""
    found: list[Network] = []
    for value in values:
        try:
            found.append(ip_network(value))
        except ValueError as error:
            raise FileProblem(f"{value!r} must be a network such as 10.0.0.0/8 or fd00::/8") from error
    return tuple(found)


def tenant_by_key(headers: Mapping[str, str], table: KeyTable) -> str:
    """The tenant whose key came as `Authorization: Bearer` or, as Anthropic's clients send it, as `x-api-key`.

    Args:
        headers: lower-case names. Where both came they must be the same: somebody in between may look at the other one.

    Raises:
        ApiError: 401, without saying more than whether a key came.
    """
    given, other = headers.get("authorization"), headers.get("x-api-key", "").strip()
    if given is not None:
        scheme, _, key = given.strip().partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if key and other and key != other:
            raise unauthorized(
                "invalid_api_key", "Authorization and x-api-key hold different API keys; send one of them"
            )
    else:
        key = other
    if not key:
        raise unauthorized("missing_api_key", "An API key is needed, as Authorization: Bearer KEY or as x-api-key: KEY")
    name = table.tenant(key)
    if name is None:
        raise unauthorized("invalid_api_key", "The API key is not known here")
    return "name:" + name


def tenant_by_gateway(
    headers: Mapping[str, str],
    peer: str,
    *,
    secrets: Sequence[bytes] | None,
    networks: Sequence[Network],
    refuse: bool,
    anonymous: bool,
) -> str | None:
    """The tenant that a gateway named, if it is the gateway that says so.

    Args:
        headers: lower-case names.
        peer: address of the other end of the connection.
        secrets: hashes, one of which the gateway's secret must have; None asks for none.
        networks: where the gateway's connections come from; empty asks for none. Both must hold where both are set.
        refuse: what to do with a tenant named by somebody else: True answers 403, False reads it as not named.
        anonymous: whether requests without a principal share one tenant.
    """
    if not headers.get(TENANT_HEADER, "").strip():
        return ANONYMOUS if anonymous else None
    if _is_gateway(headers, peer, secrets, networks):
        return tenant_of(headers, "header", anonymous)
    if refuse:
        text = f"{TENANT_HEADER} is only taken from the gateway in front of this router"
        raise ApiError(403, text, "permission_error", "untrusted_gateway")
    return ANONYMOUS if anonymous else None


def _is_gateway(
    headers: Mapping[str, str], peer: str, secrets: Sequence[bytes] | None, networks: Sequence[Network]
) -> bool:
    if secrets is not None:
        given = _digest(headers.get(GATEWAY_SECRET_HEADER, ""))
        # All are compared, so that the time tells nothing of how many there are or which one it was.
        if not sum(hmac.compare_digest(given, one) for one in secrets):
            return False
    return not networks or _is_within(peer, networks)


def _is_within(peer: str, networks: Sequence[Network]) -> bool:
    try:
        address = ip_address(peer.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    if mapped is not None:
        address = mapped  # an IPv4 client of a socket that listens on both
    return any(address in network for network in networks)


def _digest(key: str) -> bytes:
    # Header values are read as Latin-1, so this gives the bytes that were sent.
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()
