"""`pdctl plan`: from files, from options, from a running engine; and what it says when something is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from typer.testing import CliRunner

from pd_connector.core.counts import NUMBERS
from pdctl.core.plan_report import Retained
from pdctl.shell import plan_command
from pdctl.shell.app import app
from pdctl.shell.engine_facts import EngineFacts, EngineFactsError, ask_engine
from support.pddeployments import EXAMPLES

P5EN = EXAMPLES / "qwen3-32b-p5en.yaml"
QWEN3_32B = {
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
LOAD = ["--conversations", "40", "--tokens", "24000"]


def run(*arguments: str, file: Path = P5EN) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["plan", "-f", str(file), *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder as a download has it: config and the index of weights of 61 GiB."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B))
    index = {"metadata": {"total_size": 61 << 30}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_the_reference_machine_has_room_for_about_150_conversations(model: Path) -> None:
    code, out, _ = run("--config", str(model), *LOAD, "--json")
    assert code == 0
    plan = json.loads(out)
    assert plan["idle_conversations_that_fit"] == pytest.approx(150, rel=0.1)
    pinned = next(one for one in plan["retention"] if one["retention"] == "Pinned 480 s")
    assert pinned["unread_turns_admitted_per_minute"] == pytest.approx(plan["idle_conversations_that_fit"] / 8)
    assert plan["recommended"] == "Unpinned"


def test_the_text_says_where_the_pool_comes_from_and_why(model: Path) -> None:
    code, out, _ = run("--config", str(model / "config.json"), *LOAD)
    assert code == 0
    assert "KV per token: 32,768 bytes on each GPU (64 layers, 8 KV heads of 2 × 128, 2 bytes each)" in out
    assert "weights 61.0 GiB in all" in out
    assert "Recommended: Unpinned\n  - reads back " in out


def test_a_smaller_pool_makes_pinned_wait(model: Path) -> None:
    _, out, _ = run("--pool-tokens", "500000", "--conversations", "100", "--tokens", "24000", "--json")
    plan = json.loads(out)
    assert plan["sources"] == ["pool as given with --pool-tokens"]
    assert "memory is short" in plan["reasons"][-1]
    waits = {one["retention"]: one["wait_p99_seconds"] for one in plan["retention"]}
    assert waits["Pinned 480 s"] > waits["Unpinned"]


def test_of_many_conversations_a_part_is_simulated_in_a_part_of_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_command, "SAMPLE", 16)
    one, two = (
        json.loads(run("--pool-tokens", str(tokens), "--conversations", str(count), "--tokens", "8000", "--json")[1])
        for count, tokens in ((16, 64_000), (160, 640_000))
    )
    assert two["conversations_per_engine"] == 160
    assert two["idle_conversations_that_fit"] == 10 * one["idle_conversations_that_fit"]
    assert two["retention"][0]["token_hit_rate"] == one["retention"][0]["token_hit_rate"]
    assert two["reasons"] == one["reasons"]


def test_a_trace_stands_in_for_the_made_up_turns(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"session_id": "a", "input_length": 4000, "output_length": 407}\n'
        '{"session_id": "a", "delay": 90000, "input_length": 5000, "output_length": 407}\n'
    )
    code, out, _ = run("--trace", str(trace), "--pool-tokens", "16000", "--json")
    assert code == 0
    plan = json.loads(out)
    assert plan["conversations_per_engine"] == 1
    rates = {one["retention"]: one["token_hit_rate"] for one in plan["retention"]}
    assert rates["Unpinned"] == pytest.approx(1.0, abs=0.01)
    assert rates["Pinned 60 s"] == 0


def test_a_local_model_needs_no_options(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_32B))
    file = tmp_path / "cpu.yaml"
    file.write_text((EXAMPLES / "cpu-tiny.yaml").read_text().replace("../build/tiny-model", "./model"))
    code, out, err = run("--conversations", "1", "--tokens", "50", "--json", file=file)
    assert code == 0, err
    plan = json.loads(out)
    # 2 GiB, 256 KiB per token.
    assert plan["pool_tokens"] == 8192
    assert plan["block_tokens"] == 128


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give --conversations and --tokens, or --trace"),
        (LOAD, "the model is not on this machine: give --config, --kv-bytes-per-token or --pool-tokens"),
        ([*LOAD, "--kv-bytes-per-token", "32768"], "the size of the weights is unknown: give --weights-gib"),
        ([*LOAD, "--config", "none"], "none: cannot be read: No such file or directory"),
        ([*LOAD, "--pool-tokens", "4000"], " 4,000: far more conversations than it can keep"),
        ([*LOAD, "--kv-bytes-per-token", "32768", "--weights-gib", "2000"], "no memory is left for KV"),
    ],
    ids=["no-load", "no-model", "no-weights", "no-config", "small-pool", "no-memory"],
)
def test_what_is_missing_is_said(arguments: list[str], says: str) -> None:
    arguments = arguments or ["--pool-tokens", "1000000"]
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert says in err


def test_a_config_that_gives_no_figure_is_said(model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**QWEN3_32B, "num_hidden_layers": None}))
    code, _, err = run("--config", str(model), *LOAD)
    assert code == 2
    assert err == "pdctl plan: config.json: num_hidden_layers is missing\n"


def test_a_wrong_deployment_is_refused_with_its_field(tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(P5EN.read_text().replace("480", "5"))
    code, _, err = run(*LOAD, file=file)
    assert code == 2
    assert "spec.kvTransfer.decoderBlocksTTLSeconds" in err


def test_an_engine_that_does_not_answer_is_named() -> None:
    code, _, err = run(*LOAD, "--engine", "http://127.0.0.1:1")
    assert code == 1
    assert err.startswith("pdctl plan: --engine: no engine answers at http://127.0.0.1:1/metrics")


PAGE = """\
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="238090",user_specified_block_size="False"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="Qwen"} 0.25
"""
KEPT = "".join(
    f'{NUMBERS[key].name}{{engine="0",model_name="Qwen"}} {value}.0\n'
    for key, value in (("leased_blocks", 47_618), ("pinned_blocks", 0), ("readable_blocks", 119_045))
)


@pytest.mark.parametrize(
    ("status", "page", "says"),
    [
        (200, PAGE, None),
        (200, PAGE + KEPT, None),
        (404, PAGE, "answers with status 404"),
        (200, "up 1\n", "does not say the pool's size"),
        (200, PAGE.replace("238090", "None"), "does not say the pool's size"),
    ],
    ids=["vllm", "ours", "not-found", "other", "unknown"],
)
async def test_a_running_engine_is_asked_for_its_pool(status: int, page: str, says: str | None) -> None:
    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(status=status, text=page)

    server = web.Application()
    server.router.add_get("/metrics", metrics)
    async with TestServer(server, host="127.0.0.1") as running:
        url = str(running.make_url("/"))
        if says is None:
            kept = Retained(47_618, 0, 119_045) if KEPT in page else None
            assert await ask_engine(url) == EngineFacts(238_090, 16, 0.25, kept)
        else:
            with pytest.raises(EngineFactsError, match=says):
                await ask_engine(url)


@pytest.mark.parametrize(
    ("retained", "says"),
    [
        (None, "25.0 %"),
        (Retained(20, 0, 50), "25.0 %, of which 20.0 % leased to finished turns; 50.0 % of the pool is free and can"),
        (Retained(0, 10, 0), "25.0 %, of which 10.0 % pinned for finished turns; 0.0 % of the pool is free and can"),
        (Retained(0, 0, 7), "25.0 %; 7.0 % of the pool is free and can still be read"),
    ],
)
def test_what_a_running_engine_keeps_of_finished_turns_is_told(
    retained: Retained | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(_url: str) -> EngineFacts:
        return EngineFacts(100, 16, 0.25, retained)

    monkeypatch.setattr(plan_command, "ask_engine", answer)
    load = ["--conversations", "1", "--tokens", "100", "--engine", "http://127.0.0.1:1"]
    code, out, _ = run(*load)
    assert code == 0
    assert f"  in use at this moment: {says}" in out
    _, out, _ = run(*load, "--json")
    assert json.loads(out)["retained_blocks"] == (None if retained is None else retained._asdict())
