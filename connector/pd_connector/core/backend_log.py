"""What NIXL's log says about a backend that could not be created, or that came up on the wrong network.

NIXL reports every failure to load a backend as "unsupported", and writes the real reason at a log level that is off by
default; a LIBFABRIC backend without an EFA device comes up on TCP and says so in passing.
"""

from __future__ import annotations

import re
from typing import Final

# The first kind that matches wins: the earlier, the nearer to the cause.
_REASONS: Final = (
    re.compile(r"Failed to load plugin from [^:]*lib\w*plugin_{backend}\S*: (?P<why>.+)"),
    re.compile(r"Failed to load plugin from \S*{backend}\S*: (?P<why>.+)"),
    re.compile(r"Failed to create engine: (?P<why>.+)"),
    re.compile(r"(?P<why>no plugin for {backend}.*)"),
    re.compile(r"createBackend: (?P<why>.+)"),
    re.compile(r"^(?P<why>\S*(?:Error|Exception)\b.*)$", re.MULTILINE),
)
_PROVIDER: Final = re.compile(r"Created \d+ rails using provider=(\S+)")
_NO_DEVICE: Final = "fi_getinfo failed No data available"


def failure_reason(output: str, backend: str) -> str:
    """The line of the log that tells why ``backend`` was not created, without NIXL's prefix."""
    for template in _REASONS:
        pattern = re.compile(template.pattern.replace("{backend}", re.escape(backend)), template.flags)
        found = pattern.search(output)
        if found:
            reason = found["why"].strip()
            if _NO_DEVICE in output:
                reason += " (the libfabric provider named by FI_PROVIDER found no device)"
            return reason
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "NIXL said nothing"


def network_fault(output: str, wanted: str | None) -> str | None:
    """Why a backend that was created must not be used, or ``None``.

    Args:
        output: NIXL's log at level INFO.
        wanted: what the user set as FI_PROVIDER, or ``None``. Another provider than efa is only right on purpose.
    """
    found = _PROVIDER.search(output)
    if found is None or found[1] == (wanted or "efa"):
        return None
    return (
        f"LIBFABRIC came up on provider {found[1]}, not {wanted or 'efa'}: no EFA device is visible in this container. "
        "Request vpc.amazonaws.com/efa and set FI_PROVIDER=efa, or set FI_PROVIDER to the provider that you want"
    )
