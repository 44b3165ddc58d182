"""Accepting clients that speak TLS.

Separate because `create_server` tells nobody of a client until its handshake is over: a crowd that connects and says
nothing would take all descriptors, the admin port's too, without being counted. Here it is counted from the first
moment; what is too many is closed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable
from typing import Any

from pd_router.shell.client import REFUSED_AT_ONCE, ClientConnection, ServerState

HANDSHAKE_SECONDS = 5.0
BREATH_SECONDS = 0.1
"""After accept() failed, as it does without free descriptors."""


class TlsListener:
    """Listens from `start` to `close`."""

    def __init__(self, state: ServerState, make: Callable[[], ClientConnection], context: ssl.SSLContext) -> None:
        self._state, self._make, self._context = state, make, context
        self._accepting: list[asyncio.Task[None]] = []
        self._shaking: set[asyncio.Task[None]] = set()
        self.sockets: list[socket.socket] = []

    async def start(self, host: str, port: int, backlog: int, reuse_port: bool) -> None:
        """Listen on every address of `host`. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                self.sockets.append(_listening(family, address, backlog, reuse_port))
        except OSError:
            self.close()
            raise
        self._accepting = [loop.create_task(self._accept(one), name="tls-accept") for one in self.sockets]

    def close(self) -> None:
        """Accept no more; handshakes that have begun go on."""
        for task in self._accepting:
            task.cancel()
        for one in self.sockets:
            one.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop, state = asyncio.get_running_loop(), self._state
        while True:
            try:
                client, _ = await loop.sock_accept(listening)
            except OSError:
                await asyncio.sleep(BREATH_SECONDS)
                continue
            # The first ones too many are told so, as others are; it takes a handshake to tell them.
            if len(state.connections) + len(self._shaking) >= state.max_connections() + REFUSED_AT_ONCE:
                client.close()
                state.on_full()
                continue
            task = loop.create_task(self._shake(client), name="tls-handshake")
            self._shaking.add(task)
            task.add_done_callback(self._shaking.discard)

    async def _shake(self, client: socket.socket) -> None:
        with contextlib.suppress(
            OSError, TimeoutError
        ):  # the client's fault, or its end; ssl's errors are of the first
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                self._make, client, ssl=self._context, ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
            return
        client.close()


def _listening(family: int, address: Any, backlog: int, reuse_port: bool) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(backlog)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
