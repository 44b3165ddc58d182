"""Bytes per token from a model's config, and what is refused because it has none."""

from __future__ import annotations

from typing import Any

import pytest

from pdctl.core.kv_shape import ShapeError, parse_shape

QWEN3_32B: dict[str, Any] = {
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "sliding_window": None,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
LATENT: dict[str, Any] = {
    "num_hidden_layers": 60,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}


def test_qwen3_32b_has_256_kib_per_token() -> None:
    shape = parse_shape(QWEN3_32B)
    assert shape.token_bytes == 256 * 1024
    assert shape.token_bytes_per_gpu(8) == 32 * 1024
    assert shape.token_bytes_per_gpu(1) == 256 * 1024


def test_a_gpu_keeps_a_whole_head_at_least() -> None:
    assert parse_shape(QWEN3_32B).token_bytes_per_gpu(16) == parse_shape(QWEN3_32B).token_bytes_per_gpu(8)


def test_a_latent_vector_is_whole_on_every_gpu() -> None:
    shape = parse_shape(LATENT)
    assert shape.token_bytes == shape.token_bytes_per_gpu(8) == 60 * (512 + 64) * 2


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "size"),
    [("auto", "auto", 2), ("float32", "auto", 4), ("auto", "fp8", 1), ("float32", "fp8_e4m3", 1)],
)
def test_the_engine_is_asked_before_the_config(dtype: str, kv_cache_dtype: str, size: int) -> None:
    assert parse_shape(QWEN3_32B, dtype, kv_cache_dtype).value_bytes == size


def test_what_can_be_derived_may_be_absent() -> None:
    config = {key: QWEN3_32B[key] for key in ("num_hidden_layers", "num_attention_heads", "hidden_size", "torch_dtype")}
    assert parse_shape(config).token_bytes == 64 * 64 * 2 * 80 * 2
    assert parse_shape({"text_config": QWEN3_32B}).token_bytes == 256 * 1024
    assert parse_shape({**QWEN3_32B, "torch_dtype": "float32"}).value_bytes == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": "64"}, "num_hidden_layers must be a whole number"),
        ({"head_dim": None, "hidden_size": None}, "hidden_size is missing"),
        ({"torch_dtype": None}, "says no torch_dtype"),
        ({"torch_dtype": "int3"}, "'int3' is of unknown size"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "full_attention, linear_attention"),
        ({"sliding_window": 4096, "use_sliding_window": True}, "a sliding window"),
        ({"index_head_dim": 128}, "an index beside its KV"),
        ({"text_config": 7}, "text_config must be an object"),
    ],
    ids=["layers", "text", "size", "no-dtype", "dtype", "mixed", "window", "index", "nested"],
)
def test_what_gives_no_figure_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ShapeError, match=says):
        parse_shape({**QWEN3_32B, **change})
