"""The demo's texts: as long as asked for, the same every time, and nothing in common between salts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.core.dialogue import DialoguePlan, words_of

WORDS = [f" w{number:04d}" for number in range(2400)]


@given(turns=st.integers(2, 12), step=st.integers(80, 1500), reply=st.integers(1, 64), spare=st.integers(0, 5000))
def test_turns_add_up_to_the_longest_prompt(turns, step, reply, spare):
    plan = DialoguePlan(turns, turns * step + spare, step, reply)
    questions = plan.question_tokens()
    assert len(questions) == turns
    assert sum(questions) + (turns - 1) * reply == plan.longest
    assert set(questions[1:]) == {step - reply}


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (DialoguePlan(1, 8000, 800, 64), "at least 2 turns"),
        (DialoguePlan(6, 8000, 64, 64), "no room for a question"),
        (DialoguePlan(6, 4000, 800, 64), "6 turns of 800 tokens don't fit into a longest prompt of 4000"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused(plan, words):
    with pytest.raises(ValueError, match=words):
        plan.question_tokens()


def test_texts_are_reproducible_and_salted():
    text = words_of(WORDS, "on/1/1", 500)
    assert text == words_of(WORDS, "on/1/1", 500)
    assert len(text.split()) == 500
    assert text.startswith(" w")
    other = words_of(WORDS, "off/1/1", 500)
    same = sum(mine == theirs for mine, theirs in zip(text.split(), other.split(), strict=True))
    assert same < 10
    assert len(set(text.split())) > 400
