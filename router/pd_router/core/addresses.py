"""Addresses and names as a person or the operator writes them: each read by one function, with one message of failure.

Separate from the settings, which say what there is and whether it fits together: nothing here knows of another flag.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from pd_router.core.hosts import is_host

MAX_PORT: Final = 65535
_DEFAULT_PORTS: Final = {"http": 80, "https": 443}
_PORT: Final = re.compile(r"[0-9]{1,5}")
_DNS_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


class SettingsError(ValueError):
    """Settings that cannot work. `problems` lists all of them, each naming the flag and the value allowed."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A host and a port to listen on or to connect to. `tls`: an engine with an https URL."""

    host: str
    port: int
    tls: bool = False


def parse_endpoint(value: str, flag: str) -> Endpoint:
    """`HOST:PORT`, `[IPV6]:PORT` or `:PORT` (all addresses). Raises SettingsError naming `flag`."""
    host, _, port = value.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    fits = not host or is_host(host[1:-1] if bracketed else host)
    if not _PORT.fullmatch(port) or int(port) > MAX_PORT or not fits or bracketed != (":" in host):
        raise SettingsError(
            [f"{flag}: {value!r} must be HOST:PORT, [IPV6]:PORT or :PORT with a port from 0 to {MAX_PORT}"]
        )
    return Endpoint(host.strip("[]") or "0.0.0.0", int(port))


def parse_engine_url(value: str, flag: str) -> Endpoint:
    """`http://HOST:PORT` or `https://HOST:PORT`. Raises SettingsError naming `flag`."""
    try:
        parts = urlsplit(value)
        host = parts.hostname or ""
        port = _DEFAULT_PORTS.get(parts.scheme, 0) if parts.port is None else parts.port
    except ValueError as error:
        raise SettingsError([f"{flag}: {value!r} is not a URL: {error}"]) from error
    if parts.username is not None:
        raise SettingsError([f"{flag}: a URL with credentials must be http://HOST:PORT; use --engine-api-key-file"])
    if parts.scheme not in _DEFAULT_PORTS or not is_host(host) or not value.isprintable():
        raise SettingsError([f"{flag}: {value!r} must be http://HOST:PORT or https://HOST:PORT"])
    if not port:
        raise SettingsError([f"{flag}: {value!r} must have a port from 1 to {MAX_PORT}"])
    if parts.path not in ("", "/") or "?" in value or "#" in value:
        text = f"{flag}: {value!r} must be http://HOST:PORT without a path, query, fragment or credentials"
        raise SettingsError([text])
    return Endpoint(host, port, parts.scheme == "https")


def parse_deployment(value: str, flag: str) -> tuple[str, str]:
    """`NAMESPACE/NAME`. Raises SettingsError naming `flag`."""
    namespace, _, name = value.partition("/")
    if not _DNS_LABEL.fullmatch(namespace) or not _DNS_LABEL.fullmatch(name):
        raise SettingsError(
            [f"{flag}: {value!r} must be NAMESPACE/NAME of a PDDeployment, each of a-z, 0-9 and -, at most 63 long"]
        )
    return namespace, name
