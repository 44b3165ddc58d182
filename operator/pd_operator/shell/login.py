"""Credentials: one source for kopf's watches and for our own calls.

kopf's built-in logins are not used: the in-cluster one needs cluster DNS, the kubeconfig one knows no exec plugins, and
the client's one imports the blocking half of the client (memory). The environment's proxy variables are meant for other
programs and never apply to API calls; a `proxy-url` in a kubeconfig does.
"""

from __future__ import annotations

import os
from typing import Any

import kopf
from kubernetes.aio import config
from kubernetes.aio.client import Configuration

POOL_SIZE = 32


async def load_configuration() -> Configuration:
    """The service account of a pod, or what KUBECONFIG names.

    Raises:
        kubernetes.aio.config.ConfigException: when there is neither.
    """
    configuration = Configuration(client_session_kwargs={"trust_env": False})
    configuration.connection_pool_maxsize = POOL_SIZE
    kubeconfig = os.environ.get("KUBECONFIG")
    if kubeconfig or "KUBERNETES_SERVICE_HOST" not in os.environ:
        await config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=kubeconfig or None, client_configuration=configuration
        )
    else:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    return configuration


async def connection_info(**_: Any) -> kopf.ConnectionInfo:
    """kopf's login handler: called at start, and again when the server says 401 (an expired token)."""
    configuration = await load_configuration()
    bearer = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization") or ""
    scheme, _space, token = bearer.partition(" ")
    return kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert or None,
        insecure=not configuration.verify_ssl,
        certificate_path=configuration.cert_file or None,
        private_key_path=configuration.key_file or None,
        scheme=scheme.capitalize() or None,
        token=token or None,
        proxy_url=configuration.proxy or None,
        trust_env=False,
    )
