"""`pdctl render`: print what a deployment becomes, offline: commands, Kubernetes objects, or the definition itself."""

from __future__ import annotations

from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from pd_operator.core.model import PDDeployment
from pd_operator.core.parse import parse_deployment
from pd_operator.core.problems import SpecError
from pdctl.core.manifests import crd_text, render_kubernetes
from pdctl.core.reference import reference_text
from pdctl.core.render import render_json, render_shell
from pdctl.shell.files import FileError, load_deployment, read_document


class Output(StrEnum):
    """What to print."""

    SHELL = "shell"
    JSON = "json"
    YAML = "yaml"


def render(
    file: Annotated[Path | None, typer.Option("--file", "-f", help="PDDeployment file (YAML).")] = None,
    output: Annotated[
        Output, typer.Option("--output", "-o", help="Commands for bash, the same as JSON, or Kubernetes objects.")
    ] = Output.SHELL,
    kubernetes: Annotated[bool, typer.Option("--kubernetes", help="The same as -o yaml.")] = False,
    router_image: Annotated[str, typer.Option(help="Router's image. Default: of this version.")] = "",
    connector_image: Annotated[str, typer.Option(help="Connector's image. Default: of this version.")] = "",
    crd: Annotated[bool, typer.Option("--crd", help="Print the custom resource definition instead.")] = False,
    reference: Annotated[bool, typer.Option("--reference", help="Print the list of all fields (Markdown).")] = False,
) -> None:
    """Print the commands or the Kubernetes objects of a PDDeployment file, without starting anything."""
    if crd or reference:
        typer.echo(crd_text() if crd else reference_text(), nl=False)
        return
    if file is None:
        typer.echo("pdctl render: needs --file FILE, --crd or --reference", err=True)
        raise typer.Exit(2)
    try:
        if kubernetes or output is Output.YAML:
            # A relative model folder means the folder of that name in the pod, not one on this machine.
            text = _kubernetes(parse_deployment(read_document(file)), router_image, connector_image)
        else:
            deployment = load_deployment(file)
            text = render_json(deployment) if output is Output.JSON else render_shell(deployment)
    except FileError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except SpecError as error:
        typer.echo(f"{file}: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(text, nl=False)


def _kubernetes(deployment: PDDeployment, router_image: str, connector_image: str) -> str:
    tag = version("pd-operator")
    return render_kubernetes(deployment, router_image or f"pd-router:{tag}", connector_image or f"pd-connector:{tag}")
