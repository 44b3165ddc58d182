"""Reading a PDDeployment file: each way it can be unusable has its own sentence with the place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pd_operator.core.problems import SpecError
from pdctl.shell.app import app
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
        ("[" * 5000, "FILE:1:65: not YAML: nested more than 64 levels deep"),
        ("- " * 5000, "FILE:1:129: not YAML: nested more than 64 levels deep"),
        ("{a: " * 5000, "FILE:1:254: not YAML: nested more than 64 levels deep"),
        ("&a {apiVersion: *a}\n", "FILE:1:17: not YAML: the alias *a lies within what it stands for"),
        ("a: &a [&b [*a]]\n", "FILE:1:12: not YAML: the alias *a lies within what it stands for"),
        ("- 1\n" * 30_000, "FILE:20000:3: not YAML: more than 20000 values"),
        ("---\n" * 30_000, "FILE:20002:1: not YAML: more than 20000 values"),
        ("# " + "x" * (1 << 20), "FILE: is larger than 1 MiB; a PDDeployment has some KiB"),
        ("a: 1\n0x1: 1\n1: 2\n", "FILE:3:1: not YAML: the key '1' stands twice"),
        ("true: 1\nyes: 2\n", "FILE:2:1: not YAML: the key 'yes' stands twice"),
        ("a: " + "1" * 5000, "FILE:1:4: not YAML: a number of 5000 characters"),
        ("a: 1" + ":59" * 5000, "FILE:1:4: not YAML: a number of 15001 characters"),
        ("a: 2001-99-99\n", "FILE:1:4: not YAML: '2001-99-99' is no timestamp"),
        ("a: !!bool x\n", "FILE:1:4: not YAML: 'x' is no bool"),
        ("a: !!int ''\n", "FILE:1:4: not YAML: '' is no int"),
        ("a: !!timestamp x\n", "FILE:1:4: not YAML: 'x' is no timestamp"),
        ('a: "\\UFFFFFFFF"\n', "FILE:1:"),
        ('a: "\\ud800"\n', "FILE:1:4: not YAML: half of a surrogate pair"),
        ("%YAML " + "1" * 5000 + ".1\n--- a\n", "FILE:1:"),
        ("a: {<<: 1}\n", "FILE:1:9: not YAML: only maps can be merged"),
        ("? [a]\n: 1\n", "FILE:1:3: not YAML: found unhashable key"),
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


def test_aliases_of_aliases_are_counted_as_what_they_stand_for(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    assert sentence(written(tmp_path, "\n".join(lines))).startswith("FILE:5:")
    merged = ["a0: &a0 {k: v}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 10))]
    assert "more than 20000 values" in sentence(written(tmp_path, "\n".join(merged)))


def test_an_alias_of_something_small_is_fine(tmp_path: Path) -> None:
    text = "x: &x {requests: {cpu: 1}}\ny: *x\nz: [*x, *x]\n"
    assert read_document(written(tmp_path, text))["z"] == [{"requests": {"cpu": 1}}] * 2


def test_a_key_may_replace_a_merged_one_wherever_it_is_merged_again(tmp_path: Path) -> None:
    text = "b: &b {a: 1}\np: {q: &x {<<: *b, a: 2}}\ny: {<<: *x, c: 3}\n"
    read = read_document(written(tmp_path, text))
    assert (read["p"]["q"], read["y"]) == ({"a": 2}, {"a": 2, "c": 3})


def test_of_merged_maps_the_first_one_wins(tmp_path: Path) -> None:
    text = "x: &x {alpha: 1}\ny: &y {alpha: 2, beta: 2}\nz: {<<: [*x, *y], gamma: 3}\n"
    assert read_document(written(tmp_path, text))["z"] == {"alpha": 1, "beta": 2, "gamma": 3}


@pytest.mark.parametrize("text", ["&a {apiVersion: *a}\n", "[" * 3000, "x: {b: 1, b: 2}\n"])
@pytest.mark.parametrize("command", [["render", "-f"], ["render", "-o", "yaml", "-f"], ["up", "-f"]])
def test_a_hostile_file_ends_each_command_with_a_sentence(tmp_path: Path, command: list[str], text: str) -> None:
    file = written(tmp_path, text)
    result = CliRunner().invoke(app, [*command, str(file)])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"{file}:1:")
    assert result.stderr.count("\n") == 1


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
