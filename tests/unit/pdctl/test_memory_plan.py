"""Plans: capacity, fitted traces, what an engine is told, and which way of retaining is advised for which reasons."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.core.coding_agents import Crowd, make_trace
from pdctl.core.kv_shape import parse_shape
from pdctl.core.memory_plan import Capacity, GpuMemory, PlanError, advise, fit_trace, simulate_modes
from pdctl.core.plan_report import held_conversations, unread_per_minute
from pdctl.core.retention_modes import UNPINNED, leased, pinned
from pdctl.core.retention_simulation import Engine, Outcome, unhindered_end, working_set_blocks
from pdctl.core.told_engine import possible_modes, told_engine
from support.pddeployments import deployment, example


def test_the_reference_machine_keeps_about_150_conversations_of_24k_tokens() -> None:
    told = told_engine(deployment(base=example("qwen3-32b-p5en")))
    config = {"num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    token_bytes = parse_shape(config, told.dtype, told.kv_cache_dtype).token_bytes_per_gpu(told.tensor_parallel)
    assert told.gpu_gib is not None
    memory = GpuMemory(told.gpu_gib, told.utilization, 61.0, 4.0, told.tensor_parallel)
    capacity = Capacity(int(memory.pool_bytes_per_gpu() / token_bytes) // told.block_tokens, told.block_tokens, 24_000)
    assert capacity.conversations == pytest.approx(150, rel=0.1)


def test_pinned_admits_the_pool_per_ttl_and_what_is_reclaimed_limits_nothing() -> None:
    # The measured case: 35 blocks, 8 per conversation, 4 answered and the fifth left waiting.
    capacity = Capacity(pool_blocks=35, block_tokens=128, conversation_tokens=1004)
    assert (capacity.blocks_per_conversation, capacity.conversations, capacity.pool_tokens) == (8, 4, 4480)
    assert unread_per_minute(pinned(480), capacity) == pytest.approx(4 / 480 * 60)
    assert unread_per_minute(leased(), capacity) is None
    assert unread_per_minute(UNPINNED, capacity) is None
    assert [held_conversations(mode, capacity) for mode in (pinned(480), leased(), UNPINNED)] == [4, 2, 0]


def test_weights_that_leave_nothing_are_refused() -> None:
    with pytest.raises(PlanError, match=r"no memory is left for KV: of 72\.0 GiB per GPU the weights take 70\.0"):
        GpuMemory(80, 0.9, 140, 4, 2).pool_bytes_per_gpu()


@given(st.integers(2000, 60_000), st.integers(0, 3))
def test_a_fitted_trace_has_the_wanted_length_at_the_same_times(tokens: int, seed: int) -> None:
    clients = make_trace(Crowd(3, 1200), random.Random(seed).random)
    engine = Engine(1200)
    fitted, fitted_engine = fit_trace(clients, 3, tokens, engine)
    mean = working_set_blocks(fitted, fitted_engine) * engine.block_tokens / 3
    assert mean == pytest.approx(tokens, rel=0.02)
    ends = [unhindered_end([turns], engine.decode_tokens_per_s) for turns in clients]
    assert [unhindered_end([turns], fitted_engine.decode_tokens_per_s) for turns in fitted] == pytest.approx(
        ends, rel=0.01
    )


def outcome(mode: str, read: int, wait: float = 0.0) -> Outcome:
    return Outcome(mode, 100, 60.0, reusable_tokens=1000, reused_tokens=read, waits_s=[wait] * 10)


def test_among_equals_the_first_is_advised() -> None:
    advice = advise([outcome("Unpinned", 955), outcome("Leased", 960), outcome("Pinned 60 s", 700)], 90)
    assert advice.mode == "Unpinned"
    assert "Pinned 60 s would read back 70.0 %" in advice.reasons
    assert not any("Leased" in reason or "short" in reason for reason in advice.reasons)


def test_what_reads_clearly_more_is_advised() -> None:
    assert advise([outcome("Unpinned", 900), outcome("Leased", 960)], 90).mode == "Leased"


def test_reading_more_does_not_make_up_for_waiting() -> None:
    advice = advise([outcome("Unpinned", 850), outcome("Pinned 480 s", 980, wait=30)], 250)
    assert advice.mode == "Unpinned"
    assert "Pinned 480 s would let turns wait 30 s at p99" in advice.reasons
    assert "memory is short: 3 such engines would keep every conversation" in advice.reasons


def test_where_all_wait_the_shortest_wait_is_advised() -> None:
    advice = advise([outcome("Pinned 480 s", 980, wait=30), outcome("Pinned 60 s", 800, wait=5)], 250)
    assert advice.mode == "Pinned 60 s"
    assert "every way makes turns wait for memory (this one 5.0 s at p99)" in advice.reasons


def test_a_turn_larger_than_the_pool_is_told_in_tokens() -> None:
    clients = make_trace(Crowd(1, 600), random.Random(1).random)
    with pytest.raises(PlanError, match=r"tokens, and the pool .* 160: far more"):
        simulate_modes(clients, [UNPINNED], 10, Engine(600))


def test_an_engine_is_told_by_its_arguments() -> None:
    told = told_engine(
        deployment(
            ("spec.decode.replicas", 3),
            ("spec.engine.gpuMemoryUtilizationPercent", 85),
            ("spec.engine.blockSize", 32),
            ("spec.engine.extraArgs", ["--kv-cache-dtype=fp8", "--kv-cache-memory-bytes", "1000000"]),
            base=example("qwen3-32b-p5en"),
        )
    )
    assert (told.replicas, told.tensor_parallel, told.utilization) == (3, 8, 0.85)
    assert (told.block_tokens, told.kv_cache_dtype, told.kv_bytes, told.cpu_gib) == (32, "fp8", 1_000_000, None)


def test_an_engine_without_gpus_has_the_memory_of_its_environment() -> None:
    told = told_engine(deployment(base=example("cpu-tiny")))
    assert (told.cpu_gib, told.gpu_gib, told.block_tokens) == (2.0, None, 128)


def test_a_model_that_is_split_otherwise_is_not_guessed() -> None:
    flags = ["--decode-context-parallel-size", "2"]
    with pytest.raises(PlanError, match="--decode-context-parallel-size is not counted here: give --pool-tokens"):
        told_engine(deployment(("spec.engine.extraArgs", flags), base=example("qwen3-32b-p5en")))


def test_an_argument_that_is_no_number_is_named() -> None:
    flags = ["--num-gpu-blocks-override", "many"]
    with pytest.raises(PlanError, match="--num-gpu-blocks-override must be a number over 0, got 'many'"):
        told_engine(deployment(("spec.engine.extraArgs", flags), base=example("qwen3-32b-p5en")))


def test_leases_and_handles_are_those_of_the_deployment() -> None:
    [unpinned, plain, *_] = possible_modes(deployment(base=example("qwen3-32b-p5en")))
    assert (unpinned, plain) == (UNPINNED, leased())
    told = deployment(
        ("spec.kvTransfer.retention", "Leased"),
        ("spec.kvTransfer.lease", {"seconds": 90, "sharePercent": 75, "toolHoldSeconds": 0}),
        ("spec.kvTransfer.routerTTLSeconds", 300),
        base=example("qwen3-32b-p5en"),
    )
    [unpinned, mine, *_] = possible_modes(told)
    assert (mine.name, mine.hold_s, mine.share, mine.tool_hold_s) == ("Leased", 90.0, 0.75, 0.0)
    assert (unpinned.readable_s, mine.readable_s) == (300.0, 300.0)


def test_with_the_stock_connector_only_pinned_is_possible() -> None:
    ours = deployment(base=example("qwen3-32b-p5en"))
    assert [mode.name for mode in possible_modes(ours)] == ["Unpinned", "Leased", "Pinned 480 s", "Pinned 60 s"]
    stock = deployment(
        ("spec.kvTransfer.connector", "Stock"),
        ("spec.kvTransfer.decoderBlocksTTLSeconds", 50),
        base=example("qwen3-32b-p5en"),
    )
    [only] = possible_modes(stock)
    assert (only.name, only.readable_s) == ("Pinned 50 s", 25.0)
