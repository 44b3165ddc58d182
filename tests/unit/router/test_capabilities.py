"""What an endpoint of which release carries."""

from __future__ import annotations

from typing import Any

import pytest

from pd_router.core.capabilities import EVERYWHERE, NOWHERE, carries, describe, parse_version
from pd_router.core.fields import Api


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.32.0", (0, 32)),
        ("0.33.1rc1.dev4+g12ab", (0, 33)),
        ("v1.2.3", (1, 2)),
        ("0.32", (0, 32)),
        ("0.32.0+cpu", (0, 32)),
        ("dev", None),
        ("", None),
        (None, None),
        (5, None),
        ("0.", None),
    ],
)
def test_versions(text: Any, version: tuple[int, int] | None) -> None:
    assert parse_version(text) == version


@pytest.mark.parametrize("version", [None, (0, 5), (0, 28), (0, 29), (0, 32), (0, 33), (0, 40), (1, 0)])
def test_every_engine_has_the_two_old_apis(version: tuple[int, int] | None) -> None:
    assert carries(version, Api.CHAT) == carries(version, Api.COMPLETIONS) == EVERYWHERE


@pytest.mark.parametrize("version", [None, (0, 5), (0, 28)])
def test_of_an_old_or_unknown_one_nothing_more_is_believed(version: tuple[int, int] | None) -> None:
    assert carries(version, Api.RESPONSES) == carries(version, Api.MESSAGES) == NOWHERE


@pytest.mark.parametrize("version", [(0, 29), (0, 30), (0, 31), (0, 32), (0, 33), (0, 34), (1, 0)])
def test_responses_and_messages_carry_it_everywhere(version: tuple[int, int]) -> None:
    for api in (Api.RESPONSES, Api.MESSAGES):
        assert carries(version, api) == EVERYWHERE
        assert carries(version, api).answer(stream=True)


def test_it_is_described_for_people() -> None:
    shown = describe((0, 32))
    assert shown["messages"] == {"request": True, "whole": True, "streamed": True}
    assert describe((0, 28))["messages"] == {"request": False, "whole": False, "streamed": False}
    assert shown.keys() == {api.value for api in Api}
