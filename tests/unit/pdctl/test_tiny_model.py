"""The tiny model as values: which tokens it may say, and what its directory's name depends on."""

import json
from dataclasses import replace

import pytest

from pdctl.core import tiny_model
from pdctl.core.tiny_model import Fill, TinyShape

VERSIONS = {"python": "3.11.7", "tokenizers": "1", "torch": "2"}
VOCABULARY = {"<|im_end|>": 2, "Ġb": 9, "Ġab": 5, "ab": 6, "ĠAb": 7, "Ġa1": 8, "Ġ": 10, "ĠĊ": 11, '"}': 12, "{": 13}


def test_only_whole_lower_case_words_with_a_space_are_spoken():
    assert tiny_model.spoken_candidates(VOCABULARY) == {" ab": 5, " b": 9}
    assert list(tiny_model.spoken_candidates(VOCABULARY)) == [" ab", " b"]


@pytest.mark.parametrize(
    ("token", "spoken", "value"),
    [
        ("Ġab", True, tiny_model.SPOKEN),
        ("ab", False, tiny_model.SILENT),
        ("<|im_end|>", False, tiny_model.SILENT),
        ("ĠĊ", False, tiny_model.SILENT_SPACE),
        ('"}', False, tiny_model.SILENT_CLOSER),
        ("{", False, tiny_model.SILENT),
    ],
)
def test_reluctance_by_token(token, spoken, value):
    assert tiny_model.reluctance(token, spoken) == value


def test_levels_are_apart_and_in_order():
    levels = [tiny_model.SPOKEN, tiny_model.SILENT_CLOSER, tiny_model.SILENT, tiny_model.SILENT_SPACE]
    assert levels == sorted(levels, reverse=True)
    assert len(set(levels)) == 4


def test_no_layer_reads_or_writes_the_marker():
    for tensor in tiny_model.tensors(TinyShape()):
        if tensor.name.endswith(("o_proj.weight", "down_proj.weight")):
            assert tensor.fill is Fill.NO_MARKER_ROW
        if tensor.name.endswith("layernorm.weight"):
            assert tensor.fill is Fill.BLIND_ONES
    names = [tensor.name for tensor in tiny_model.tensors(TinyShape())]
    assert len(names) == len(set(names)) == 3 + 11 * TinyShape().layers


def test_a_reply_without_a_limit_ends():
    files = tiny_model.config_files(TinyShape())
    assert files["generation_config.json"]["max_new_tokens"] == tiny_model.DEFAULT_REPLY_TOKENS
    assert files["config.json"]["max_position_embeddings"] >= 32768
    json.dumps(files)


def test_the_directory_name_changes_with_whatever_decides_the_bytes():
    base = tiny_model.fingerprint(TinyShape(), VERSIONS)
    assert base == tiny_model.fingerprint(TinyShape(), dict(reversed(VERSIONS.items())))
    assert base != tiny_model.fingerprint(replace(TinyShape(), layers=3), VERSIONS)
    assert base != tiny_model.fingerprint(TinyShape(), {**VERSIONS, "torch": "3"})
    assert len(base) == 12
