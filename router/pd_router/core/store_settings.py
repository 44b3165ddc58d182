"""Where handles are kept: what can be set about it, and what cannot work.

Separate from the other settings because only one of the two stores has any of this.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

from pd_router.core.hosts import is_host

MAX_TIMEOUT: Final = 5.0
"""Seconds; a turn waits for the store at most so long before its prefill."""
MAX_CONNECTIONS: Final = 1024
_URL: Final = (
    "must be valkey://HOST:PORT or valkeys://HOST:PORT (TLS), or the same with redis:// and rediss://; /NUMBER at the "
    "end chooses a database"
)
_SCHEMES: Final = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
_DEFAULT_PORT: Final = 6379


class FailureKind(StrEnum):
    """What went wrong with a shared store; a metric label."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"
    AUTH = "auth"
    READ_ONLY = "read_only"
    LOADING = "loading"
    OUT_OF_MEMORY = "out_of_memory"
    DAMAGED = "damaged"
    """What stood there is no entry of ours."""
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Valkey:
    """A store that several routers share. Times in seconds."""

    url: str
    key_file: str
    """Holds the secret that keys are made with; the same for all routers of the store."""
    username: str = ""
    password_file: str = ""
    ca_file: str = ""
    """Certificates that the server's must be signed by; when empty, those of the system."""
    timeout: float = 0.25
    """For one operation, and for connecting."""
    max_entry_bytes: int = 4 * 1024 * 1024
    """A longer handle is not kept: one of a million tokens has about a third of it."""
    connections: int = 16

    @property
    def tls(self) -> bool:
        """Whether the URL asks for TLS."""
        return _SCHEMES.get(urlsplit(self.url).scheme, False)


@dataclass(frozen=True, slots=True)
class Target:
    """What a store's URL says."""

    host: str
    port: int
    tls: bool
    database: int


def parse_url(value: str) -> Target:
    """A store's URL. Raises ValueError with what is wrong; the text does not repeat credentials."""
    try:
        parts = urlsplit(value)
        port = _DEFAULT_PORT if parts.port is None else parts.port
    except ValueError as error:
        raise ValueError(_URL) from error
    if parts.username is not None or parts.password is not None:
        raise ValueError("must hold no credentials: use --valkey-username and --valkey-password-file")
    database = parts.path.removeprefix("/")
    known = parts.scheme in _SCHEMES and is_host(parts.hostname or "")
    if not known or not port or parts.query or parts.fragment or not re.fullmatch(r"[0-9]{0,4}", database):
        raise ValueError(f"{value!r} {_URL}")
    assert parts.hostname is not None
    return Target(parts.hostname, port, _SCHEMES[parts.scheme], int(database or 0))


def valkey_problems(valkey: Valkey) -> Iterator[str]:
    """Everything that is wrong with the settings of a shared store."""
    try:
        target = parse_url(valkey.url)
    except ValueError as error:
        yield f"--valkey-url: {error}"
    else:
        if valkey.ca_file and not target.tls:
            yield "--valkey-ca-file: is for valkeys:// and rediss:// URLs; without TLS no certificate is checked"
    if not valkey.key_file:
        yield "--handle-key-file: is needed with --handle-store valkey; all routers of the store must have the same key"
    if valkey.username and not valkey.password_file:
        yield "--valkey-username: needs --valkey-password-file, too"
    yield from number_problems(valkey)


def number_problems(valkey: Valkey) -> Iterator[str]:
    """What is wrong with the numbers, whichever store is used."""
    if not 0 < valkey.timeout <= MAX_TIMEOUT:
        yield f"--valkey-timeout: must be above 0, finite and at most {MAX_TIMEOUT:g} s, got {valkey.timeout:g}"
    if valkey.max_entry_bytes < 1:
        yield f"--valkey-max-entry-bytes: must be above 0, got {valkey.max_entry_bytes}"
    if not 1 <= valkey.connections <= MAX_CONNECTIONS:
        yield f"--valkey-connections: must be from 1 to {MAX_CONNECTIONS}, got {valkey.connections}"
