"""How every `pdctl cluster` command ends other than well: a line for what went wrong, or for a signal; no traceback."""

from __future__ import annotations

import errno
from typing import Any, Final

import typer
from typer.core import TyperGroup

from pdctl.core.cluster.layout import ClusterNameError
from pdctl.core.cluster.nodes import NodeError
from pdctl.shell.cluster.places import ClusterError
from pdctl.shell.cluster.signals import Interrupted, Interrupting

REFUSED: Final = 1


class ToldGroup(TyperGroup):
    """A group of commands that tells errors in words, and during which a signal interrupts."""

    def invoke(self, ctx: Any) -> Any:
        """Run one command. Ends with 1 for an error, 128 + signal for a signal."""
        try:
            with Interrupting():
                return super().invoke(ctx)
        except Interrupted as interrupted:
            code, text = interrupted.exit_code, f"ended by {interrupted}"
        except (ClusterError, ClusterNameError, NodeError) as error:
            code, text = REFUSED, str(error)
        except OSError as error:
            if error.errno == errno.EPIPE:
                # Nobody reads the output any more; click knows what to do.
                raise
            code, text = REFUSED, describe(error)
        typer.echo(f"pdctl: {text}", err=True)
        raise typer.Exit(code)


def describe(error: OSError) -> str:
    """What the system said, and about which file if it said so."""
    return ": ".join(str(part) for part in (error.filename, error.strerror or error) if part)
