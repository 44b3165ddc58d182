"""`pdctl render -o yaml` and `--crd`: objects that can be applied as they are printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from pd_operator.core.crd import custom_resource_definition
from pdctl.core.manifests import render_kubernetes
from pdctl.shell.render_command import render
from support.pddeployments import EXAMPLES, deployment, example

app = typer.Typer()
app.command()(render)


def ran(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def documents(text: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(text))


@pytest.mark.parametrize("name", [path.stem for path in sorted(EXAMPLES.glob("*.yaml"))])
def test_every_example_becomes_objects(name: str) -> None:
    result = ran("-f", str(EXAMPLES / f"{name}.yaml"), "-o", "yaml")
    assert result.exit_code == 0
    found = documents(result.stdout)
    assert {one["kind"] for one in found} >= {"StatefulSet", "Deployment", "Service", "Role"}
    assert all(one["metadata"]["labels"]["pdserving.dev/pddeployment"] for one in found)


def test_both_spellings_print_the_same() -> None:
    file = str(EXAMPLES / "cpu-tiny.yaml")
    assert ran("-f", file, "--kubernetes").stdout == ran("-f", file, "-o", "yaml").stdout


def test_what_no_cluster_has_seen_has_no_owner() -> None:
    for one in documents(render_kubernetes(deployment(base=example("cpu-tiny")), "r:1", "c:1")):
        assert "ownerReferences" not in one["metadata"]


def test_a_relative_model_folder_is_not_this_machines() -> None:
    text = ran("-f", str(EXAMPLES / "cpu-tiny.yaml"), "-o", "yaml").stdout
    assert "/models/tiny-model" in text
    assert str(Path.cwd()) not in text


def test_images_can_be_named() -> None:
    arguments = ["-f", str(EXAMPLES / "cpu-tiny.yaml"), "-o", "yaml"]
    text = ran(*arguments, "--router-image", "r.example/r:7", "--connector-image", "r.example/c:7").stdout
    assert "image: r.example/r:7" in text
    assert "image: r.example/c:7" in text
    assert "image: pd-router:" in ran(*arguments).stdout


def test_no_references_between_parts_of_the_text() -> None:
    assert "&id" not in render_kubernetes(deployment(base=example("qwen3-32b-p5en")), "r:1", "c:1")


def test_what_can_run_here_only_is_refused_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "bare.yaml"
    raw = example("cpu-tiny")
    del raw["spec"]["engine"]["image"]
    file.write_text(yaml.safe_dump(raw), encoding="utf-8")
    result = ran("-f", str(file), "-o", "yaml")
    assert result.exit_code == 2
    assert "spec.engine.image" in result.output
    assert ran("-f", str(file)).exit_code == 0, "commands need no image"


def test_the_definition() -> None:
    result = ran("--crd")
    assert documents(result.stdout) == [custom_resource_definition()]


def test_nothing_to_render() -> None:
    result = ran()
    assert result.exit_code == 2
    assert "--file" in result.output


def test_leases_are_decodes_and_the_routers_business(tmp_path: Path) -> None:
    raw = example("cpu-tiny")
    raw["spec"]["kvTransfer"] |= {"retention": "Leased", "lease": {"seconds": 15, "toolHoldSeconds": 90}}
    file = tmp_path / "leased.yaml"
    file.write_text(yaml.safe_dump(raw), encoding="utf-8")
    found = documents(ran("-f", str(file), "-o", "yaml").stdout)
    commands = {
        one["metadata"]["labels"]["pdserving.dev/role"]: one["spec"]["template"]["spec"]["containers"][0]["command"]
        for one in found
        if one["kind"] in ("StatefulSet", "Deployment")
    }
    told = {"--middleware": "pd_connector.shell.lease_api.LeaseApi", "--lease-tool-hold": "90"}
    said = {
        part: {flag: command[command.index(flag) + 1] for flag in told if flag in command}
        for part, command in commands.items()
    }
    assert said == {
        "prefill": {},
        "decode": {"--middleware": told["--middleware"]},
        "router": {"--lease-tool-hold": "90"},
    }
    assert '"pd_retention":"Leased","pd_lease_seconds":15,"pd_lease_share":0.5' in " ".join(commands["decode"])
    assert '"pd_retention":"Unpinned"' in " ".join(commands["prefill"])
    printed = ran("-f", str(file)).stdout
    assert printed.count("pd_connector.shell.lease_api.LeaseApi") == 1
