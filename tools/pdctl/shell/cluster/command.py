"""`pdctl cluster …`: an embedded Kubernetes for trying out and for tests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from pdctl.core.cluster.layout import DEFAULT_NAME
from pdctl.core.cluster.nodes import NODE_TYPES, parse_pairs, plan_nodes
from pdctl.shell.cluster.build import build_programs
from pdctl.shell.cluster.claims import describe_process
from pdctl.shell.cluster.cluster import EmbeddedCluster, known_clusters
from pdctl.shell.cluster.demo_command import demo, demo_inside
from pdctl.shell.cluster.images import pack_development_images
from pdctl.shell.cluster.places import ClusterError
from pdctl.shell.cluster.signals import Interrupted
from pdctl.shell.cluster.start import Wishes
from pdctl.shell.cluster.told import ToldGroup
from pdctl.shell.console import Console

# Options that stand before the first other word are ours, --help too.
PASS_ON = {"allow_extra_args": True, "allow_interspersed_args": False, "ignore_unknown_options": True}

app = typer.Typer(
    help="A real Kubernetes of its own on this machine, in namespaces.", no_args_is_help=True, cls=ToldGroup
)
app.command("demo")(demo)
app.command("demo-inside", hidden=True)(demo_inside)

Name = Annotated[str, typer.Option("--name", help="Which cluster; several can be up side by side.")]


@app.command()
def build(
    jobs: Annotated[int | None, typer.Option(help="Compiler processes at once. [default: all cores]", min=1)] = None,
) -> None:
    """Build Kubernetes, etcd and helm from Go modules into the cache; minutes once, then nothing."""
    console = Console(show_lines=False)
    folder = build_programs(console.say, jobs)
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
        typer.Option(
            help="What a node claims: cpu=192, memory=2Ti, hugepages-2Mi=10Gi, ephemeral-storage=30Ti, "
            "nvidia.com/gpu=8; repeatable."
        ),
    ] = None,
    watch_seconds: Annotated[
        int | None, typer.Option(help="The API server ends watches after 1 to 2 times as many seconds.", min=1)
    ] = None,
    mount: Annotated[
        list[Path] | None, typer.Option(help="One more path that development images see, read-only; repeatable.")
    ] = None,
) -> None:
    """Start a cluster and wait until it is usable. Builds what isn't built yet."""
    labels, sizes = parse_pairs("--node-label", node_label or []), parse_pairs("--capacity", capacity or [])
    planned = plan_nodes(node_type, nodes, labels, sizes)
    wishes = Wishes(light, planned, watch_seconds, tuple(str(path.resolve()) for path in mount or []))
    console = Console(show_lines=False)
    cluster = _cluster(name, console, wishes)
    try:
        cluster.up()
        console.settle()
        _print_status(cluster.status())
    except Interrupted:
        if cluster.is_up:
            console.say(f"cluster {name} is up; to end it: pdctl cluster down --name {name}")
        raise
    finally:
        console.settle()


@app.command()
def down(
    name: Annotated[str | None, typer.Option("--name", help=f"Which cluster. [default: {DEFAULT_NAME}]")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every cluster of which anything exists.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="End also those that a running process uses: a demo, a test run.")
    ] = False,
) -> None:
    """End a cluster and remove all that it made. Harmless when there is none."""
    if everything and name is not None:
        raise typer.BadParameter("--name names one cluster and --all means every one; give one of them")
    console = Console(show_lines=False)
    clusters = [_cluster(one, console) for one in (known_clusters() if everything else [name or DEFAULT_NAME])]
    if everything:
        console.say("clusters on this machine:" if clusters else "there is no cluster on this machine")
        for one in clusters:
            console.say(f"  {_row(one)}")
    if not yes and (used := [one.name for one in clusters if one.owner is not None]):
        told = "; ".join(f"{one.name} by {describe_process(one.owner)}" for one in clusters if one.owner is not None)
        raise ClusterError(
            f"in use: {told}. Nothing was ended. To end {'it' if len(used) == 1 else 'them'} all the same, add --yes"
        )
    for one in clusters:
        one.down()
        console.say(f"cluster {one.name} is down, nothing is left")


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
    """Names and states of all clusters, and the running process that uses one."""
    console = Console(show_lines=False)
    for name in known_clusters():
        typer.echo(_row(_cluster(name, console)))


@app.command(context_settings=PASS_ON)
def kubectl(context: typer.Context, name: Name = DEFAULT_NAME) -> None:
    """Run kubectl against a cluster: everything behind the options is kubectl's. For its help: `kubectl help`."""
    _become(name, lambda _cluster: ["kubectl", *context.args])


@app.command(context_settings=PASS_ON)
def helm(context: typer.Context, name: Name = DEFAULT_NAME) -> None:
    """Run helm against a cluster: everything behind the options is helm's. For its help: `helm help`."""
    _become(name, lambda _cluster: ["helm", *context.args])


@app.command("exec", context_settings=PASS_ON)
def execute(context: typer.Context, name: Name = DEFAULT_NAME) -> None:
    """Run a command in a cluster's network: pods and Services have their addresses, and names as in a pod."""
    if not context.args:
        raise ClusterError("a command is missing")
    _become(name, lambda cluster: cluster.inside_with_names(context.args))


@app.command()
def shell(name: Name = DEFAULT_NAME) -> None:
    """Open a shell in a cluster's network, with kubectl and helm on its PATH."""
    _become(name, lambda cluster: cluster.inside_with_names([os.environ.get("SHELL", "/bin/sh")]))


@app.command("load-image")
def load_image(
    archive: Annotated[Path, typer.Argument(help="An OCI or Docker archive.", exists=True, dir_okay=False)],
    name: Name = DEFAULT_NAME,
) -> None:
    """Give an image to every node of a cluster."""
    _cluster(name, Console(show_lines=False)).load_image(archive)


@app.command("pack-images")
def pack_images(
    archive: Annotated[Path, typer.Argument(help="The OCI archive to write.")],
) -> None:
    """Write the development images (localhost/pd-…:dev, localhost/stand-in:dev) as one archive; `up` loads them."""
    archive.write_bytes(pack_development_images())


def _cluster(name: str, console: Console, wishes: Wishes | None = None) -> EmbeddedCluster:
    return EmbeddedCluster(name, wishes, say=console.say, progress=console.progress)


def _row(cluster: EmbeddedCluster) -> str:
    found, owner = cluster.status(), cluster.owner
    used = "" if owner is None else f"used by {describe_process(owner)}"
    return f"{cluster.name:<20} {found['state']:<8} {found.get('mode', ''):<6} {used}".rstrip()


def _become(name: str, argv: Callable[[EmbeddedCluster], list[str]]) -> NoReturn:
    """Turn into the client, so that signals, terminal and exit status are its own."""
    cluster = _cluster(name, Console(show_lines=False))
    if not cluster.is_up:
        raise ClusterError(f"no cluster {name} is up; start it with `pdctl cluster up --name {name}`")
    command = argv(cluster)
    environment = cluster.environment()
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        raise ClusterError(f"{command[0]}: {error.strerror}") from error


def _print_status(found: dict[str, Any]) -> None:
    for key, value in found.items():
        lines = value if isinstance(value, list) else [value]
        for line in lines:
            typer.echo(f"{key.replace('_', ' '):<18} {line}")
