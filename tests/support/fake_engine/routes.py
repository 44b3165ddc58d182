"""Routes of a fake engine: the small endpoints, and the door to `exchange` for the large ones.

Separate from the exchange because these have no plan, no KV and no faults besides being frozen. An endpoint that steers
the engine is there too, as on a real one, and being asked is a violation.
"""

from __future__ import annotations

import json
from email import message_from_bytes
from typing import Any

from aiohttp import web

from pd_wire.names import LEASES_PATH
from support.fake_engine import exposition, wire
from support.fake_engine.apis import PATHS, as_chat
from support.fake_engine.engine import FakeEngine, Passed
from support.fake_engine.exchange import Exchange
from support.fake_engine.leases import serve_leases
from support.fake_engine.tokens import PromptError, completion_prompts, decode, encode

MAX_BODY = 256 * 1024 * 1024
POOLING = (
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
)
SPEECH = ("/v1/audio/transcriptions", "/v1/audio/translations")
STEERING = (
    "/sleep",
    "/wake_up",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/collective_rpc",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/start_profile",
    "/stop_profile",
    "/pause",
    "/resume",
    "/abort_requests",
    "/update_weights",
    "/scale_elastic_ep",
    "/fault_tolerance/apply",
    "/inference/v1/generate",
    "/invocations",
)
TOLD = ("/server_info", "/load", "/kv_event_sources", "/is_sleeping", "/tokenizer_info", "/get_world_size")
"""What an engine tells about itself to its operator."""


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

    async def version(_request: web.Request) -> web.Response:
        return web.json_response({"version": engine.config.version})

    async def detokenize(request: web.Request) -> web.Response:
        return web.json_response({"prompt": decode((await request.json())["tokens"])})

    async def count_tokens(request: web.Request) -> web.Response:
        body = {"max_tokens": 1, **await request.json()}
        count = len(engine.config.template.render(as_chat("messages", body)))
        return web.json_response({"input_tokens": count, "context_management": {"original_input_tokens": count}})

    async def pooling(request: web.Request) -> web.StreamResponse:
        body = await _passed(request)
        given = json.loads(body)
        count = len(encode(json.dumps(given.get("input", given))))
        vector = [count / 1000, -0.5]
        data = [{"index": 0, "object": "embedding", "embedding": vector}]
        usage = {"prompt_tokens": count, "total_tokens": count, "completion_tokens": 0, "prompt_tokens_details": None}
        return web.json_response(
            {"id": "embd-1", "object": "list", "created": 0, "model": given.get("model"), "data": data, "usage": usage}
        )

    async def speech(request: web.Request) -> web.StreamResponse:
        raw = await _passed(request)
        fields = parse_form(raw, request.headers["Content-Type"])
        size = len(fields.get("file", b""))
        if fields.get("stream") != b"true":
            usage = {"type": "duration", "seconds": 1}
            return web.json_response({"text": f"{size} bytes of speech", "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for word in (str(size), " bytes", " of speech"):
            choice = {"delta": {"content": word}, "finish_reason": None, "stop_reason": None}
            event = {"id": "trsc-1", "object": "transcription.chunk", "created": 0, "model": "m", "choices": [choice]}
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _passed(request: web.Request) -> bytes:
        raw = await request.read()
        engine.passed.append(Passed(request.method, request.raw_path, dict(request.headers), raw))
        return raw

    async def steering(request: web.Request) -> web.Response:
        engine.fabric.violate(engine.name, f"a client reached {request.method} {request.path}")
        return web.json_response({})

    async def leases(request: web.Request) -> web.StreamResponse:
        return await serve_leases(engine, request)

    async def generate(request: web.Request) -> web.StreamResponse:
        return await Exchange(engine, request).answer()

    app = web.Application(middlewares=[freezing], client_max_size=MAX_BODY)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/metrics", metrics)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_post("/detokenize", detokenize)
    app.router.add_get("/version", version)
    app.router.add_post("/v1/messages/count_tokens", count_tokens)
    for path in PATHS:
        app.router.add_post(path, generate)
    for path in POOLING:
        app.router.add_post(path, pooling)
    for path in SPEECH:
        app.router.add_post(path, speech)
    for path in STEERING:
        app.router.add_post(path, steering)
    if engine.config.connector.retention == "Leased":
        app.router.add_route("*", LEASES_PATH, leases)
    for path in TOLD:
        app.router.add_get(path, steering)
    return app


def parse_form(raw: bytes, content_type: str) -> dict[str, bytes]:
    """The fields of a multipart body."""
    whole = message_from_bytes(b"Content-Type: " + content_type.encode() + b"\r\n\r\n" + raw)
    fields: dict[str, bytes] = {}
    for part in whole.walk():
        name = part.get_param("name", header="content-disposition")
        value = part.get_payload(decode=True)
        if isinstance(name, str) and isinstance(value, bytes):
            fields[name] = value
    return fields
