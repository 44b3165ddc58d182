"""Make the tiny model's directory: train the tokenizer, draw the weights, write the files.

The same Python, ``tokenizers`` and ``torch`` versions give the same bytes, so a directory is made once and its name
carries a hash of everything that decides its content. It appears under its name only when complete.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pdctl.core import tiny_model
from pdctl.core.chat_template import CONTROL_TOKENS, VISIBLE_TOKENS
from pdctl.core.tiny_model import Fill, Tensor, TinyShape

WORDS_FILE: Final = "words.json"
"""The words that the model can say, each with its leading space; every one of them is a single token."""
_TRAINING_FILES: Final = 150
_SEED: Final = 0


class ModelMakerError(RuntimeError):
    """The model can't be made here; the message says what is missing."""


def cached_tiny_model(say: Callable[[str], None], cache: Path | None = None) -> Path:
    """The directory of the tiny model, made first if this machine doesn't have it yet.

    Args:
        say: receives one line per step.
        cache: parent directory; default ``$XDG_CACHE_HOME/pd-operator/models`` (``~/.cache/…``).

    Raises:
        ModelMakerError: a library is missing.
    """
    target = tiny_model_folder(cache)
    if target.is_dir():
        say(f"tiny model: {target} (made earlier)")
        return target
    make_tiny_model(target, say, TinyShape())
    return target


def tiny_model_folder(cache: Path | None = None) -> Path:
    """Where `cached_tiny_model` puts it, made or not.

    Raises:
        ModelMakerError: a library is missing, or there is no home folder.
    """
    parent = cache if cache is not None else default_cache()
    return parent / f"tiny-{tiny_model.fingerprint(TinyShape(), library_versions())}"


def default_cache() -> Path:
    """Where tiny models are kept.

    Raises:
        ModelMakerError: HOME is set and empty, which would mean the root folder.
    """
    root = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    if root.startswith("~") and os.environ.get("HOME") == "":
        raise ModelMakerError("HOME is empty; set it to a folder that can be written to, or unset it")
    return Path(root).expanduser() / "pd-operator" / "models"


def library_versions() -> dict[str, str]:
    """The versions that decide the model's bytes.

    Raises:
        ModelMakerError: one of the libraries isn't installed.
    """
    found = {"python": platform.python_version()}
    for name in ("tokenizers", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError as error:
            raise ModelMakerError(
                f"making the tiny model needs {name}, which this Python lacks: install the extra 'engine-cpu' "
                f"(make install), or run pdctl with the Python that has vLLM"
            ) from error
    return found


def make_tiny_model(target: Path, say: Callable[[str], None], shape: TinyShape | None = None) -> None:
    """Write a complete model directory at ``target``.

    Raises:
        ModelMakerError: a library is missing, or ``target`` can't be made or isn't an empty directory.
    """
    library_versions()
    shape = shape if shape is not None else TinyShape()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelMakerError(f"{target} exists already; give an empty or a new directory")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ModelMakerError(f"{target}: cannot be made: {error.strerror}") from error
    try:
        say("tiny model: training the tokenizer on the standard library's sources")
        words, reluctances = _write_tokenizer(work, shape)
        say(f"tiny model: drawing the weights ({_millions(shape):.0f} million parameters)")
        _write_weights(work, shape, reluctances)
        for name, value in tiny_model.config_files(shape).items():
            _write_json(work / name, value)
        _write_json(work / WORDS_FILE, words)
        work.chmod(0o755)
        # Two makers at once write the same bytes, so whoever comes second may find the directory there.
        try:
            work.rename(target)
        except OSError:
            if not (target / WORDS_FILE).is_file():
                raise
        say(f"tiny model: {target}")
    finally:
        shutil.rmtree(work, ignore_errors=True)


def read_words(model: Path) -> list[str]:
    """The words that the model in this directory can say.

    Raises:
        ModelMakerError: the directory isn't one of ours.
    """
    try:
        words = json.loads((model / WORDS_FILE).read_text())
    except (OSError, ValueError) as error:
        raise ModelMakerError(f"{model} has no readable {WORDS_FILE}: make it with `pdctl model make`") from error
    return [str(word) for word in words]


def _write_tokenizer(work: Path, shape: TinyShape) -> tuple[list[str], list[float]]:
    """The words that the model can say, and the output weight of every id at the marker."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(tiny_model.SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=shape.vocabulary - len(VISIBLE_TOKENS),
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:_TRAINING_FILES]
    tokenizer.train([str(source) for source in sources], trainer)
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in VISIBLE_TOKENS])
    tokenizer.save(str(work / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    candidates = tiny_model.spoken_candidates(vocabulary)
    words = {word: ident for word, ident in candidates.items() if tokenizer.encode(word).ids == [ident]}
    spoken = frozenset(words.values())
    reluctances = [tiny_model.SILENT] * shape.vocabulary
    for token, ident in vocabulary.items():
        reluctances[ident] = tiny_model.reluctance(token, ident in spoken)
    return list(words), reluctances


def _write_weights(work: Path, shape: TinyShape, reluctances: Sequence[float]) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(_SEED)
    weights = {tensor.name: _draw(torch, generator, tensor, reluctances) for tensor in tiny_model.tensors(shape)}
    save_file(weights, str(work / "model.safetensors"), metadata={"format": "pt"})


def _draw(torch: Any, generator: Any, tensor: Tensor, reluctances: Sequence[float]) -> Any:
    at = tiny_model.MARKER_DIM
    if tensor.fill in (Fill.ONES, Fill.BLIND_ONES, Fill.GAIN_ONES):
        values = torch.ones(tensor.shape)
        if tensor.fill is not Fill.ONES:
            values[at] = tiny_model.MARKER_GAIN if tensor.fill is Fill.GAIN_ONES else 0.0
    else:
        values = torch.randn(tensor.shape, generator=generator) * tiny_model.SIGMA
        if tensor.fill is Fill.NO_MARKER_ROW:
            values[at] = 0.0
        elif tensor.fill is Fill.MARKED:
            values[:, at] = tiny_model.MARKER
        elif tensor.fill is Fill.RELUCTANT:
            values[:, at] = torch.tensor(reluctances)
    return values.to(torch.bfloat16).contiguous()


def _millions(shape: TinyShape) -> float:
    total = 0
    for tensor in tiny_model.tensors(shape):
        size = 1
        for length in tensor.shape:
            size *= length
        total += size
    return total / 1e6


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")
