"""What we render and what we refuse, against the argument parser and the connector sources of the installed vLLM.

Nothing is started: the parser alone is built, which also builds `KVTransferConfig` as the engine would.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from pd_operator.core.choices import Role
from pd_operator.core.model import PDDeployment
from pd_operator.core.render_engine import (
    LEASE_API,
    EngineEndpoint,
    EngineProcess,
    kv_transfer_config,
    render_engine,
)
from pd_operator.core.reserved import (
    MANY_VALUES,
    RENDERED_ENV,
    RENDERED_FLAGS,
    SHARED_FLAGS,
    rendered_flag,
    shared_flag,
)
from pd_operator.core.rules_transfer import FREE_KEYS
from support.pddeployments import deployment, example

# Importing vLLM takes 20 s on an idle core and minutes on a busy one; the first test that needs it pays.
pytestmark = pytest.mark.timeout(600)

LAUNCHERS = {"vllm": 2, "python": 3}
"""Words before the arguments that the parser sees."""

NAMES = ["qwen3-32b-p5en", "glm-5-fp8-p5en", "cpu-tiny"]
EVERYTHING: list[tuple[str, Any]] = [
    ("spec.model.revision", "main"),
    ("spec.engine.blockSize", 64),
    ("spec.engine.gpuMemoryUtilizationPercent", 85),
    ("spec.engine.extraArgs", ["--max-num-batched-tokens", "8192", "--kv-cache-dtype=fp8"]),
    ("spec.kvTransfer.loadFailurePolicy", "Recompute"),
    ("spec.kvTransfer.extraConfig", [{"name": "num_threads", "value": "8"}]),
]


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    with warnings.catch_warnings():
        # torch and vLLM warn about each other on import; that is not what is tested here.
        warnings.simplefilter("ignore")
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        built = make_arg_parser(FlexibleArgumentParser())
    assert isinstance(built, argparse.ArgumentParser)
    return built


@pytest.fixture(scope="module")
def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def process_of(value: PDDeployment, role: Role) -> EngineProcess:
    return render_engine(value, role, EngineEndpoint("10.0.0.1", 8100, "10.0.0.1", 5600, "0"))


def parsed(parser: argparse.ArgumentParser, process: EngineProcess) -> argparse.Namespace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return parser.parse_args(list(process.argv[LAUNCHERS[process.argv[0]] :]))


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("name", NAMES)
def test_the_parser_reads_the_examples(parser: argparse.ArgumentParser, name: str, role: Role) -> None:
    value = deployment(base=example(name))
    args = parsed(parser, process_of(value, role))
    assert (args.model_tag or args.model) == value.spec.model.name
    assert args.served_model_name == [value.spec.model.public_name]
    assert args.max_model_len == value.spec.model.max_model_len
    assert args.tensor_parallel_size == value.role(role).tensor_parallel_size
    assert args.max_num_seqs == value.spec.engine.max_num_seqs
    assert args.shutdown_timeout == value.spec.engine.shutdown_timeout_seconds
    assert args.enable_prompt_tokens_details is True
    assert args.enable_prefix_caching is (False if role is Role.PREFILL else None)
    assert (args.host, args.port) == ("10.0.0.1", 8100)


@pytest.mark.parametrize("role", list(Role))
def test_the_parser_reads_every_optional_flag(parser: argparse.ArgumentParser, role: Role) -> None:
    args = parsed(parser, process_of(deployment(*EVERYTHING), role))
    assert (args.revision, args.block_size, args.max_num_batched_tokens) == ("main", 64, 8192)
    assert args.gpu_memory_utilization == pytest.approx(0.85)
    assert args.kv_cache_dtype == "fp8"


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("name", NAMES)
def test_vllm_builds_its_transfer_config_from_ours(parser: argparse.ArgumentParser, name: str, role: Role) -> None:
    value = deployment(base=example(name))
    config = parsed(parser, process_of(value, role)).kv_transfer_config
    ours = kv_transfer_config(value, role)
    assert {key: getattr(config, key) for key in ours} == ours
    assert (config.is_kv_producer, config.is_kv_consumer) == (role is Role.PREFILL, role is Role.DECODE)


def test_every_start_draws_its_own_engine_id(parser: argparse.ArgumentParser) -> None:
    process = process_of(deployment(), Role.DECODE)
    one, two = (parsed(parser, process).kv_transfer_config.engine_id for _ in range(2))
    assert one
    assert one != two


def test_vllm_takes_an_unknown_policy_word_for_an_error(parser: argparse.ArgumentParser) -> None:
    argv = list(process_of(deployment(), Role.PREFILL).argv[2:])
    index = argv.index("--kv-transfer-config") + 1
    argv[index] = json.dumps(json.loads(argv[index]) | {"kv_load_failure_policy": "Fail"})
    with pytest.raises((SystemExit, ValueError)):
        parser.parse_args(argv)


def test_variables_for_vllm_are_known_to_it() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm import envs
    rendered = {
        name for example_name in NAMES for name in process_of(deployment(base=example(example_name)), Role.DECODE).env
    }
    for name in {name for name in rendered if name.startswith("VLLM_")}:
        assert name in envs.environment_variables
    assert "NIXL_BACKEND" in RENDERED_ENV
    assert "VLLM_NIXL_BACKEND" not in envs.environment_variables, "it would then have an effect"


def test_engines_hash_blocks_alike_without_a_seed_from_us(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that follows block hashes needs equal seeds on all engines; vLLM gives them when nobody sets one."""
    process = process_of(deployment(), Role.PREFILL)
    assert "PYTHONHASHSEED" not in process.env
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
    algorithm = get_hash_fn_by_name(parsed(parser, process).prefix_caching_hash_algo)
    assert resolve_none_hash_seed(algorithm) == resolve_none_hash_seed(algorithm)


