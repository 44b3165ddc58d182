"""Which of an engine's endpoints carry `kv_transfer_params`, by vLLM release (RP-19).

Separate because this is read in vLLM's sources, release by release, and decides what a turn may expect: where a request
cannot carry params, decode serves it alone; where an answer cannot, decode is told to keep nothing. Chat completions
and completions have had the field longer than any release that the connector supports. What streams lack the plugin
in the engine adds: to chats and completions before 0.33, to messages in every release.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pd_router.core.fields import Api

Version = tuple[int, int]

_NUMBER: Final = re.compile(r"v?(\d{1,4})\.(\d{1,4})(?:\D|$)")


@dataclass(frozen=True, slots=True)
class Carries:
    """Where one endpoint has the params: in its requests, in whole answers, in streamed ones."""

    request: bool
    whole: bool
    streamed: bool

    def answer(self, stream: bool) -> bool:
        """Whether an answer of this kind can bring a handle."""
        return self.streamed if stream else self.whole


BY_RELEASE: Final = frozenset({Api.RESPONSES, Api.MESSAGES})
"""APIs of which not every engine carries params."""
EVERYWHERE: Final = Carries(True, True, True)
NOWHERE: Final = Carries(False, False, False)
_ALIKE: Final[Mapping[Api, Carries]] = {
    Api.CHAT: EVERYWHERE,
    Api.COMPLETIONS: EVERYWHERE,
    Api.RESPONSES: EVERYWHERE,
    Api.MESSAGES: EVERYWHERE,
}
_OLDER: Final[Mapping[Api, Carries]] = {
    Api.CHAT: EVERYWHERE,
    Api.COMPLETIONS: EVERYWHERE,
    Api.RESPONSES: NOWHERE,
    Api.MESSAGES: NOWHERE,
}
RELEASES: Final[Mapping[Version, Mapping[Api, Carries]]] = {
    (0, 29): _ALIKE,
    (0, 30): _ALIKE,
    (0, 31): _ALIKE,
    (0, 32): _ALIKE,
    (0, 33): _ALIKE,
}
"""Read in 0.29, 0.32 and 0.33; what lies between two that are alike is taken to be alike. Of a newer one the last row
is believed, of an older or unknown one only what every engine has always had."""


def parse_version(text: Any) -> Version | None:
    """Major and minor number of what an engine calls itself; None when there are none."""
    found = _NUMBER.match(text) if isinstance(text, str) else None
    return (int(found[1]), int(found[2])) if found is not None else None


def carries(version: Version | None, api: Api) -> Carries:
    """What an engine's endpoint carries."""
    if version is None or version < min(RELEASES):
        return _OLDER[api]
    return RELEASES.get(version, RELEASES[max(RELEASES)])[api]


def describe(version: Version | None) -> dict[str, dict[str, bool]]:
    """For people: every endpoint of one release."""
    return {
        api.value: {"request": one.request, "whole": one.whole, "streamed": one.streamed}
        for api in Api
        for one in (carries(version, api),)
    }
