"""TLS contexts for clients and engines, made anew when their files change.

Separate from sockets so that versions, verification and what a change of files means are in one place. A connection
that stands keeps what it was made with.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from typing import Any

from pd_router.core.access import Tls
from pd_router.shell.exchange import Address
from pd_router.shell.watched_file import WatchedFile

_ALPN = ["http/1.1"]


class ListenerTls:
    """The context of the listener. Handshakes are handed to the newest files by way of the server name callback, which
    OpenSSL calls for clients without a server name, too."""

    def __init__(self, tls: Tls) -> None:
        flags, paths = ["--tls-cert", "--tls-key"], [tls.certificate, tls.key]
        if tls.client_ca:
            flags.append("--tls-client-ca")
            paths.append(tls.client_ca)
        self.files: WatchedFile[ssl.SSLContext] = WatchedFile(flags, paths, lambda: server_context(tls))
        self.context = server_context(tls)
        self.context.sni_callback = self._newest

    def _newest(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self.files.value


def server_context(tls: Tls) -> ssl.SSLContext:
    """A context for clients: TLS 1.2 or later. Raises OSError.

    With a client CA TLS 1.3 or later and no resumption: a resumed session would carry an earlier check of the client's
    certificate over a change of the authorities.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(_ALPN)
    # Without a password callback a key that has one would ask on the terminal.
    context.load_cert_chain(tls.certificate, tls.key, password=_no_password)
    if tls.client_ca:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        context.load_verify_locations(tls.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def engine_context(ca: str) -> ssl.SSLContext:
    """A context for engines: certificate and name are verified. Raises OSError."""
    context = ssl.create_default_context(cafile=ca or None)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_ALPN)
    return context


class EngineTls:
    """What connecting to an engine needs besides host and port."""

    def __init__(self, tls: Tls, timeout: float) -> None:
        self._name = tls.engine_name
        self._timeout = timeout
        paths = [tls.engine_ca] if tls.engine_ca else []
        self._make: Callable[[], ssl.SSLContext] = lambda: engine_context(tls.engine_ca)
        self.files: WatchedFile[ssl.SSLContext] | None = (
            WatchedFile(["--engine-ca"], paths, self._make) if paths else None
        )
        self._system: ssl.SSLContext | None = None

    def arguments(self, address: Address) -> dict[str, Any]:
        """Further arguments of `create_connection`; none for an engine without TLS."""
        if not address.tls:
            return {}
        return {
            "ssl": self._context(),
            "server_hostname": self._name or address.host,
            "ssl_handshake_timeout": self._timeout,
        }

    def _context(self) -> ssl.SSLContext:
        if self.files is not None:
            return self.files.value
        if self._system is None:
            self._system = self._make()
        return self._system


def tls_trouble(error: BaseException) -> str:
    """What is wrong with an engine's TLS, in OpenSSL's words; "" when it is not about TLS."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return str(error.reason or "") if isinstance(error, ssl.SSLError) else ""


def _no_password() -> str:
    raise ssl.SSLError("the private key has a password; it must have none")
