"""A made-up trace of coding agents, drawn from published figures of real ones.

Source: TraceLab, "Characterizing Coding Agent Workloads for LLM Serving" (https://arxiv.org/abs/2606.30560), 4,265
sessions of Claude Code and Codex with 357,161 model calls and 432,510 tool calls. Figures below are the merged ones of
its repository (https://github.com/uw-syfi/TraceLab at 0b8a262b, `artifacts/**/*.tex` and `README.md`). Between two
published quantiles the logarithm is interpolated, which is ours; so is the least value of each scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

from pdctl.core.kv_trace import Client, Turn

Draw = Callable[[], float]
"""Gives numbers from 0 up to, not including, 1."""

DECODE_TOKENS_PER_S: Final = 40.7
"""Median speed of a model's output (paper_macros.tex)."""
_Scale = Sequence[tuple[float, float]]
"""Quantiles: share of the values, value; rising. Beyond either end lies the end."""

HUMAN_MEDIAN_S: Final = 84.0
HUMAN_WAIT_S: Final[_Scale] = ((0.0, 1.0), (0.5, HUMAN_MEDIAN_S), (0.75, 300.0), (0.9, 1236.0), (0.957, 3600.0))
"""Before a user's next message. p50 1.4 min and p90 20.6 min (session_timing_distribution.tex); 5 min are the 79.6 %
and 69.8 % quantile of the two agents, 1 h the 96.4 % and 94.9 % (human_input_wait/README.md), merged in the proportion
0.53 to 0.47 that gives the merged mean of 46.7 min from their means of 2,401 s and 3,260 s. Longer ones count as 1 h,
as in that paper's own budget."""
TOOL_WAIT_S: Final[_Scale] = ((0.0, 0.01), (0.5, 0.3), (0.9, 13.6), (0.9603, 60.0), (0.99, 216.0), (1.0, 3600.0))
"""Of a tool call: p50, p90, p99 (session_timing_distribution.tex), 3.97 % over a minute (paper_macros.tex)."""
TOOL_STEPS_PLUS_1: Final[_Scale] = ((0.25, 1.0), (0.5, 2.0), (0.9, 21.0), (0.99, 87.0))
"""Model calls that a tool's result starts, per request of a user, and 1 (session_internal_counts.tex)."""
REQUESTS: Final[_Scale] = ((0.5, 1.0), (0.9, 18.0), (0.99, 137.0))
"""Requests of a user per session (session_internal_counts.tex)."""
FIRST_PROMPT_TOKENS: Final[_Scale] = ((0.0, 9324.0), (1.0, 32272.0))
"""The first prompts of the repository's two example sessions; no distribution is published."""
REPLY_TOKENS: Final = (214.0, 523.0)
"""Median (paper_macros.tex) and mean (186.9 million in 357,161 calls) of an answer."""
NEW_TOKENS: Final = (251.0, 1182.0)
"""Median of what a call adds beside the last answer (adjusted_prefix_append/README.md, Claude), and its mean: context
grew by 608,810,766 tokens in 357,161 calls (paper_macros.tex), less the mean answer."""
START_SPREAD_S: Final = 600.0
MAX_TURNS: Final = 3_000_000


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many clients there are, each with one conversation after another, and for how long.

    ``human_wait_s`` is the median of the users' waits, whose whole distribution is stretched to it. At ``max_tokens``
    an agent compacts: it goes on with a new, short history. ``singles_per_min`` are turns beside these that nobody
    continues, as of batch jobs, each as long as a first turn.
    """

    clients: int
    seconds: float
    max_tokens: int = 131_072
    human_wait_s: float = HUMAN_MEDIAN_S
    singles_per_min: float = 0.0

    @property
    def most_turns(self) -> float:
        """Hardly more than this: a turn with its tools takes half a minute on average, without its user."""
        return self.seconds * (self.clients / 30 + self.singles_per_min / 60)


def make_trace(crowd: Crowd, draw: Draw) -> list[Client]:
    """The same for the same draws. Turns that would come after the end, were there no queue, are left out.

    Raises:
        ValueError: it would be too long.
    """
    if not crowd.most_turns <= MAX_TURNS:
        raise ValueError(f"that would be up to {crowd.most_turns:,.0f} turns; at most {MAX_TURNS:,} are made up")
    return [_client(crowd, draw) for _ in range(crowd.clients)] + list(_singles(crowd, draw))


def _singles(crowd: Crowd, draw: Draw) -> Iterator[Client]:
    at = 0.0
    while crowd.singles_per_min:
        at -= math.log(1.0 - draw()) * 60 / crowd.singles_per_min
        if at > crowd.seconds:
            return
        yield [_turn(crowd, None, 0.0, False, at, draw)]


def _client(crowd: Crowd, draw: Draw) -> Client:
    turns: list[Turn] = []
    now = start = START_SPREAD_S * draw()
    wait, after_tool = 0.0, False
    while True:
        for request in range(round(_quantile(REQUESTS, draw()))):
            for step in range(round(_quantile(TOOL_STEPS_PLUS_1, draw()))):
                if turns:
                    after_tool = step > 0
                    human = _quantile(HUMAN_WAIT_S, draw()) * crowd.human_wait_s / HUMAN_MEDIAN_S
                    wait = _quantile(TOOL_WAIT_S, draw()) if after_tool else human
                now += wait
                if turns and now > crowd.seconds:
                    return turns
                before = None if request == step == 0 else turns[-1]
                turn = _turn(crowd, before, wait, after_tool, start if not turns else 0.0, draw)
                turns.append(turn)
                now += turn.reply_tokens / DECODE_TOKENS_PER_S


def _turn(crowd: Crowd, before: Turn | None, wait: float, after_tool: bool, not_before: float, draw: Draw) -> Turn:
    reply = min(round(_lognormal(REPLY_TOKENS, draw())) or 1, crowd.max_tokens // 4)
    prompt = before.tokens + (round(_lognormal(NEW_TOKENS, draw())) or 1) if before else 0
    fresh = before is None or prompt + reply > crowd.max_tokens
    if fresh:
        prompt = min(round(_quantile(FIRST_PROMPT_TOKENS, draw())), crowd.max_tokens // 2)
    return Turn(prompt, reply, wait, not_before, after_tool, fresh)


def _quantile(scale: _Scale, share: float) -> float:
    """The value at that share, from 0 to 1."""
    low = scale[0]
    for high in scale:
        if share < high[0]:
            if low is high:
                return low[1]
            part = (share - low[0]) / (high[0] - low[0])
            return math.exp(math.log(low[1]) + part * (math.log(high[1]) - math.log(low[1])))
        low = high
    return low[1]


def _lognormal(median_and_mean: tuple[float, float], share: float) -> float:
    median, mean = median_and_mean
    sigma = math.sqrt(2 * math.log(mean / median))
    # An infinite value has probability 0, but 0 can be drawn.
    return median * math.exp(sigma * NormalDist().inv_cdf(min(max(share, 1e-6), 1 - 1e-6)))
