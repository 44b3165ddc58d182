"""What the router believes of vLLM's endpoints, held against the sources of the releases that it was read in.

By the sources and not by import, so that no release has to load: classes of requests and answers, the converter of
streamed messages, and the paths.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from pd_connector import compat
from pd_router.core.capabilities import carries, parse_version
from pd_router.core.fields import KNOWN_IDS, Api
from pd_router.core.passed import PASSED, SOCKETS
from pd_wire.names import KV_PARAMS
from support.fake_engine.routes import STEERING, TOLD
from support.vllm_sources import fetch

RELEASES = ["0.29.0", "0.32.0", "0.33.0"]
INSTALLED = "0.32.0"
TURNS = {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
PROTOCOLS = {
    Api.CHAT: ("openai/chat_completion/protocol.py", "ChatCompletionRequest", "ChatCompletionResponse"),
    Api.COMPLETIONS: ("openai/completion/protocol.py", "CompletionRequest", "CompletionResponse"),
    Api.RESPONSES: ("openai/responses/protocol.py", "ResponsesRequest", "ResponsesResponse"),
    Api.MESSAGES: ("anthropic/protocol.py", "AnthropicMessagesRequest", "AnthropicMessagesResponse"),
}


@cache
def entrypoints(release: str) -> Path:
    if release != INSTALLED:
        return fetch(release) / "vllm" / "entrypoints"
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "entrypoints"


@cache
def classes(release: str, file: str) -> dict[str, ast.ClassDef]:
    tree = ast.parse((entrypoints(release) / file).read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def fields(release: str, file: str, name: str) -> set[str]:
    """The annotated fields of a class, with those of bases in the same file."""
    known = classes(release, file)
    found = {
        node.target.id
        for node in known[name].body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for base in known[name].bases:
        if isinstance(base, ast.Name) and base.id in known:
            found |= fields(release, file, base.id)
    return found


def source(release: str, file: str, name: str) -> str:
    """The text of a function or method."""
    text = (entrypoints(release) / file).read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return ast.get_source_segment(text, node) or ""
    raise AssertionError(f"{file} has no {name}")


def paths(release: str) -> Iterator[tuple[str, str]]:
    """Method and path of every route."""
    for file in entrypoints(release).rglob("*.py"):
        for found in re.finditer(r'@\w+\.(get|post|websocket|delete|put)\(\s*"(/[^"]*)"', file.read_text()):
            yield found[1], found[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("api", Api)
def test_what_the_requests_and_whole_answers_carry(release: str, api: Api) -> None:
    file, request, answer = PROTOCOLS[api]
    believed = carries(parse_version(release), api)
    assert (KV_PARAMS in fields(release, file, request)) is believed.request
    assert (KV_PARAMS in fields(release, file, answer)) is believed.whole


@pytest.mark.timeout(600)
@pytest.mark.parametrize("release", RELEASES)
def test_what_streams_carry(release: str) -> None:
    # A response's last event holds the whole response, made by the function that unstreamed requests get it from.
    stream = source(release, "openai/responses/serving.py", "responses_stream_generator")
    assert "responses_full_generator" in stream
    assert KV_PARAMS in source(release, "openai/responses/serving.py", "responses_full_generator")
    assert carries(parse_version(release), Api.RESPONSES).streamed
    assert carries(parse_version(release), Api.MESSAGES).streamed


@pytest.mark.timeout(600)
@pytest.mark.parametrize("release", RELEASES)
def test_what_a_streamed_message_lacks_the_plugin_adds(release: str) -> None:
    file, method = "anthropic/serving.py", "message_stream_converter"
    assert KV_PARAMS not in source(release, file, method), "vLLM does it itself: the patch may go"
    patched = {(target.module, target.method) for target in compat.stream_targets(compat.parse_version(release))}
    assert (f"vllm.entrypoints.{file.removesuffix('.py').replace('/', '.')}", method) in patched


@pytest.mark.parametrize("api", Api)
def test_the_ids_that_the_installed_release_knows(api: Api) -> None:
    file, request, _ = PROTOCOLS[api]
    assert fields(INSTALLED, file, request) >= KNOWN_IDS[api]


def test_every_endpoint_that_passes_is_there_under_its_method() -> None:
    there = {(method, path) for method, path in paths(INSTALLED)}
    assert {(one.method.lower(), path) for path, one in PASSED.items()} <= there
    assert {("websocket", path) for path in SOCKETS} <= there
    assert {("post", path) for path in TURNS} <= there


@pytest.mark.timeout(600)
@pytest.mark.parametrize("release", RELEASES)
def test_every_other_endpoint_is_one_that_was_looked_at(release: str) -> None:
    """A new one fails here until somebody says whether clients may have it."""
    withheld = {
        *STEERING,
        *TOLD,
        *("/health", "/ping", "/ready", "/readyz", "/docs", "/redoc", "/metrics"),
        # Several conversations in one request; another company's API, which no client of this product speaks.
        *("/v1/chat/completions/batch", "/cohere/v2/chat", "/generative_scoring", "/v1/systemone", "/v1/decisions"),
        # No engine behind a router keeps responses.
        *("/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel"),
    }
    inner = re.compile(
        r".*/(render|derender)$|/(weight|update|init|start|finish|shutdown|reset|is_|release|check)[a-z_]*$|/fault_tolerance/.*"
        r"|/(scale|is_scaling)_elastic_ep"
    )
    unknown = {
        path
        for _, path in paths(release)
        if path not in {*PASSED, *SOCKETS, *TURNS, *withheld} and inner.fullmatch(path) is None
    }
    assert unknown == set()
