"""Read a PDDeployment file. Separate from parsing so that only this module knows about paths and YAML text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from pd_operator.core.model import PDDeployment
from pd_operator.core.parse import parse_deployment
from pdctl.core.yaml_text import YamlTextError, read_yaml

MAX_BYTES: Final = 1 << 20
"""Largest file that is read; the rest of the limits is in `yaml_text`."""
_MODEL_CONFIGS: Final = ("config.json", "params.json")
"""What vLLM reads a model's shape from: Hugging Face's file, or Mistral's."""


class FileError(Exception):
    """A file that cannot be used, in one sentence that names it (and the line, where there is one)."""


def load_deployment(path: Path) -> PDDeployment:
    """Read and check a file with one PDDeployment. A relative model folder is resolved against the file's folder.

    Raises:
        FileError: the file is missing, unreadable, not YAML, or holds anything but one document.
        pd_operator.core.problems.SpecError: the object is wrong; all problems at once.
    """
    deployment = parse_deployment(read_document(path))
    name = deployment.spec.model.name
    if deployment.spec.model.is_local and not Path(name).is_absolute():
        return deployment.with_model_name(str((path.parent / name).resolve()))
    return deployment


def check_model_folder(deployment: PDDeployment, file: Path) -> None:
    """See that a model on this machine is there, before an engine takes half a minute to find out.

    Args:
        deployment: as `load_deployment` gives it, the model's path made absolute.
        file: where it was read from, for the message.

    Raises:
        FileError: no such folder, or nothing in it that says which model it is.
    """
    if not deployment.spec.model.is_local:
        return
    model = Path(deployment.spec.model.name)
    if any((model / name).is_file() for name in _MODEL_CONFIGS) or (model.is_file() and model.suffix == ".gguf"):
        return
    if not model.exists():
        what = "does not exist"
    elif model.is_dir():
        what = f"holds no {_MODEL_CONFIGS[0]}"
    else:
        what = "is not a folder"
    raise FileError(f"{file}: spec.model.name: {model} {what}; `pdctl model make {model}` makes the tiny model there")


def read_document(path: Path) -> Any:
    """The single YAML document of a file, not yet checked.

    Raises:
        FileError: see `load_deployment`.
    """
    text = _read_text(path)
    try:
        documents = [document for document in read_yaml(text) if document is not None]
    except YamlTextError as error:
        where = f"{path}:{error.line}:{error.column}" if error.line is not None else str(path)
        raise FileError(f"{where}: not YAML: {error.what}") from error
    if not documents:
        raise FileError(f"{path}: is empty; it must hold one PDDeployment")
    if len(documents) > 1:
        raise FileError(f"{path}: holds {len(documents)} documents; it must hold one PDDeployment")
    return documents[0]


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise FileError(f"{path}: is larger than {MAX_BYTES >> 20} MiB; a PDDeployment has some KiB")
        return content.decode("utf-8")
    except FileNotFoundError as error:
        raise FileError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise FileError(f"{path}: cannot be read: {reason}") from error
