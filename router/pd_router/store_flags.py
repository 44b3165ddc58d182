"""The flags of `core.store_settings`. Separate from the others because they belong together in `--help`."""

from __future__ import annotations

import argparse

from pd_router.core.addresses import SettingsError
from pd_router.core.store_settings import Valkey, number_problems

_OWN = ("--valkey-url", "--handle-key-file", "--valkey-username", "--valkey-password-file", "--valkey-ca-file")


def add_store_flags(parser: argparse.ArgumentParser) -> None:
    """Add them, in one group."""
    valkey = Valkey("", "")
    add = parser.add_argument_group("handle store", "where handles wait for the next turn").add_argument
    add(
        "--handle-store",
        choices=("memory", "valkey"),
        default="memory",
        help="memory: this router's own; valkey: one that all routers share, in Valkey or Redis (7.0 or newer)",
    )
    add(
        "--handle-key-file",
        default="",
        metavar="PATH",
        help="with valkey: a secret of at least 16 bytes, the same for all routers; tenants and ids are hashed with it",
    )
    add(
        "--valkey-url", default="", metavar="URL", help="valkey://HOST:PORT, or valkeys:// for TLS; redis:// works, too"
    )
    add("--valkey-username", default="", metavar="NAME", help="an ACL user of the server")
    add("--valkey-password-file", default="", metavar="PATH", help="the password; read again for each connection")
    add("--valkey-ca-file", default="", metavar="PATH", help="authorities of the server's certificate (PEM)")
    add(
        "--valkey-timeout",
        type=float,
        default=valkey.timeout,
        metavar="S",
        help="for one operation; after it the turn goes on without a handle",
    )
    add("--valkey-max-entry-bytes", type=int, default=valkey.max_entry_bytes, metavar="N", help="longest handle kept")
    add("--valkey-connections", type=int, default=valkey.connections, metavar="N", help="connections at most")


def read_store(args: argparse.Namespace) -> Valkey | None:
    """The shared store that the flags ask for; None for one in memory. Raises SettingsError."""
    valkey = Valkey(
        url=args.valkey_url,
        key_file=args.handle_key_file,
        username=args.valkey_username,
        password_file=args.valkey_password_file,
        ca_file=args.valkey_ca_file,
        timeout=args.valkey_timeout,
        max_entry_bytes=args.valkey_max_entry_bytes,
        connections=args.valkey_connections,
    )
    if args.handle_store == "valkey":
        return valkey
    given = [flag for flag in _OWN if getattr(args, flag[2:].replace("-", "_"))]
    problems = [f"{flag}: is for --handle-store valkey, which is not given" for flag in given]
    problems.extend(number_problems(valkey))
    if problems:
        raise SettingsError(problems)
    return None
