"""Read a PDDeployment file. Separate from parsing so that only this module knows about paths and YAML text."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from pd_operator.core.model import PDDeployment
from pd_operator.core.parse import parse_deployment


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


def read_document(path: Path) -> Any:
    """The single YAML document of a file, not yet checked.

    Raises:
        FileError: see `load_deployment`.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FileError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise FileError(f"{path}: cannot be read: {reason}") from error
    try:
        documents = [document for document in yaml.load_all(text, Loader=_StrictLoader) if document is not None]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise FileError(f"{where}: not YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise FileError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    if not documents:
        raise FileError(f"{path}: is empty; it must hold one PDDeployment")
    if len(documents) > 1:
        raise FileError(f"{path}: holds {len(documents)} documents; it must hold one PDDeployment")
    return documents[0]


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key that stands twice: YAML would keep the last one and say nothing."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen and key.value != "<<":
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} stands twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)
