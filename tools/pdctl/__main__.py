"""The `pdctl` command. Importing what the commands need takes a second, in which Ctrl-C shall not be an error."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn


def main() -> None:
    """Entry point of the `pdctl` script."""
    # Where SIGINT is ignored (a job in the background), it stays ignored.
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if handled:
        signal.signal(signal.SIGINT, _leave)
    from pdctl.shell.app import app

    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    app()


def _leave(_number: int, _frame: object) -> NoReturn:
    # An exception could be caught or reported by whatever is being imported.
    sys.stderr.write("pdctl: ended by SIGINT\n")
    sys.stderr.flush()
    os._exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
