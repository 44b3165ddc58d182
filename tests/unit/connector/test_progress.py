"""The table of a request's life, and which completions pass."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_connector.core.progress import TRANSITIONS, Event, IllegalTransition, Progress, admit_completions, step


def test_a_pulling_request_lives_through_all_states() -> None:
    state = Progress.WAITING
    for event in (Event.ALLOCATED_TO_PULL, Event.RECEIVED, Event.ALLOCATED, Event.FINISHED_RETAINED, Event.SENT):
        state = step(state, event)
    assert state is Progress.GONE


def test_what_is_not_in_the_table_is_an_error() -> None:
    for state in Progress:
        for event in Event:
            if (state, event) not in TRANSITIONS:
                with pytest.raises(IllegalTransition, match=f"{state} cannot be {event}"):
                    step(state, event)


def test_every_state_ends() -> None:
    for start in Progress:
        reached, todo = {start}, [start]
        while todo:
            here = todo.pop()
            for (state, _), after in TRANSITIONS.items():
                if state is here and after not in reached:
                    reached.add(after)
                    todo.append(after)
        assert Progress.GONE in reached, start


def test_nothing_follows_the_end() -> None:
    assert not [event for state, event in TRANSITIONS if state is Progress.GONE]


@pytest.mark.parametrize(
    ("state", "received", "sent", "kept_received", "kept_sent", "after"),
    [
        (Progress.PULLING, True, False, True, False, Progress.SETTLED),
        (Progress.PULLING, False, True, False, False, Progress.PULLING),
        (Progress.DRAINING, True, False, True, False, Progress.GONE),
        (Progress.DRAINING, False, True, False, False, Progress.DRAINING),
        (Progress.DRAINING, True, True, True, False, Progress.GONE),
        (Progress.RETAINED, False, True, False, True, Progress.GONE),
        (Progress.RETAINED, True, False, False, False, Progress.RETAINED),
        (Progress.RETAINED, True, True, False, True, Progress.GONE),
        (Progress.SETTLED, True, True, False, False, Progress.SETTLED),
        (Progress.WAITING, True, True, False, False, Progress.WAITING),
    ],
)
def test_completions_pass_only_when_vllm_can_take_them(
    state: Progress, received: bool, sent: bool, kept_received: bool, kept_sent: bool, after: Progress
) -> None:
    result = admit_completions({"r": state}, {"r"} if received else (), {"r"} if sent else ())
    assert ("r" in result.received, "r" in result.sent) == (kept_received, kept_sent)
    assert result.states.get("r", state) is after
    assert len(result.dropped) == received + sent - kept_received - kept_sent


def test_an_unknown_request_is_dropped_by_name() -> None:
    result = admit_completions({}, {"ghost"}, ())
    assert not result.received
    assert "ghost" in result.dropped[0]


class Vllm:
    """What vLLM's scheduler does with completions: it asserts where it can't go on."""

    def __init__(self, states: dict[str, Progress]) -> None:
        self.waiting = {name for name, state in states.items() if state is Progress.PULLING}
        self.finished = {name for name, state in states.items() if state in (Progress.DRAINING, Progress.RETAINED)}
        self.reading = {name for name, state in states.items() if state in (Progress.PULLING, Progress.DRAINING)}

    def take(self, received: frozenset[str], sent: frozenset[str]) -> None:
        for name in received:
            assert name in self.waiting | self.finished
            self.reading.discard(name)
            if name in self.finished:
                self.free(name)
        for name in sent:
            assert name in self.finished
            self.free(name)

    def free(self, name: str) -> None:
        assert name not in self.reading, "freed while the read still writes"
        self.finished.remove(name)


@given(
    states=st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([s for s in Progress if s is not Progress.GONE])),
    steps=st.lists(st.tuples(st.sets(st.sampled_from("abcdefg")), st.sets(st.sampled_from("abcdefg"))), max_size=6),
)
def test_no_order_of_completions_trips_vllm(
    states: dict[str, Progress], steps: list[tuple[set[str], set[str]]]
) -> None:
    vllm, now = Vllm(states), dict(states)
    for received, sent in steps:
        result = admit_completions(now, received, sent)
        vllm.take(result.received, result.sent)
        now.update(result.states)
        now = {name: state for name, state in now.items() if state is not Progress.GONE}


def test_the_readme_shows_the_table() -> None:
    readme = Path(__file__).parents[3] / "connector" / "README.md"
    rows = re.findall(r"^\| (\w+) \| ([^|(]+?)(?: \([^)]*\))? \| (\w+) \|$", readme.read_text(), re.MULTILINE)
    shown = {(state, event): after for state, event, after in rows if state in list(Progress)}
    assert shown == {(str(state), str(event)): str(after) for (state, event), after in TRANSITIONS.items()}
