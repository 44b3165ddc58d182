"""The command line of the operator."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
from collections.abc import Sequence
from typing import Final

import kopf
from kubernetes.aio.config import ConfigException

from pd_operator.shell.api import ApiError
from pd_operator.shell.options import Options, parse_options
from pd_operator.shell.process import CrdMissing, WatchesEnded, run_operator

logger = logging.getLogger("pd_operator")

_ATTEMPT: Final = re.compile(r"Request attempt #(?P<number>\d+)")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `pd-operator` script. Exit status 1: it could not start, and the log says why."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    _configure_logging(options)
    try:
        asyncio.run(run_operator(options))
    except (CrdMissing, WatchesEnded, ApiError, ConfigException, OSError) as error:
        logger.error("can't serve: %s", error)
        sys.exit(1)
    except asyncio.CancelledError:
        logger.info("told to end before it served")


def _configure_logging(options: Options) -> None:
    log_format = kopf.LogFormat.JSON if options.log_format == "json" else kopf.LogFormat.FULL
    kopf.configure(verbose=options.verbose, log_format=log_format)
    for noisy in ("kopf", "aiohttp"):
        logging.getLogger(noisy).setLevel(logging.DEBUG if options.verbose else logging.WARNING)
    if not options.verbose:
        for caller in ("watching", "fetching"):
            logging.getLogger(f"kopf._cogs.clients.{caller}").addFilter(_first_tries)


def _first_tries(record: logging.LogRecord) -> bool:
    """A watch is tried for ever; what it said a few times need not be said every half minute."""
    attempt = _ATTEMPT.match(record.getMessage())
    return attempt is None or int(attempt["number"]) <= 3


if __name__ == "__main__":
    main()
