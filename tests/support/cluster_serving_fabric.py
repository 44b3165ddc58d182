"""The fabric between fake engines in pods: blocks are read from the peer itself, judgements are the judge's.

A reader asks the engine at a handle's host and port, over HTTP on what is NIXL's side channel in life, so an address
that is wrong or a pod that is gone shows as a failed transfer. Questions to the judge block this engine's loop: they
are ordered, short, and the judge asks nobody in turn.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web

from pd_wire import names
from pd_wire.moment import Moment
from pd_wire.moment import parse as parse_moment
from support.fake_engine.answers import BlockContent
from support.fake_engine.connector import Connector
from support.fake_engine.fabric import Fabric, Issued

JUDGE_URL: Final = "http://judge"
"""The Service of the judge in the engines' own namespace."""

PEER_SECONDS: Final = 20.0
JUDGE_SECONDS: Final = 60.0


class JudgeClient:
    """Calls the judge over one connection that is kept; one new connection is tried where it broke."""

    def __init__(self, url: str = JUDGE_URL) -> None:
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=JUDGE_SECONDS)

    def wait(self, seconds: float = JUDGE_SECONDS) -> None:
        """Wait until it answers. Raises OSError."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.call("issued", None)
                return
            except (OSError, http.client.HTTPException):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def call(self, name: str, *values: Any) -> Any:
        """The answer. Raises OSError, HTTPException."""
        body = json.dumps({"call": name, "with": values})
        try:
            return self._ask(body)
        except (OSError, http.client.HTTPException):
            self._connection.close()
            return self._ask(body)

    def _ask(self, body: str) -> Any:
        self._connection.request("POST", "/call", body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        data = answer.read()
        if answer.status != 200:
            raise http.client.HTTPException(f"the judge answered {answer.status}")
        return json.loads(data)["answer"]


class NetworkFabric(Fabric):
    """Of one engine in one process."""

    def __init__(self, judge: JudgeClient) -> None:
        super().__init__()
        self._judge = judge
        self._errands: set[asyncio.Task[None]] = set()
        self._session: aiohttp.ClientSession | None = None

    # --- asked of the judge -----------------------------------------------------------------------

    def violate(self, who: str, what: str) -> None:
        super().violate(who, what)
        print(f"VIOLATION {who}: {what}", file=sys.stderr, flush=True)
        self._judge.call("violate", who, what)

    def note(self, text: str) -> None:
        """Something that is no violation and worth knowing."""
        self._judge.call("note", text)

    def join(self, connector: Connector) -> None:
        super().join(connector)
        self._judge.call("join", connector.engine_id, connector.name)

    def issue(self, request_id: str, engine_id: str, value: dict[str, Any]) -> None:
        self._judge.call("issue", request_id, engine_id, value)

    def issued(self, request_id: Any) -> Issued | None:
        found = self._judge.call("issued", request_id if isinstance(request_id, str) else None)
        return None if found is None else Issued(found["engine_id"], found["value"])

    def handle_fault(self, value: Mapping[str, Any]) -> str | None:
        fault: str | None = self._judge.call("handle_fault", dict(value))
        return fault

    def sent(self, request_id: str, engine: str) -> list[str]:
        sent_to: list[str] = self._judge.call("sent", request_id, engine)
        return sent_to

    # --- asked of the peer ------------------------------------------------------------------------

    async def visit(self, params: Mapping[str, Any]) -> Any:
        # The connector has taken the moment out of the params, as it does before vLLM sees them.
        issued = self.issued(params["remote_request_id"])
        question = {
            "request": params["remote_request_id"],
            "blocks": params["remote_block_ids"][0],
            "engine": params["remote_engine_id"],
            "moment": issued.value.get(names.MOMENT_KEY) if issued else None,
        }
        try:
            async with self._client().post(f"{_peer(params)}/visit", json=question) as answer:
                return Visit(self, params, await answer.json())
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    def notify(self, params: Mapping[str, Any], reader: Connector) -> None:
        self.tell(params, reader.name, read=False)

    def tell(self, params: Mapping[str, Any], reader: str, *, read: bool) -> None:
        """Tell a handle's owner that a reader is done with it; like NIXL's notifications it may get lost."""
        errand = asyncio.create_task(self._tell(dict(params), reader, read))
        self._errands.add(errand)
        errand.add_done_callback(self._errands.discard)

    async def _tell(self, params: Mapping[str, Any], reader: str, read: bool) -> None:
        note = {
            "engine": params["remote_engine_id"],
            "request": params["remote_request_id"],
            "reader": reader,
            "read": read,
        }
        try:
            async with self._client().post(f"{_peer(params)}/notified", json=note):
                pass
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            print(f"{params['remote_host']} was not notified: {error!r}", file=sys.stderr, flush=True)

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PEER_SECONDS))
        return self._session

    async def close(self) -> None:
        """Let notifications out, then close."""
        await asyncio.gather(*self._errands)
        if self._session is not None:
            await self._session.close()


class Visit:
    """What a reader found at a peer: as much of a `Connector` as a pull looks at. It is its own ``pool``."""

    def __init__(self, fabric: NetworkFabric, params: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        self._fabric, self._params, self._found = fabric, params, found
        self.engine_id, self.name, self.frozen = found["engine_id"], found["name"], found["frozen"]
        self.pool = self

    def clock(self) -> float:
        """The peer's clock when it was asked."""
        return float(self._found["clock"])

    def retained_tokens(self, _request_id: str) -> tuple[int, ...] | None:
        """Ids behind the request that the params name."""
        tokens = self._found["tokens"]
        return None if tokens is None else tuple(tokens)

    def read(self, number: int) -> BlockContent:
        """A block as it was at the visit."""
        context, tokens = self._found["blocks"][str(number)]
        return BlockContent(bytes.fromhex(context), tokens)

    def intact(self, _engine_id: str, _moment: Moment, _blocks: Sequence[int]) -> int:
        """How many of the leading blocks were as the params' moment promises at the visit, when all were read."""
        return int(self._found["intact"])

    def notified(self, _request_id: str, reader: str, *, read: bool) -> None:
        """Tell the peer."""
        self._fabric.tell(self._params, reader, read=read)


def side_channel(connector: Connector) -> web.Application:
    """What an engine answers to its peers."""

    async def visit(request: web.Request) -> web.Response:
        question = await request.json()
        connector.expire()
        moment = parse_moment(question["moment"])
        blocks = {str(number): connector.pool.read(number) for number in question["blocks"]}
        return web.json_response(
            {
                "engine_id": connector.engine_id,
                "name": connector.name,
                "frozen": connector.frozen,
                "clock": connector.clock(),
                "tokens": connector.retained_tokens(question["request"]),
                "intact": connector.intact(question["engine"], moment, question["blocks"]) if moment else 0,
                "blocks": {number: [block.context.hex(), list(block.tokens)] for number, block in blocks.items()},
            }
        )

    async def notified(request: web.Request) -> web.Response:
        note = await request.json()
        if note["engine"] == connector.engine_id:
            connector.notified(note["request"], note["reader"], read=note["read"])
        else:
            connector.counters["failed_notifications"] += 1
        return web.Response()

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/visit", visit)
    app.router.add_post("/notified", notified)
    return app


def _peer(params: Mapping[str, Any]) -> str:
    return f"http://{params['remote_host']}:{params['remote_port']}"
