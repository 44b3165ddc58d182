"""A short run of each fuzz target; `make fuzz` is the long one."""

from __future__ import annotations

import pytest

from fuzz import bodies, event_stream
from fuzz.run import TARGETS, generator, run
from pd_router.core import cutting, sanitize
from pd_router.shell import request_reader

INPUTS = 3000


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_of_a_short_run_fails(target: str) -> None:
    assert run(target, seed=7, first=0, count=INPUTS) is None


def test_the_targets_see_what_they_look_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the code that they test they fail soon."""
    with monkeypatch.context() as broken:
        broken.setattr(sanitize, "is_forbidden", lambda _name: False)
        assert run("body", seed=7, first=0, count=INPUTS)
    with monkeypatch.context() as broken:
        broken.setattr(cutting, "find_members", lambda _text: ([], None))
        assert run("stream", seed=7, first=0, count=INPUTS)
    with monkeypatch.context() as broken:
        broken.setattr(request_reader.RequestReader, "_refuse", lambda _reader, _error: None)
        assert run("http", seed=7, first=0, count=INPUTS)


def test_a_number_makes_the_same_input_again() -> None:
    for made in (bodies.body, event_stream.event):
        assert made(generator(5, 9)) == made(generator(5, 9))
        assert len({str(made(generator(5, number))) for number in range(50)}) > 25