LEASED = ("spec.kvTransfer.retention", "Leased")
OWN_MIDDLEWARE = ("spec.engine.extraArgs", ["--middleware", "mine.Log", "--middleware=mine.Count"])


@pytest.mark.parametrize("role", list(Role))
def test_the_parser_adds_the_users_middleware_to_that_of_leases(parser: argparse.ArgumentParser, role: Role) -> None:
    found = parsed(parser, process_of(deployment(LEASED, OWN_MIDDLEWARE), role))
    ours = [LEASE_API] if role is Role.DECODE else []
    assert found.middleware == [*ours, "mine.Log", "mine.Count"]


def test_the_parser_reads_what_is_rendered_of_leases(parser: argparse.ArgumentParser) -> None:
    edits = (LEASED, ("spec.kvTransfer.lease", {"seconds": 15, "sharePercent": 29}))
    config = parsed(parser, process_of(deployment(*edits), Role.DECODE)).kv_transfer_config
    told = {
        key: config.get_from_extra_config(key, None) for key in ("pd_retention", "pd_lease_seconds", "pd_lease_share")
    }
    assert told == {"pd_retention": "Leased", "pd_lease_seconds": 15, "pd_lease_share": 0.29}
    assert {key for key in config.kv_connector_extra_config if key.startswith("pd_")} == told.keys()


def test_what_is_added_for_leases_is_a_middleware_of_the_connector() -> None:
    module, _, name = LEASE_API.rpartition(".")
    assert isinstance(getattr(importlib.import_module(module), name), type)


def test_refused_flags_exist(options: set[str]) -> None:
    assert set(RENDERED_FLAGS) - options == set()
    assert SHARED_FLAGS - options == set()


def test_flags_with_many_values_are_vllms(parser: argparse.ArgumentParser) -> None:
    many = {option for action in parser._actions if action.nargs in ("+", "*") for option in action.option_strings}
    assert many - set(RENDERED_FLAGS) == MANY_VALUES


def test_no_other_flag_is_refused(options: set[str]) -> None:
    free = {option for option in options if option not in RENDERED_FLAGS and option not in SHARED_FLAGS}
    negated = {f"--no-{flag[2:]}" for flag in SHARED_FLAGS}
    assert {option for option in free - negated if rendered_flag(option) or shared_flag(option)} == set()


def test_every_beginning_that_the_parser_accepts_is_refused(parser: argparse.ArgumentParser, options: set[str]) -> None:
    for flag in RENDERED_FLAGS:
        for length in range(3 if flag.startswith("--") else 2, len(flag)):
            short = flag[:length]
            meant = [option for option in options if option.startswith(short)]
            if meant == [flag]:
                assert rendered_flag(short) == flag


def _connector_sources() -> str:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "distributed/kv_transfer/kv_connector/v1/nixl"
    return "".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")) if "push" not in path.name)


def test_the_connector_reads_every_extra_key_that_we_render_or_allow() -> None:
    read = set(re.findall(r'get_from_extra_config\(\s*"(\w+)"', _connector_sources()))
    # Keys with `pd_` are our connector's own.
    rendered = set(kv_transfer_config(deployment(LEASED), Role.DECODE)["kv_connector_extra_config"])
    rendered = {key for key in rendered if not key.startswith("pd_")}
    assert rendered | set(FREE_KEYS) <= read
