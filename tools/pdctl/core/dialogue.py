"""What the demo's conversations say: how long each turn is and which words it holds.

The two legs must be equally long and share nothing, or one of them would measure a warm cache. Words come from the
model's own list, where each is exactly one token, and a salt picks them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DialoguePlan:
    """Sizes of a conversation, in tokens.

    ``longest`` is the last turn's prompt; each turn adds ``step`` to the one before: the reply and the next question.
    The first turn gets what remains, because a chat that has grown long adds little per turn.
    """

    turns: int
    longest: int
    step: int
    reply: int

    def question_tokens(self) -> tuple[int, ...]:
        """Words in the user's message of each turn.

        Raises:
            ValueError: the sizes contradict each other.
        """
        first = self.longest - (self.turns - 1) * self.step
        if self.turns < 2:
            raise ValueError("a conversation needs at least 2 turns: the first is always computed in full")
        if self.step <= self.reply or self.reply < 1:
            raise ValueError(
                f"a step of {self.step} tokens leaves no room for a question after a reply of {self.reply}"
            )
        if first < self.step:
            raise ValueError(
                f"{self.turns} turns of {self.step} tokens don't fit into a longest prompt of {self.longest} tokens"
            )
        return (first, *(self.step - self.reply for _ in range(self.turns - 1)))


def words_of(vocabulary: Sequence[str], salt: str, count: int) -> str:
    """``count`` words out of ``vocabulary``, decided by ``salt`` alone."""
    return "".join(
        vocabulary[number % len(vocabulary)] for number, _ in zip(_numbers(salt), range(count), strict=False)
    )


def _numbers(salt: str) -> Iterator[int]:
    block = 0
    while True:
        digest = hashlib.blake2b(f"{salt}/{block}".encode()).digest()
        for at in range(0, len(digest), 4):
            yield int.from_bytes(digest[at : at + 4], "little")
        block += 1
