"""The judge of fake engines that run in pods: one process that all of them report to, and that outlives them.

``python -m support.cluster_serving_judge [PORT]``. It holds the `Fabric` that engines of one process would share: which
handles were issued, how often each was sent, what was violated. Separate from the engines, because pods come and go
during a test, and a violation must still be there at its end.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from aiohttp import web

from support.fake_engine.fabric import Fabric

PORT: Final = 8000


class Judge:
    """Answers `{"call": NAME, "with": [...]}`; each call is one method."""

    def __init__(self) -> None:
        self._fabric = Fabric()
        self._engine_ids: dict[str, str] = {}
        self._notes: list[str] = []
        self._issued = 0
        self._sent = 0

    def call(self, name: str, values: list[Any]) -> Any:
        """One call of an engine.

        Raises:
            KeyError: no such call.
        """
        return {
            "join": self._join,
            "issue": self._issue,
            "issued": self._lookup,
            "sent": self._count_sent,
            "handle_fault": self._fabric.handle_fault,
            "violate": self._violate,
            "note": self._notes.append,
        }[name](*values)

    def report(self) -> dict[str, Any]:
        """What the test asks for at its end; ``issued`` and ``sent`` show that there was something to judge."""
        return {
            "violations": self._fabric.violations,
            "notes": self._notes,
            "engines": self._engine_ids,
            "issued": self._issued,
            "sent": self._sent,
        }

    def _join(self, engine_id: str, name: str) -> None:
        self._engine_ids[engine_id] = name

    def _issue(self, request_id: str, engine_id: str, value: dict[str, Any]) -> None:
        self._issued += 1
        self._fabric.issue(request_id, engine_id, value)

    def _lookup(self, request_id: Any) -> dict[str, Any] | None:
        issued = self._fabric.issued(request_id)
        return None if issued is None else {"engine_id": issued.engine_id, "value": issued.value}

    def _count_sent(self, request_id: str, engine: str) -> list[str]:
        self._sent += 1
        return self._fabric.sent(request_id, engine)

    def _violate(self, who: str, what: str) -> None:
        self._fabric.violate(who, what)
        print(f"VIOLATION {who}: {what}", file=sys.stderr, flush=True)


def make_app(judge: Judge) -> web.Application:
    """Its two routes."""

    async def call(request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"answer": judge.call(body["call"], body["with"])})

    async def report(_request: web.Request) -> web.Response:
        return web.json_response(judge.report())

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/call", call)
    app.router.add_get("/report", report)
    return app


if __name__ == "__main__":
    web.run_app(make_app(Judge()), port=int(sys.argv[1]) if sys.argv[1:] else PORT, access_log=None, print=None)
