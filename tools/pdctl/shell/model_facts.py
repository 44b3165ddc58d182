"""A model's `config.json` and the size of its weights, from files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
MAX_BYTES: Final = 16 << 20


class ModelFactsError(Exception):
    """A file that can't be used, in one sentence that names it."""


def read_config(path: Path) -> Mapping[str, Any]:
    """The config that is this file or lies in this folder.

    Raises:
        ModelFactsError: see its name.
    """
    file = path / CONFIG if path.is_dir() else path
    return _read_object(file)


def weights_bytes(path: Path) -> int | None:
    """Size of the weights beside a config; None: neither they nor their index are there.

    Raises:
        ModelFactsError: the index is there and can't be used.
    """
    folder = path if path.is_dir() else path.parent
    if (folder / INDEX).is_file():
        metadata = _read_object(folder / INDEX).get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
        if isinstance(total, int) and total > 0:
            return total
    sizes = [file.stat().st_size for file in folder.glob("*.safetensors")]
    return sum(sizes) or None


def _read_object(file: Path) -> Mapping[str, Any]:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ModelFactsError(f"{file}: is larger than {MAX_BYTES >> 20} MiB")
        value = json.loads(content)
    except OSError as error:
        raise ModelFactsError(f"{file}: cannot be read: {error.strerror or error}") from None
    except ValueError:
        raise ModelFactsError(f"{file}: not JSON") from None
    if not isinstance(value, dict):
        raise ModelFactsError(f"{file}: must be an object")
    return value
