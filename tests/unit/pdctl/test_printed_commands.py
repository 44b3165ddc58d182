"""`pdctl render`: what is printed is what bash would run, word by word."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import example as shown
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pd_operator.core.generation import generation
from pd_operator.core.model import PDDeployment
from pdctl.core.render import render_json, render_shell
from pdctl.shell.render_command import render
from support.pddeployments import EXAMPLES, deployment, example

HOSTS = {
    "PREFILL_HOST": "10.0.0.1",
    "PREFILL_HOST_0": "10.0.0.5",
    "PREFILL_HOST_1": "10.0.0.6",
    "DECODE_HOST": "10.0.0.2",
    "DECODE_HOST_0": "10.0.0.3",
    "DECODE_HOST_1": "10.0.0.4",
}
# Each program prints its words and the variables that it was given, so that bash itself is the judge of the quoting.
SPIES = """
spy() { printf 'program\\0'; printf '%s\\0' "$@"; printf 'env\\0'; env -0; printf 'end\\0'; }
vllm() { spy vllm "$@"; }
python() { spy python "$@"; }
pd-router() { spy pd-router "$@"; }
"""


def run_in_bash(text: str, environment: dict[str, str]) -> list[tuple[list[str], dict[str, str]]]:
    """Paste ``text`` into bash with spies for programs; the words and variables of each command that ran."""
    result = subprocess.run(
        ["bash", "--norc", "-eu", "-c", SPIES + text],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        check=True,
    )
    assert result.stderr == b""
    runs = []
    for part in result.stdout.decode().split("end\0")[:-1]:
        words, _, variables = part.removeprefix("program\0").partition("env\0")
        pairs = (pair.partition("=") for pair in variables.split("\0")[:-1])
        runs.append((words.split("\0")[:-1], {name: value for name, _, value in pairs}))
    return runs


def expected(value: PDDeployment) -> list[tuple[list[str], dict[str, str]]]:
    """The commands as JSON gives them, with the hosts filled in."""
    text = render_json(value)
    for name, address in HOSTS.items():
        text = text.replace(f"${{{name}}}", address)
    return [(process["argv"], process["env"]) for process in json.loads(text)["processes"]]


def assert_bash_runs(value: PDDeployment) -> None:
    ran = run_in_bash(render_shell(value), HOSTS)
    wanted = expected(value)
    assert [words for words, _ in ran] == [argv for argv, _ in wanted]
    for (_, seen), (_, env) in zip(ran, wanted, strict=True):
        assert env.items() <= seen.items()


@pytest.mark.parametrize("name", [path.stem for path in sorted(EXAMPLES.glob("*.yaml"))])
def test_pasting_an_example_into_bash_runs_the_rendered_commands(name: str) -> None:
    assert_bash_runs(deployment(base=example(name)))


HOSTILE = """it's "$HOME" `id` $(id) \\ ! * ~ {a,b} #x ;&|<> $PREFILL_HOST é 🙂"""
words = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=40)


@given(words, words)
@shown(HOSTILE, HOSTILE)
@settings(deadline=None, max_examples=15)
def test_no_value_is_changed_by_quoting(argument: str, variable: str) -> None:
    assert_bash_runs(
        deployment(
            ("spec.engine.extraArgs", [f"--served-by={argument}"]),
            ("spec.engine.env", [{"name": "NOTE", "value": variable}]),
        )
    )


def test_every_engine_has_its_own_host_and_the_router_knows_all() -> None:
    ran = run_in_bash(render_shell(deployment(("spec.decode.replicas", 2))), HOSTS)
    assert [env.get("VLLM_NIXL_SIDE_CHANNEL_HOST") for _, env in ran] == ["10.0.0.1", "10.0.0.3", "10.0.0.4", None]
    router = ran[-1][0]
    urls = [word for word in router if word.startswith("http://")]
    assert urls == ["http://10.0.0.1:8100", "http://10.0.0.3:8200", "http://10.0.0.4:8200"]


def test_a_forgotten_host_stops_the_paste_with_its_name() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        run_in_bash(render_shell(deployment()), {})
    assert b"PREFILL_HOST: is not set" in caught.value.stderr


def test_engines_on_one_host_have_ports_of_their_own() -> None:
    value = deployment(("spec.prefill.replicas", 2), ("spec.decode.replicas", 2), base=example("cpu-tiny"))
    engines = expected(value)[:-1]
    ports = [argv[argv.index("--port") + 1] for argv, _ in engines]
    assert ports == ["8100", "8101", "8200", "8201"]
    assert [env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for _, env in engines] == ["5600", "5601", "5602", "5603"]


def test_one_flag_per_line() -> None:
    lines = [line.strip().removesuffix(" \\") for line in render_shell(deployment()).splitlines()]
    assert "vllm serve Qwen/Qwen3-32B" in lines
    assert "--tensor-parallel-size 1" in lines
    assert "NIXL_LOG_LEVEL=INFO" in lines


def test_the_header_names_generation_secrets_and_empty_roles() -> None:
    value = deployment(
        ("spec.decode.replicas", 0),
        ("spec.engine.env", [{"name": "HF_TOKEN", "secretKeyRef": {"name": "hub", "key": "token"}}]),
    )
    header = render_shell(value).partition("# ---")[0]
    assert generation(value) in header
    assert "HF_TOKEN" in header
    assert "0 replicas" in header
    assert "DECODE_HOST" not in header


@pytest.fixture
def cli() -> typer.Typer:
    app = typer.Typer()
    app.command()(render)
    return app


def run(cli: typer.Typer, *arguments: str) -> Any:
    return CliRunner().invoke(cli, list(arguments))


def test_the_command_prints_shell_by_default(cli: typer.Typer) -> None:
    result = run(cli, "-f", str(EXAMPLES / "qwen3-32b-p5en.yaml"))
    assert result.exit_code == 0
    assert result.stdout == render_shell(deployment(base=example("qwen3-32b-p5en")))


def test_the_command_prints_json(cli: typer.Typer) -> None:
    result = run(cli, "-f", str(EXAMPLES / "qwen3-32b-p5en.yaml"), "-o", "json")
    names = [process["name"] for process in json.loads(result.stdout)["processes"]]
    assert names == ["qwen3-32b-prefill-0", "qwen3-32b-decode-0", "qwen3-32b-router"]


def test_a_wrong_object_is_refused_with_the_file_and_the_field(cli: typer.Typer, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text((EXAMPLES / "qwen3-32b-p5en.yaml").read_text().replace("480", "5"))
    result = run(cli, "-f", str(file))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert str(file) in result.stderr
    assert "spec.kvTransfer.decoderBlocksTTLSeconds" in result.stderr


def test_a_missing_file_is_named(cli: typer.Typer, tmp_path: Path) -> None:
    result = run(cli, "-f", str(tmp_path / "none.yaml"))
    assert result.exit_code == 2
    assert result.stderr == f"{tmp_path / 'none.yaml'}: no such file\n"
