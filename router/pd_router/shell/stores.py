"""Which handle store a router has, and the secret that its keys are made with.

Separate from the composition root because the two go together: routers that share a store find each other's handles
only with one secret, and a router alone should have one that nobody knows.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from pd_router.core.addresses import SettingsError
from pd_router.core.linking import Keyring
from pd_router.core.settings import Settings
from pd_router.core.store_memory import MemoryStore
from pd_router.shell.store_metrics import SharedStoreMetrics
from pd_router.shell.worker_store import Shared, WorkerStore

if TYPE_CHECKING:
    from pd_router.shell.valkey_store import IncarnationOf, ValkeyStore


def make_keyring(settings: Settings, shared: Shared | None = None) -> Keyring:
    """Raises SettingsError for a key file that cannot be used."""
    if settings.valkey is None:
        return Keyring(secrets.token_bytes(32) if shared is None else shared.secret)
    try:
        return Keyring(Path(settings.valkey.key_file).read_bytes().rstrip(b"\r\n"))
    except OSError as error:
        raise SettingsError([f"--handle-key-file: cannot be read: {error.strerror}"]) from error
    except ValueError as error:
        raise SettingsError([f"--handle-key-file: {error}"]) from error


def make_store(
    settings: Settings, metrics: SharedStoreMetrics, incarnation_of: IncarnationOf, shared: Shared | None = None
) -> MemoryStore | ValkeyStore | WorkerStore:
    """Not started. Raises SettingsError for files that cannot be used.

    Args:
        shared: what a worker has in common with the others.
    """
    reuse, valkey = settings.reuse, settings.valkey
    if valkey is None:
        if shared is not None:
            return WorkerStore(shared.line, metrics, incarnation_of)
        metrics.up.set(1)
        return MemoryStore(reuse.cap_bytes, reuse.cap_entries, reuse.handle_ttl, reuse.engine_ttl, reuse.shared_ttl)
    for flag, path in (("--valkey-password-file", valkey.password_file), ("--valkey-ca-file", valkey.ca_file)):
        if path:
            try:
                Path(path).read_bytes()
            except OSError as error:
                raise SettingsError([f"{flag}: cannot be read: {error.strerror}"]) from error
    pods = settings.pods
    realm = "" if pods is None else f"{pods.namespace}/{pods.name}"
    seal = make_keyring(settings).seal
    # Imported here because the client library takes a third of a start, and most routers have no such store.
    from pd_router.shell.valkey_store import ValkeyStore

    return ValkeyStore(
        valkey,
        metrics,
        realm,
        reuse.handle_ttl,
        reuse.engine_ttl,
        incarnation_of,
        seal,
        shared_ttl=reuse.shared_ttl,
    )
