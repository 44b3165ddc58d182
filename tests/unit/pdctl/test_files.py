"""Reading a PDDeployment file: each way it can be unusable has its own sentence with the place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pd_operator.core.problems import SpecError
from pdctl.shell.files import FileError, load_deployment, read_document

GOOD = """
apiVersion: pdserving.dev/v1alpha1
kind: PDDeployment
metadata: {name: tiny}
spec:
  model: {name: %s}
"""


def written(folder: Path, text: str | bytes) -> Path:
    file = folder / "deployment.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def sentence(file: Path) -> str:
    with pytest.raises(FileError) as caught:
        read_document(file)
    return str(caught.value).replace(str(file), "FILE")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1,\n", "FILE:2:1: not YAML: "),
        ("a: 1\n\tb: 2\n", "FILE:2:1: not YAML: "),
        ("a: 1\na: 2\n", "FILE:2:1: not YAML: the key 'a' stands twice"),
        ("spec:\n  x: {b: 1, b: 2}\n", "FILE:2:13: not YAML: the key 'b' stands twice"),
        ("a: !!python/object:os.system x\n", "FILE:1:4: not YAML: could not determine a constructor"),
        ("", "FILE: is empty; it must hold one PDDeployment"),
        ("# nothing\n---\n", "FILE: is empty; it must hold one PDDeployment"),
        ("a: 1\n---\nb: 2\n", "FILE: holds 2 documents; it must hold one PDDeployment"),
        (b"a: \xff\n", "FILE: cannot be read: not UTF-8 text"),
        ("a: \x01\n", "FILE: not YAML: "),
    ],
)
def test_unusable_text(tmp_path: Path, text: str | bytes, expected: str) -> None:
    assert sentence(written(tmp_path, text)).startswith(expected)


def test_missing_file(tmp_path: Path) -> None:
    assert sentence(tmp_path / "none.yaml") == "FILE: no such file"


def test_folder(tmp_path: Path) -> None:
    assert sentence(tmp_path) == f"FILE: cannot be read: {os.strerror(21)}"


def test_separators_around_one_document_are_fine(tmp_path: Path) -> None:
    assert read_document(written(tmp_path, "---\na: 1\n---\n")) == {"a": 1}


def test_merge_keys_may_repeat(tmp_path: Path) -> None:
    text = "x: &x {a: 1}\ny: &y {b: 2}\nz:\n  <<: *x\n  c: 3\n"
    assert read_document(written(tmp_path, text))["z"] == {"a": 1, "c": 3}


@pytest.mark.parametrize("name", ["./model", "../model", "./a/../model"])
def test_a_relative_model_folder_is_read_against_the_file(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "deployments"
    folder.mkdir()
    deployment = load_deployment(written(folder, GOOD % name))
    assert deployment.spec.model.name == str((folder / name).resolve())
    assert deployment.spec.model.public_name == "model"


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B", "/models/qwen"])
def test_other_names_are_left_alone(tmp_path: Path, name: str) -> None:
    assert load_deployment(written(tmp_path, GOOD % name)).spec.model.name == name


def test_a_text_document_is_a_wrong_object(tmp_path: Path) -> None:
    with pytest.raises(SpecError):
        load_deployment(written(tmp_path, "just a text\n"))
