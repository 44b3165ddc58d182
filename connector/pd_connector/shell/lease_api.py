"""`POST /pd/v1/leases` on a decode engine's own HTTP port: `--middleware pd_connector.shell.lease_api.LeaseApi`.

vLLM puts it before its own handling of requests, its API keys included: whoever knows a lease's token may set its end,
and nobody else can do anything here. It speaks to the engine's side channel, whose thread answers at once however long
a step takes, and to nobody but the ranks that this server has started: hosts and ports come from its configuration.

A lease that is over ends in the engine's next step. An idle engine takes none, so it is woken, after a batch that ended
some that were held (anybody may ask for an end) and every few seconds for those that ran out: a question that it
answers by itself, and then looks for work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Final

import zmq
import zmq.asyncio
from vllm import envs
from vllm.logger import init_logger
from vllm.utils.network_utils import make_zmq_path

from pd_connector.core import lease_message, lease_request
from pd_connector.core.lease_message import Answer, NewEnd
from pd_connector.core.lease_request import MAX_BYTES, Refused
from pd_connector.core.question import Unreadable
from pd_wire import names

logger = init_logger("vllm.pd_connector")

LIMIT_SECONDS: Final = 2.0
"""Longest time for the engine's answer: that thread has nothing else to do, so later there will be none."""
WAKE_SECONDS: Final = 10.0
"""How often an engine is woken that may be idle; it takes about a millisecond of its time."""
AT_ONCE: Final = 32
"""Requests that are asked about at once, each by a socket per rank, of which zmq has about a thousand. More of them
wait: the engine's answer takes less than a millisecond."""
RETRY_SECONDS: Final = 1
"""When to come back where the engine did not answer."""
_JSON: Final = (b"content-type", b"application/json")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class LeaseApi:
    """ASGI middleware; one per API server process."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._ended = asyncio.Event()
        self._context = zmq.asyncio.Context()
        self._places = asyncio.Semaphore(AT_ONCE)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer requests to our path, pass on every other."""
        if scope["type"] == "lifespan":
            with self._waking(scope["app"].state):
                await self._app(scope, receive, send)
        elif scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) == names.LEASES_PATH:
            await self._serve(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        headers = [_JSON]
        try:
            if scope["method"] != "POST":
                headers.append((b"allow", b"POST"))
                raise Refused("only POST is served here", status=405)
            batch = lease_request.parse(await _body(scope, receive))
            answer = await self._set_ends(scope["app"].state.vllm_config.parallel_config, batch)
            status, body = 200, lease_request.answer(batch, answer.left)
            if answer.ended:
                self._ended.set()
        except Refused as refusal:
            status, body = refusal.status, refusal.body()
            if status == 503:
                headers.append((b"retry-after", str(RETRY_SECONDS).encode()))
        except ConnectionError:
            return  # the client has left
        headers.append((b"content-length", str(len(body)).encode()))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _set_ends(self, parallel: Any, batch: list[NewEnd]) -> Answer:
        """What became of the batch. A lease is held by one rank at most.

        Raises:
            Refused: when a rank does not answer, or too many other requests wait for one.
        """
        first = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + parallel.data_parallel_index
        ports = range(first, first + parallel.data_parallel_size_local)
        message = lease_message.encode(batch)
        try:
            await asyncio.wait_for(self._places.acquire(), LIMIT_SECONDS)
        except TimeoutError as error:
            raise Refused("too many requests wait for the engine's answer", status=503) from error
        try:
            answers = await asyncio.gather(*(_ask(self._context, port, message, len(batch)) for port in ports))
        finally:
            self._places.release()
        left = [max(each) for each in zip(*(answer.left for answer in answers), strict=True)]
        return Answer(left or [0] * len(batch), any(answer.ended for answer in answers))

    @contextlib.contextmanager
    def _waking(self, state: Any) -> Iterator[None]:
        """While the server runs, let its engine take a step when a lease may be over."""
        task = asyncio.get_running_loop().create_task(self._wake(state))
        try:
            yield
        finally:
            task.cancel()

    async def _wake(self, state: Any) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), WAKE_SECONDS)
            self._ended.clear()
            engine = getattr(state, "engine_client", None)
            if engine is None:
                continue
            try:
                await engine.is_sleeping()
            except Exception as error:  # noqa: BLE001 - a dead engine is told by whoever has work for it
                logger.debug("The engine was not woken: %r", error)


async def _body(scope: Message, receive: Receive) -> bytes:
    """The request's body.

    Raises:
        Refused: when it is too long; the rest is not read.
        ConnectionError: when the client has left.
    """
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError
        body += message.get("body", b"")
        if len(body) > MAX_BYTES:
            raise Refused(f"the body may have {MAX_BYTES} bytes", status=413)
        if not message.get("more_body", False):
            return bytes(body)


async def _ask(context: zmq.asyncio.Context, port: int, message: bytes, items: int) -> Answer:
    try:
        with context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.IPV6, 1)
            socket.connect(make_zmq_path("tcp", envs.VLLM_NIXL_SIDE_CHANNEL_HOST, port))
            await socket.send(message)
            return lease_message.decode_answer(await asyncio.wait_for(socket.recv(), LIMIT_SECONDS), items)
    except (TimeoutError, Unreadable, zmq.ZMQError) as error:
        raise Refused("the engine did not answer", status=503) from error
