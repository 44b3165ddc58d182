"""Secrets as files of the router's pod: where they are mounted, and the flags that name them.

Whole volumes and never a `subPath`, whose files stay as they were when a Secret changes. Each reference has a volume of
its own with nothing but its key in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pd_operator.core.model import PDDeployment

FOLDER: Final = "/etc/pd-router"
TLS_VOLUME: Final = "tls"
TLS_KEYS: Final = {"--tls-cert": "tls.crt", "--tls-key": "tls.key"}


@dataclass(frozen=True, slots=True)
class _Mounted:
    """A Secret with the keys that are mounted, and the flag for the path of each."""

    volume: str
    secret: str
    keys: dict[str, str]


def file_options(deployment: PDDeployment) -> list[str]:
    """The router's flags for its mounted files."""
    return [
        word
        for found in _mounted(deployment)
        for flag, key in found.keys.items()
        for word in (flag, f"{FOLDER}/{found.volume}/{key}")
    ]


def file_volumes(deployment: PDDeployment) -> list[dict[str, Any]]:
    """The volumes of the router's pod that hold Secrets."""
    return [
        {
            "name": found.volume,
            "secret": {"secretName": found.secret, "items": [{"key": key, "path": key} for key in found.keys.values()]},
        }
        for found in _mounted(deployment)
    ]


def file_mounts(deployment: PDDeployment) -> list[dict[str, Any]]:
    """Where the router's container sees them."""
    return [
        {"name": found.volume, "mountPath": f"{FOLDER}/{found.volume}", "readOnly": True}
        for found in _mounted(deployment)
    ]


def _mounted(deployment: PDDeployment) -> list[_Mounted]:
    router = deployment.spec.router
    auth, tls, valkey = router.auth, router.tls, router.handle_store.valkey
    found = [] if tls is None else [_Mounted(TLS_VOLUME, tls.secret_name, dict(TLS_KEYS))]
    references = (
        ("client-ca", "--tls-client-ca", tls.client_ca_secret_ref if tls is not None else None),
        ("api-keys", "--api-keys-file", auth.api_keys_secret_ref),
        ("gateway", "--gateway-secret-file", auth.gateway.secret_ref if auth.gateway is not None else None),
        ("engine-key", "--engine-api-key-file", auth.engine_key_secret_ref),
        ("handle-key", "--handle-key-file", valkey.key_secret_ref if valkey is not None else None),
        ("valkey-password", "--valkey-password-file", valkey.password_secret_ref if valkey is not None else None),
        ("valkey-ca", "--valkey-ca-file", valkey.ca_secret_ref if valkey is not None else None),
    )
    for volume, flag, reference in references:
        if reference is not None:
            found.append(_Mounted(volume, reference.name, {flag: reference.key}))
    return found
