"""Flag spelling, versions in image tags, and names of children: small tables of text in and text out."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_operator.core import names
from pd_operator.core.choices import Role
from pd_operator.core.model import NAME_LIMIT
from pd_operator.core.reserved import (
    RENDERED_FLAGS,
    SHARED_FLAGS,
    flags_in,
    looks_like_token,
    rendered_flag,
    shared_flag,
    words_without_flag,
)
from pd_operator.core.versions import is_supported, version_in_image, version_of
from support.pddeployments import deployment


@pytest.mark.parametrize(
    ("arguments", "flags"),
    [
        (["--port", "1"], [(0, "--port")]),
        (["--port=1"], [(0, "--port")]),
        (["--tensor_parallel_size=1"], [(0, "--tensor-parallel-size")]),
        (["--kv-transfer-config.kv_role=x"], [(0, "--kv-transfer-config")]),
        (["--kv_transfer_config.a.b+", "x"], [(0, "--kv-transfer-config")]),
        (["--max-logprobs", "-1"], [(0, "--max-logprobs")]),
        (["--x", "-1.5", "-tp", "2"], [(0, "--x"), (2, "-tp")]),
        (["--port 1"], [(0, "--port")]),
        (["word", "-"], []),
    ],
)
def test_flags_in(arguments: list[str], flags: list[tuple[int, str]]) -> None:
    assert list(flags_in(arguments)) == flags


@pytest.mark.parametrize(
    ("arguments", "positions"),
    [
        ([], []),
        (["word"], [0]),
        (["", "--seed", "1"], [0]),
        (["-1"], [0]),
        (["-"], [0]),
        (["--seed", "1", "word", "--x", "y"], [2]),
        (["--seed=1", "word"], [1]),
        (["--no-enable-chunked-prefill", "word"], [1]),
        (["--no_enable_chunked_prefill", "word"], [1]),
        (["--"], [0]),
        (["--seed", "--", "a", "b"], [1, 2, 3]),
        (["--max-logprobs", "-1", "-1"], [2]),
        (["--x", "-", "-q", "fp8", "-O3"], []),
        (["--lora-modules", "a=b", "c=d", "--seed", "1", "2"], [5]),
        (["--lora_mod", "a=b", "c=d"], []),
        (["--lora-modules=a=b", "c=d"], [1]),
    ],
)
def test_words_without_flag(arguments: list[str], positions: list[int]) -> None:
    assert list(words_without_flag(arguments)) == positions


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("--port", "--port"),
        ("--por", "--port"),
        ("--tensor-par", "--tensor-parallel-size"),
        ("-t", "-tp"),
        ("--kv-t", "--kv-transfer-config"),
        ("--ports", None),
        ("--model-impl", None),
        ("--enforce-eager", None),
        ("--", None),
        ("-", None),
    ],
)
def test_rendered_flag(written: str, meant: str | None) -> None:
    assert rendered_flag(written) == meant


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("-sc", "-sc"),
        ("--speculative-c", "--speculative-config"),
        ("--no-trust-remote-code", "--no-trust-remote-code"),
        ("--max-logprobs", None),
        ("--port", None),
    ],
)
def test_shared_flag(written: str, meant: str | None) -> None:
    assert shared_flag(written) == meant


def test_no_flag_is_in_both_tables() -> None:
    assert not set(RENDERED_FLAGS) & SHARED_FLAGS


@given(st.sampled_from(sorted(RENDERED_FLAGS)), st.text(max_size=8), st.booleans())
@settings(deadline=None)
def test_no_spelling_of_a_rendered_flag_gets_through(flag: str, value: str, underscores: bool) -> None:
    if underscores:
        flag = "--" + flag[2:].replace("-", "_") if flag.startswith("--") else flag
    [(_, name)] = list(flags_in([f"{flag}={value}"]))
    assert rendered_flag(name) is not None


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("hf_" + "a" * 34, True),
        ('{"token":"hf_' + "B" * 20 + '"}', True),
        ("hf_short", False),
        ("half_" + "a" * 30, False),
    ],
)
def test_looks_like_token(value: str, found: bool) -> None:
    assert looks_like_token(value) is found


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.32.0", (0, 32)), ("v0.32", (0, 32)), ("0.32.0rc1", (0, 32)), ("1.4", (1, 4)), ("latest", None), ("7", None)],
)
def test_version_of(text: str, version: tuple[int, int] | None) -> None:
    assert version_of(text) == version


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.32.0", (0, 32)),
        ("vllm/vllm-openai:v0.32.0-cu130", (0, 32)),
        ("r.example:5000/vllm:0.21-gpu-py312", (0, 21)),
        ("r.example:5000/team/vllm", None),
        ("vllm/vllm-openai:latest", None),
        ("vllm/vllm-openai:v0.32.0@sha256:00", (0, 32)),
        ("vllm/vllm-openai@sha256:00", None),
        ("r.example/team/engine:1.4.0", None),
        ("r.example/team/engine:2-vllm0.33.1-nixl1.5", (0, 33)),
        ("r.example/team/engine:vllm-v0.30", (0, 30)),
    ],
)
def test_version_in_image(image: str, version: tuple[int, int] | None) -> None:
    assert version_in_image(image) == version


@pytest.mark.parametrize(
    ("version", "supported"), [((0, 28), False), ((0, 29), True), ((0, 33), True), ((0, 34), False), ((1, 0), False)]
)
def test_is_supported(version: tuple[int, int], supported: bool) -> None:
    assert is_supported(version) is supported


def test_names_of_children() -> None:
    qwen = deployment()
    assert names.role_name(qwen, Role.PREFILL) == "qwen-prefill"
    assert names.role_name(qwen, Role.DECODE) == "qwen-decode"
    assert names.engine_name(qwen, Role.DECODE, 2) == "qwen-decode-2"
    assert names.router_name(qwen) == "qwen-router"
    assert names.engines_name(qwen) == "qwen-engines"


def test_selectors_are_part_of_the_labels_and_leave_the_generation_out() -> None:
    qwen = deployment()
    for role in Role:
        labels = names.engine_labels(qwen, role, "g1")
        assert names.engine_selector(qwen, role).items() <= labels.items()
        assert labels["pdserving.dev/generation"] == "g1"
        assert "pdserving.dev/generation" not in names.engine_selector(qwen, role)
    assert names.router_selector(qwen).items() <= names.router_labels(qwen).items()


def test_selectors_of_different_children_never_overlap() -> None:
    one, other = deployment(), deployment(("metadata.name", "other"))
    selectors = [
        selector
        for owner in (one, other)
        for selector in (*(names.engine_selector(owner, role) for role in Role), names.router_selector(owner))
    ]
    assert len({tuple(sorted(selector.items())) for selector in selectors}) == len(selectors)


def test_the_longest_name_still_fits_what_kubernetes_adds() -> None:
    longest = deployment(("metadata.name", "a" * NAME_LIMIT))
    # A StatefulSet's pods carry its name, a dash and a hash of at most 10 characters as one label value.
    for name in (*(names.role_name(longest, role) for role in Role), names.router_name(longest)):
        assert len(name) + 1 + 10 <= 63
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
