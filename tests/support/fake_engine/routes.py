"""Routes of a fake engine: the small endpoints, and the door to `exchange` for the large ones.

Separate from the exchange because these have no plan, no KV and no faults besides being frozen.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from support.fake_engine import exposition, wire
from support.fake_engine.engine import FakeEngine
from support.fake_engine.exchange import Exchange
from support.fake_engine.tokens import PromptError, completion_prompts

MAX_BODY = 256 * 1024 * 1024


def make_app(engine: FakeEngine) -> web.Application:
    """Routes of one engine."""

    @web.middleware
    async def freezing(request: web.Request, handler: Any) -> web.StreamResponse:
        await engine.wait_thawed()
        response: web.StreamResponse = await handler(request)
        return response

    async def health(_request: web.Request) -> web.Response:
        return web.Response(status=engine.health_status)

    async def models(_request: web.Request) -> web.Response:
        data = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "vllm",
                "max_model_len": engine.config.max_model_len,
            }
            for name in engine.config.models
        ]
        return web.json_response({"object": "list", "data": data})

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(text=exposition.render(engine), content_type="text/plain")

    async def tokenize(request: web.Request) -> web.Response:
        body = await request.json()
        if not isinstance(body, dict):
            return web.json_response(wire.error_body(400, "the body must be a JSON object"), status=400)
        try:
            tokens = completion_prompts(body)[0] if "prompt" in body else engine.config.template.render(body)
        except PromptError as error:
            return web.json_response(wire.error_body(400, str(error)), status=400)
        return web.json_response(
            {"count": len(tokens), "max_model_len": engine.config.max_model_len, "tokens": tokens, "token_strs": None}
        )

    async def generate(request: web.Request) -> web.StreamResponse:
        return await Exchange(engine, request).answer()

    app = web.Application(middlewares=[freezing], client_max_size=MAX_BODY)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/v1/chat/completions", generate)
    app.router.add_post("/v1/completions", generate)
    return app
