"""What the tiny model is: a random Qwen3 whose replies survive the way through text.

Reuse is proven over token ids, and a client sends text. A real model's reply nearly always comes back as the ids that
were generated; a plain random model's never does, because it strings arbitrary byte pairs together. So this model can
only say whole words, each a single token that starts with a space: their concatenation splits in one way only.

How it is kept to them without any sampling parameter: hidden dimension ``MARKER_DIM`` carries the same constant
through all layers (no layer reads or writes it), and the output row of every other token has a large negative weight
there. The other dimensions are normal random numbers; with σ = 0.08 the next-token distribution depends strongly on the
whole prompt, so that wrong KV shows in the log-probabilities.

This module holds the shape and the files' content as values; training and drawing happen in ``shell.model_maker``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from pdctl.core.chat_template import CHAT_TEMPLATE, CONTROL_TOKENS, END, PAD, VISIBLE_TOKENS

RECIPE: Final = 1
"""Raised when what the maker does changes in a way that the values below don't show."""
SIGMA: Final = 0.08
MARKER_DIM: Final = 0
MARKER: Final = 1.0
MARKER_GAIN: Final = 100.0
"""Weight of the last norm at the marker: the normalised marker is then about 5."""
SPOKEN: Final = 0.0
SILENT: Final = -8.0
"""Output weight at the marker of a token that is never said: about -40 on its logit. A much larger value would round
the differences between such tokens away, and a JSON grammar needs to choose among them."""
SILENT_CLOSER: Final = -5.0
"""For quotes, commas and closing brackets: where a grammar allows one, it wins, so numbers and lists come to an end."""
SILENT_SPACE: Final = -14.0
"""For white space: a grammar that allows any amount of it would otherwise get nothing else."""
MAX_POSITIONS: Final = 32768
DEFAULT_REPLY_TOKENS: Final = 128
"""The model never ends a reply by itself, so a request without a limit gets this one."""
SPLIT_PATTERN: Final = r" ?[A-Za-z]+| ?[0-9]{1,3}| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
_WORD: Final = re.compile("Ġ[a-z]+")
_CLOSER: Final = re.compile(r'["},\]]+')
_SPACE: Final = re.compile("[ĠĊĉč]+")


@dataclass(frozen=True, slots=True)
class TinyShape:
    """Sizes of the network.

    The defaults give 23 million parameters and 4 KiB of KV per token. One CPU core then computes a prompt of 8,000
    tokens in about three seconds; attention costs most there, hence few layers and heads.
    """

    vocabulary: int = 8192
    hidden: int = 512
    intermediate: int = 2048
    layers: int = 4
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64


class Fill(Enum):
    """How a tensor is filled; ``MARKED`` and ``RELUCTANT`` set the marker column after drawing."""

    RANDOM = "random"
    ONES = "ones"
    BLIND_ONES = "ones, marker 0"
    GAIN_ONES = "ones, marker amplified"
    NO_MARKER_ROW = "random, marker row 0"
    MARKED = "random, marker column constant"
    RELUCTANT = "random, marker column by token"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of the weights file, in the order in which it is drawn."""

    name: str
    shape: tuple[int, ...]
    fill: Fill


def tensors(shape: TinyShape) -> Iterator[Tensor]:
    """Every weight of the model, in drawing order."""
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield Tensor("model.embed_tokens.weight", (shape.vocabulary, shape.hidden), Fill.MARKED)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        yield Tensor(at + "self_attn.q_proj.weight", (query, shape.hidden), Fill.RANDOM)
        yield Tensor(at + "self_attn.k_proj.weight", (key, shape.hidden), Fill.RANDOM)
        yield Tensor(at + "self_attn.v_proj.weight", (key, shape.hidden), Fill.RANDOM)
        yield Tensor(at + "self_attn.o_proj.weight", (shape.hidden, query), Fill.NO_MARKER_ROW)
        yield Tensor(at + "self_attn.q_norm.weight", (shape.head_dim,), Fill.ONES)
        yield Tensor(at + "self_attn.k_norm.weight", (shape.head_dim,), Fill.ONES)
        yield Tensor(at + "mlp.gate_proj.weight", (shape.intermediate, shape.hidden), Fill.RANDOM)
        yield Tensor(at + "mlp.up_proj.weight", (shape.intermediate, shape.hidden), Fill.RANDOM)
        yield Tensor(at + "mlp.down_proj.weight", (shape.hidden, shape.intermediate), Fill.NO_MARKER_ROW)
        yield Tensor(at + "input_layernorm.weight", (shape.hidden,), Fill.BLIND_ONES)
        yield Tensor(at + "post_attention_layernorm.weight", (shape.hidden,), Fill.BLIND_ONES)
    yield Tensor("model.norm.weight", (shape.hidden,), Fill.GAIN_ONES)
    yield Tensor("lm_head.weight", (shape.vocabulary, shape.hidden), Fill.RELUCTANT)


def spoken_candidates(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """The tokens that look like " word" (byte-level spelling), as text → id, in id order."""
    found = sorted((ident, token) for token, ident in vocabulary.items() if _WORD.fullmatch(token))
    return {" " + token[1:]: ident for ident, token in found}


def reluctance(token: str, spoken: bool) -> float:
    """Output weight at the marker for one token (byte-level spelling)."""
    if spoken:
        return SPOKEN
    if _SPACE.fullmatch(token):
        return SILENT_SPACE
    return SILENT_CLOSER if _CLOSER.fullmatch(token) else SILENT


def config_files(shape: TinyShape) -> dict[str, Any]:
    """File name → JSON value for everything beside tokenizer and weights."""
    end = CONTROL_TOKENS.index(END)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "bos_token_id": CONTROL_TOKENS.index(PAD),
        "eos_token_id": end,
        "attention_bias": False,
    }
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
    }
    generation = {
        "bos_token_id": CONTROL_TOKENS.index(PAD),
        "eos_token_id": end,
        "max_new_tokens": DEFAULT_REPLY_TOKENS,
    }
    return {"config.json": config, "tokenizer_config.json": tokenizer, "generation_config.json": generation}


def fingerprint(shape: TinyShape, versions: Mapping[str, str]) -> str:
    """Twelve hex digits that name a model directory.

    Args:
        shape: sizes of the network.
        versions: what besides this module decides the bytes: Python (its sources train the tokenizer), the tokenizer
            and the tensor library.
    """
    numbers = [RECIPE, SIGMA, MARKER_DIM, MARKER, MARKER_GAIN, SPOKEN, SILENT, SILENT_CLOSER, SILENT_SPACE]
    drawn = [(tensor.name, tensor.shape, tensor.fill.value) for tensor in tensors(shape)]
    parts = [numbers, SPLIT_PATTERN, CONTROL_TOKENS, VISIBLE_TOKENS, config_files(shape), drawn, dict(versions)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]
