"""What is a host, and what is a name that may be given on the command line. One answer for all flags.

Separate because a name that is none fails late otherwise: in a lookup, as an error of the codec and not of the network,
or never, as a model that no request can name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final

_LONGEST: Final = 253
_NAME: Final = re.compile(r"(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63}\.?")
_MODEL: Final = re.compile(r"\S(.{0,254}\S)?")
_GENERATION: Final = re.compile(r"[A-Za-z0-9._-]{0,63}")
_ZONE: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")


def is_host(text: str) -> bool:
    """Whether `text` is a host's name or address, without brackets and port."""
    if ":" in text:
        address, percent, zone = text.partition("%")
        return _is_address(address) and (not percent or _ZONE.fullmatch(zone) is not None)
    return len(text) <= _LONGEST and _NAME.fullmatch(text) is not None


def _is_address(text: str) -> bool:
    try:
        return ip_address(text).version == 6
    except ValueError:
        return False


def name_problems(models: Iterable[str], hosts: Iterable[str], generation: str) -> list[str]:
    """What is wrong with names of models, with hosts for handles and with a generation, each naming the flag."""
    problems = [
        f"--model: {name!r} must be 1 to 256 printable characters, without spaces around them"
        for name in sorted(models)
        if not _MODEL.fullmatch(name) or not name.isprintable()
    ]
    problems.extend(
        f"--allow-handle-host: {host!r} must be a host's name or address, without a port"
        for host in sorted(hosts)
        if not is_host(host)
    )
    if not _GENERATION.fullmatch(generation):
        problems.append(f"--generation: {generation!r} must be at most 63 letters, digits and . _ -")
    return problems
