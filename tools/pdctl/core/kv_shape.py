"""How much memory a token's KV takes, from a model's `config.json`.

Only for models whose layers all keep the same for every token: what differs by layer or is bounded by a window has no
figure per token, and a wrong one would be believed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

DTYPE_BYTES: Final = {
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float32": 4,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "fp8_ds_mla": 1,
}
_NOT_PER_TOKEN: Final = {
    "sliding_window": "a sliding window",
    "linear_num_key_heads": "linear attention",
    "mamba_d_state": "a state-space model",
    "ssm_state_size": "a state-space model",
    "index_head_dim": "an index beside its KV",
}


class ShapeError(ValueError):
    """A config that gives no figure per token, in one sentence."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """A model's KV. ``heads`` None: one latent vector per token and layer (MLA), which every GPU keeps whole."""

    layers: int
    heads: int | None
    width: int
    """Values per head and token, keys and values together; of a latent vector all of it."""
    value_bytes: int

    @property
    def token_bytes(self) -> int:
        """Of one token, kept once."""
        return self.layers * (self.heads or 1) * self.width * self.value_bytes

    def token_bytes_per_gpu(self, tensor_parallel: int) -> int:
        """Of one token on each GPU: heads are divided among them, and one is the least."""
        heads = 1 if self.heads is None else -(-self.heads // tensor_parallel)
        return self.layers * heads * self.width * self.value_bytes


def parse_shape(config: Mapping[str, Any], dtype: str = "auto", kv_cache_dtype: str = "auto") -> KVShape:
    """Read a Hugging Face config.

    Args:
        config: the content of `config.json`.
        dtype: as vLLM's `--dtype`.
        kv_cache_dtype: as vLLM's `--kv-cache-dtype`.

    Raises:
        ShapeError: a key is missing or is no number, or the model's KV has no size per token.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ShapeError("config.json: text_config must be an object")
    _refuse_mixed(text)
    value_bytes = _value_bytes(config, text, dtype, kv_cache_dtype)
    layers = _number(text, "num_hidden_layers")
    if text.get("kv_lora_rank") is not None:
        return KVShape(layers, None, _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim"), value_bytes)
    attention_heads = _number(text, "num_attention_heads")
    heads = _number(text, "num_key_value_heads") if text.get("num_key_value_heads") is not None else attention_heads
    if text.get("head_dim") is not None:
        size = _number(text, "head_dim")
    else:
        size = _number(text, "hidden_size") // attention_heads
    return KVShape(layers, heads, 2 * size, value_bytes)


def _refuse_mixed(text: Mapping[str, Any]) -> None:
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and len(set(map(str, kinds))) > 1:
        shown = ", ".join(sorted(set(map(str, kinds))))
        raise ShapeError(f"config.json: its layers are of several kinds ({shown}), so its KV has no size per token")
    for key, what in _NOT_PER_TOKEN.items():
        # Qwen names a window and says beside it that there is none.
        if text.get(key) and (key != "sliding_window" or text.get("use_sliding_window", True)):
            raise ShapeError(f"config.json: {key}: the model has {what}, so its KV can't be told from this file")


def _value_bytes(config: Mapping[str, Any], text: Mapping[str, Any], dtype: str, kv_cache_dtype: str) -> int:
    wanted, source = kv_cache_dtype, "--kv-cache-dtype"
    if wanted == "auto":
        wanted, source = dtype, "dtype"
    if wanted == "auto":
        found = next((one[key] for one in (text, config) for key in ("torch_dtype", "dtype") if one.get(key)), None)
        if found is None:
            raise ShapeError("config.json: says no torch_dtype, and neither does the deployment (spec.model.dtype)")
        # As vLLM does: a checkpoint in 32 bits runs in 16.
        wanted, source = "bfloat16" if str(found) == "float32" else str(found), "config.json: torch_dtype"
    if wanted not in DTYPE_BYTES:
        raise ShapeError(f"{source}: {wanted!r} is of unknown size; known: {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[wanted]


def _number(text: Mapping[str, Any], key: str) -> int:
    value = text.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        missing = "is missing" if value is None else f"must be a whole number, at least 1, got {value!r}"
        raise ShapeError(f"config.json: {key} {missing}")
    return value
