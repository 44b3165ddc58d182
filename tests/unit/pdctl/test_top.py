"""What `pdctl top` makes of two looks at routers."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pdctl.core.top_figures import Figures, figures
from pdctl.core.top_window import Look, Window, merged, quantile
from pdctl.shell.app import app
from pdctl.shell.top_command import History, as_object
from pdctl.shell.top_screen import screen
from pdctl.shell.top_source import Reading, SourceError, parse_fleet, parse_look

INF = float("inf")


def look(page: str, at: float = 0.0) -> Look:
    return Look(at, parse_look(f'pd_router_build_info{{version="1.2"}} 1\n{page}', "x").samples)


def test_gains_and_restarts() -> None:
    before = look('pd_router_retries_total{leg="p"} 10\npd_router_retries_total{leg="d"} 5', 100.0)
    after = look('pd_router_retries_total{leg="p"} 12\npd_router_retries_total{leg="d"} 2', 130.0)
    window = Window(before, after)
    assert window.seconds == 30.0
    assert window.gains("pd_router_retries_total", "leg") == {"p": 2.0, "d": 2.0}
    assert window.gain("pd_router_retries_total", leg="p") == 2.0
    assert Window(None, after).gain("pd_router_retries_total") == 14.0
    assert window.gain("pd_router_unheard_of_total") == 0.0


@pytest.mark.parametrize(
    ("buckets", "wanted", "value"),
    [
        ([], 0.5, None),
        ([(1.0, 0.0), (INF, 0.0)], 0.5, None),
        ([(1.0, 10.0), (INF, 10.0)], 0.5, 0.5),
        ([(0.5, 5.0), (1.0, 10.0), (INF, 10.0)], 0.95, 0.95),
        ([(0.5, 0.0), (1.0, 10.0), (INF, 10.0)], 0.1, 0.55),
        ([(0.5, 5.0), (1.0, 5.0), (INF, 10.0)], 0.99, 1.0),
        ([(0.5, 5.0), (1.0, 5.0), (2.0, 10.0), (INF, 10.0)], 0.75, 1.5),
    ],
)
def test_quantiles(buckets: list[tuple[float, float]], wanted: float, value: float | None) -> None:
    found = quantile(buckets, wanted)
    assert found is None if value is None else found == pytest.approx(value)


def test_quantiles_are_of_what_was_gained() -> None:
    def page(fast: int, all_: int) -> str:
        name = "pd_router_ttft_seconds_bucket"
        return f'{name}{{le="0.5"}} {fast}\n{name}{{le="1.0"}} {all_}\n{name}{{le="+Inf"}} {all_}'

    window = Window(look(page(1000, 1000)), look(page(1000, 1100)))
    assert window.quantiles("pd_router_ttft_seconds", [0.5]) == [pytest.approx(0.75)]


def test_routers_are_added_up_and_restart_alone() -> None:
    name = "pd_router_requests_total"
    one = Window(look(f'{name}{{status="200"}} 10', 0), look(f'{name}{{status="200"}} 15', 10))
    other = Window(look(f'{name}{{status="200"}} 100', 1), look(f'{name}{{status="200"}} 3', 11))
    assert merged([one, other]).gain(name) == 5 + 3
    assert merged([one, other]).seconds == 11
    # One that is new has no earlier look: then all of it is new.
    assert merged([one, Window(None, other.after)]).before is None


def member(**fields: Any) -> dict[str, Any]:
    base = {"engine": "d0", "role": "decode", "generation": "g", "ready": True, "draining": False, "turns": 2,
            "prefill_tokens": 7, "breaker": "closed", "address": "h:1"}  # fmt: skip
    return {**base, **fields}


PAGE = """\
pd_router_requests_total{api="chat.completions",status="200"} 8
pd_router_requests_total{api="chat.completions",status="429"} 2
pd_router_reuse_stage_total{stage="eligible"} 8
pd_router_reuse_stage_total{stage="pulled"} 4
pd_router_reuse_drop_total{reason="not_found"} 1
pd_router_reuse_drop_total{reason="expired"} 3
pd_router_reuse_drop_total{reason="unproven"} 0
pd_router_prompt_tokens_total 1000
pd_router_pulled_tokens_total 400
pd_router_inflight 3
pd_router_handles 5
pd_router_handle_store_up 1
pd_router_pinned_tokens{engine="d0"} 640
pd_router_pinned_handles{engine="d0"} 2
pd_router_engine_legs_total{engine="d0",role="decode",result="ok"} 9
pd_router_engine_legs_total{engine="d0",role="prefill",result="ok"} 1
"""


def test_one_screen() -> None:
    fleet = [member(), member(engine="p0", role="prefill")]
    found = figures(Window(None, look(PAGE)), [fleet], {"d0": 0.25})
    assert (found.answers, found.answers_by_status, found.inflight) == (10, {"200": 8, "429": 2}, 3)
    assert (found.funnel["eligible"], found.funnel["found"], found.funnel["pulled"]) == (8, 0, 4)
    assert list(found.drops.items()) == [("expired", 3), ("not_found", 1)]
    assert found.pulled_share == 0.4
    assert (found.handles, found.store_up, found.version) == (5, True, "1.2")
    prefill, decode = found.engines
    assert (prefill.role, prefill.kv_usage, prefill.handles) == ("prefill", None, 0)
    assert (decode.kv_usage, decode.pinned_tokens, decode.handles, decode.legs) == (0.25, 640, 2, {"ok": 9})
    assert found.latency["ttft"].p50 is None


def test_of_several_routers_the_worst_view_of_an_engine_counts() -> None:
    window = merged([Window(None, look(PAGE)), Window(None, look(PAGE))])
    found = figures(window, [[member()], [member(ready=False, breaker="open", turns=1)]], {})
    [engine] = found.engines
    assert (engine.ready, engine.breaker, engine.turns, engine.pinned_tokens) == (False, "open", 3, 1280)
    assert (found.answers, found.routers) == (20, 2)


def text_of(found: Figures, trouble: str = "", width: int = 160) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(screen(found, trouble))
    return out.getvalue()


def test_the_table_says_it() -> None:
    text = text_of(figures(Window(None, look(PAGE)), [[member(breaker="half_open")]], {"d0": 0.25}), "away")
    for words in (
        "1 router (1.2), since the start: 10 answers (8 with 200, 2 with 429)",
        "no new figures: away",
        "400 of 1,000 prompt tokens read back (40%)",
        "ready, breaker half-open",
        "25%",
        "expired",
    ):
        assert words in text
    assert "–" in text_of(figures(Window(None, look("")), [], {}))


def test_a_narrow_terminal_cuts_nothing() -> None:
    engine = member(engine="qwen3-32b-decode-0", breaker="half_open", turns=123_456, prefill_tokens=1_234_567)
    text = text_of(figures(Window(None, look(PAGE)), [[engine]], {"qwen3-32b-decode-0": 0.25}), width=80)
    assert "…" not in text
    for figure in ("123456", "1,234,567", "25%"):
        assert figure in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_window_slides() -> None:
    history = History(10.0)

    def at(time: float, count: int) -> Figures:
        page = look(f'pd_router_requests_total{{status="200"}} {count}', time)
        return history.add(Reading({"r": page}, [[]], {}))

    assert (at(0, 100).answers, at(5, 107).answers) == (100, 7)
    assert at(9, 109).window_seconds == 9
    found = at(16, 120)
    assert (found.answers, found.window_seconds) == (13, 11), "since the last look that is at least ten seconds old"
    assert as_object(found)["answers"] == 13


@pytest.mark.parametrize("page", ["", "<html>", "vllm:x 1\n", 'pd_router_build_info{version="1', "\x00"])
def test_a_page_that_is_no_routers(page: str) -> None:
    with pytest.raises(SourceError, match=r"http://r/metrics is not a router's.*admin port"):
        parse_look(page, "http://r")


@pytest.mark.parametrize("page", ["", "{}", "nope"])
def test_a_list_of_engines_that_is_none(page: str) -> None:
    with pytest.raises(SourceError, match=r"http://r/debug/fleet is not"):
        parse_fleet(page, "http://r")


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--admin", "localhost:9000", "must be a URL such as"),
        ("--admin", "http://", "must be a URL such as"),
        ("--admin", "http://[::1", "must be a URL such as"),
        ("--admin", "http://h:x", "must be a URL such as"),
        ("--admin", "http://h:70000", "must be a URL such as"),
        ("--window", "0", "from 1 to"),
        ("--window", "nan", "from 1 to"),
        ("--interval", "0", "from 0.2 to"),
    ],
)
def test_flags_of_no_use(flag: str, value: str, words: str) -> None:
    done = CliRunner().invoke(app, ["top", flag, value])
    assert done.exit_code == 2
    said = " ".join(done.output.replace("│", " ").split())
    assert flag in said
    assert words in said
