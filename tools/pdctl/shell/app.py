"""All commands of `pdctl`, one module each. Separate from the entry point, which runs before all this is imported."""

from __future__ import annotations

import typer

from pdctl.shell.cluster.command import app as cluster
from pdctl.shell.demo_command import demo
from pdctl.shell.key_command import make as make_key
from pdctl.shell.model_command import make
from pdctl.shell.plan_command import plan
from pdctl.shell.render_command import render
from pdctl.shell.simulate_command import simulate
from pdctl.shell.top_command import top
from pdctl.shell.up_command import up
from pdctl.shell.version_command import version

app = typer.Typer(
    name="pdctl",
    help="Run, look at and measure prefill/decode deployments.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
model = typer.Typer(help="Models for trying out.", no_args_is_help=True)
model.command("make")(make)
app.add_typer(model, name="model")
key = typer.Typer(help="API keys for clients of a router.", no_args_is_help=True)
key.command("make")(make_key)
app.add_typer(key, name="key")
app.add_typer(cluster, name="cluster")
app.command("up")(up)
app.command("demo")(demo)
app.command("render")(render)
app.command("plan")(plan)
app.command("simulate")(simulate)
app.command("top")(top)
app.command("version")(version)
