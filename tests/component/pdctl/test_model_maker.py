"""The tiny model on disk: the same bytes every time, and replies that survive the way through text."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from typer.testing import CliRunner

from pdctl.core import tiny_model
from pdctl.core.tiny_model import TinyShape
from pdctl.shell.app import app
from pdctl.shell.model_maker import (
    ModelMakerError,
    cached_tiny_model,
    make_tiny_model,
    read_words,
    tiny_model_folder,
)

SHAPE = TinyShape(hidden=64, intermediate=64, layers=1, heads=1, kv_heads=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("model") / "a"
    make_tiny_model(target, lambda _line: None, SHAPE)
    return target


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))


def test_the_same_bytes_every_time(model, tmp_path):
    make_tiny_model(tmp_path / "b", lambda _line: None, SHAPE)
    names = sorted(path.name for path in model.iterdir())
    assert names == sorted(path.name for path in (tmp_path / "b").iterdir())
    assert {"config.json", "tokenizer.json", "model.safetensors", "words.json"} <= set(names)
    for name in names:
        assert (model / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_every_reply_it_can_give_comes_back_as_the_same_ids(model, tokenizer):
    words = read_words(model)
    ids = [tokenizer.token_to_id(word.replace(" ", "Ġ")) for word in words]
    assert len(words) > 2000
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    prompt_ids = tokenizer.encode(prompt).ids

    @settings(max_examples=200, deadline=None)
    @given(st.lists(st.sampled_from(ids), min_size=1, max_size=64))
    def check(reply: list[int]) -> None:
        text = tokenizer.decode(reply)
        assert tokenizer.encode(f"{prompt}{text}<|im_end|>\n").ids[: len(prompt_ids) + len(reply)] == prompt_ids + reply

    check()


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_can_be_encoded_and_comes_back(tokenizer, text):
    # Control tokens are dropped by decoding, which is what makes them control tokens.
    if not any(token in text for token in tiny_model.CONTROL_TOKENS):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_prose_has_a_sane_number_of_tokens(tokenizer):
    prose = "The quick brown fox jumps over the lazy dog, and then everyone in the village went home to read a book."
    assert len(tokenizer.encode(prose).ids) < 3 * len(prose.split())


def test_only_words_have_no_reluctance(model, tokenizer):
    spoken = {tokenizer.token_to_id(word.replace(" ", "Ġ")) for word in read_words(model)}
    with safe_open(str(model / "model.safetensors"), framework="pt") as weights:
        column = weights.get_tensor("lm_head.weight")[:, tiny_model.MARKER_DIM]
    assert {at for at, value in enumerate(column.tolist()) if value == tiny_model.SPOKEN} == spoken


def test_it_is_made_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny_model.TinyShape, "__init__", lambda self: None)
    made: list[Path] = []

    def make(target: Path, _say, _shape) -> None:
        target.mkdir(parents=True)
        made.append(target)

    monkeypatch.setattr("pdctl.shell.model_maker.make_tiny_model", make)
    monkeypatch.setattr("pdctl.core.tiny_model.fingerprint", lambda _shape, _versions: "abc")
    lines: list[str] = []
    first = cached_tiny_model(lines.append, tmp_path)
    assert cached_tiny_model(lines.append, tmp_path) == first == tmp_path / "tiny-abc"
    assert made == [first]
    assert lines == [f"tiny model: {first} (made earlier)"]


def test_the_command_makes_it_in_the_cache_where_no_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tiny_model_folder()
    folder.mkdir(parents=True)
    done = CliRunner().invoke(app, ["model", "make"])
    assert (done.exit_code, done.output) == (0, f"tiny model: {folder} (made earlier)\n")


def test_an_empty_home_is_not_the_root_folder(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    done = CliRunner().invoke(app, ["model", "make"])
    assert (done.exit_code, done.output) == (
        2,
        "HOME is empty; set it to a folder that can be written to, or unset it\n",
    )


def test_a_folder_in_use_is_not_touched(tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ModelMakerError, match="exists already"):
        make_tiny_model(tmp_path, lambda _line: None, SHAPE)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_foreign_folder_has_no_words(tmp_path):
    (tmp_path / "words.json").write_text(json.dumps("{")[:-1])
    with pytest.raises(ModelMakerError, match=r"words\.json"):
        read_words(tmp_path)
