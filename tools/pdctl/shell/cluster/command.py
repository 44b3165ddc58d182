"""`pdctl cluster …`: an embedded Kubernetes for trying out and for tests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from pdctl.core.cluster.layout import DEFAULT_NAME, ClusterNameError
from pdctl.core.cluster.nodes import NODE_TYPES, NodeError, parse_pairs, plan_nodes
from pdctl.shell.cluster.build import build_programs
from pdctl.shell.cluster.cluster import EmbeddedCluster, known_clusters
from pdctl.shell.cluster.demo_command import demo, demo_inside
from pdctl.shell.cluster.images import pack_development_images
from pdctl.shell.cluster.places import ClusterError
from pdctl.shell.cluster.start import Wishes
from pdctl.shell.console import Console

T = TypeVar("T")
PASS_ON = {
    "allow_extra_args": True,
    "allow_interspersed_args": False,
    "ignore_unknown_options": True,
    "help_option_names": [],
}

app = typer.Typer(help="A real Kubernetes of its own on this machine, in namespaces.", no_args_is_help=True)
app.command("demo")(demo)
app.command("demo-inside", hidden=True)(demo_inside)

Name = Annotated[str, typer.Option("--name", help="Which cluster; several can be up side by side.")]


@app.command()
def build(
    jobs: Annotated[int | None, typer.Option(help="Compiler processes at once. [default: all cores]", min=1)] = None,
) -> None:
    """Build Kubernetes, etcd and helm from Go modules into the cache; minutes once, then nothing."""
    console = Console(show_lines=False)
    folder = _try(lambda: build_programs(console.say, jobs))
    console.say(f"programs are in {folder}")


@app.command()
def up(
    name: Name = DEFAULT_NAME,
    light: Annotated[bool, typer.Option("--light", help="API server and controllers only: no node, no pods.")] = False,
    nodes: Annotated[int | None, typer.Option(help="How many nodes. [default: 1, or what the type says]")] = None,
    node_type: Annotated[str | None, typer.Option(help=f"Nodes that look like one of: {', '.join(NODE_TYPES)}")] = None,
    node_label: Annotated[list[str] | None, typer.Option(help="KEY=VALUE on every node; repeatable.")] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(help="What a node claims: cpu=192, memory=2Ti, hugepages-2Mi=10Gi, nvidia.com/gpu=8; repeatable."),
    ] = None,
    watch_seconds: Annotated[
        int | None, typer.Option(help="The API server ends watches after 1 to 2 times as many seconds.", min=1)
    ] = None,
    mount: Annotated[
        list[Path] | None, typer.Option(help="One more path that development images see, read-only; repeatable.")
    ] = None,
) -> None:
    """Start a cluster and wait until it is usable. Builds what isn't built yet."""

    def wishes() -> Wishes:
        labels, sizes = parse_pairs("--node-label", node_label or []), parse_pairs("--capacity", capacity or [])
        planned = plan_nodes(node_type, nodes, labels, sizes)
        return Wishes(light, planned, watch_seconds, tuple(str(path.resolve()) for path in mount or []))

    console = Console(show_lines=False)
    cluster = _cluster(name, console, _try(wishes))
    try:
        _try(cluster.up)
    finally:
        console.settle()
    _print_status(cluster.status())


@app.command()
def down(
    name: Name = DEFAULT_NAME,
    everything: Annotated[bool, typer.Option("--all", help="Every cluster of which anything exists.")] = False,
) -> None:
    """End a cluster and remove all that it made. Harmless when there is none."""
    console = Console(show_lines=False)
    for one in known_clusters() if everything else [name]:
        _try(_cluster(one, console).down)
        console.say(f"cluster {one} is down, nothing is left")


@app.command()
def status(
    name: Name = DEFAULT_NAME,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Where a cluster's files are and whether it runs. Fails when it is not up."""
    found = _cluster(name, Console(show_lines=False)).status()
    if as_json:
        typer.echo(json.dumps(found))
    else:
        _print_status(found)
    if found["state"] != "up":
        raise typer.Exit(1)


@app.command("list")
def list_clusters() -> None:
    """Names and states of all clusters."""
    console = Console(show_lines=False)
    for name in known_clusters():
        found = _cluster(name, console).status()
        typer.echo(f"{name:<20} {found['state']:<8} {found.get('mode', '')}".rstrip())


@app.command(context_settings=PASS_ON)
def kubectl(context: typer.Context, name: Name = DEFAULT_NAME) -> None:
    """Run kubectl against a cluster: everything behind it is kubectl's."""
    _become(name, lambda _cluster: ["kubectl", *context.args])


@app.command(context_settings=PASS_ON)
def helm(context: typer.Context, name: Name = DEFAULT_NAME) -> None:
    """Run helm against a cluster: everything behind it is helm's."""
    _become(name, lambda _cluster: ["helm", *context.args])


@app.command("exec", context_settings=PASS_ON)
def execute(context: typer.Context, name: Name = DEFAULT_NAME) -> None:
    """Run a command in a cluster's network, where pods and Services have their addresses."""
    if not context.args:
        _fail("a command is missing")
    _become(name, lambda cluster: cluster.inside(context.args))


@app.command()
def shell(name: Name = DEFAULT_NAME) -> None:
    """Open a shell in a cluster's network, with kubectl and helm on its PATH."""
    _become(name, lambda cluster: cluster.inside([os.environ.get("SHELL", "/bin/sh")]))


@app.command("load-image")
def load_image(
    archive: Annotated[Path, typer.Argument(help="An OCI or Docker archive.", exists=True, dir_okay=False)],
    name: Name = DEFAULT_NAME,
) -> None:
    """Give an image to every node of a cluster."""
    _try(lambda: _cluster(name, Console(show_lines=False)).load_image(archive))


@app.command("pack-images")
def pack_images(
    archive: Annotated[Path, typer.Argument(help="The OCI archive to write.")],
) -> None:
    """Write the development images (localhost/pd-…:dev, localhost/stand-in:dev) as one archive; `up` loads them."""
    archive.write_bytes(_try(pack_development_images))


def _cluster(name: str, console: Console, wishes: Wishes | None = None) -> EmbeddedCluster:
    return _try(lambda: EmbeddedCluster(name, wishes, say=console.say, progress=console.progress))


def _become(name: str, argv: Callable[[EmbeddedCluster], list[str]]) -> NoReturn:
    """Turn into the client, so that signals, terminal and exit status are its own."""
    cluster = _cluster(name, Console(show_lines=False))
    if not cluster.is_up:
        _fail(f"no cluster {name} is up; start it with `pdctl cluster up --name {name}`")
    command = argv(cluster)
    environment = cluster.environment()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        _fail(f"{command[0]}: {error.strerror}")


def _print_status(found: dict[str, Any]) -> None:
    for key, value in found.items():
        lines = value if isinstance(value, list) else [value]
        for line in lines:
            typer.echo(f"{key.replace('_', ' '):<18} {line}")


def _try(action: Callable[[], T]) -> T:
    try:
        return action()
    except (ClusterError, ClusterNameError, NodeError) as error:
        _fail(str(error))


def _fail(text: str) -> NoReturn:
    typer.echo(f"pdctl: {text}", err=True)
    raise typer.Exit(1)
