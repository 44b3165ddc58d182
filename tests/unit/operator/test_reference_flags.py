"""The two p5en examples reproduce the reference benchmark, flag by flag.

The table is written here as data, from the published setting of the feature's authors: 1P1D on two p5en.48xlarge, P on
8100, D on 8200, side channel 5600. It repeats literal values on purpose and imports no constant of the renderer.
"""

from __future__ import annotations

import json

import pytest

from pd_operator.core.choices import Role
from pd_operator.core.parse import parse_deployment
from pd_operator.core.profiles import profile_of
from pd_operator.core.render_engine import EngineEndpoint, EngineProcess, render_engine
from support.pddeployments import example, flag_table

ADDRESS = {Role.PREFILL: "10.0.0.1", Role.DECODE: "10.0.0.2"}
EXAMPLES = {
    "qwen3-32b-p5en": ("Qwen/Qwen3-32B", "Qwen"),
    "glm-5-fp8-p5en": ("zai-org/GLM-5-FP8", "GLM"),
}
BOTH_ROLES = [
    ("--tensor-parallel-size", ["8"]),
    ("--max-model-len", ["32768"]),
    ("--max-num-seqs", ["8"]),
    ("--dtype", ["bfloat16"]),
]
ONE_ROLE = [
    (Role.PREFILL, "--port", ["8100"]),
    (Role.DECODE, "--port", ["8200"]),
    (Role.PREFILL, "--no-enable-prefix-caching", []),
]
TRANSFER = [
    ("kv_buffer_device", "cuda"),
    ("kv_connector_extra_config.backends", ["LIBFABRIC"]),
    ("kv_connector_extra_config.kv_recompute_threshold", 64),
    ("kv_connector_extra_config.decoder_kv_blocks_ttl", 480),
    ("kv_connector_extra_config.bidirectional_kv_xfer", True),
]
TRANSFER_ROLE = [(Role.PREFILL, "kv_producer"), (Role.DECODE, "kv_consumer")]
ENVIRONMENT = [("FI_PROVIDER", "efa"), ("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600")]

OURS = [("--shutdown-timeout", ["120"]), ("--enable-prompt-tokens-details", [])]
"""Not in the benchmark: drain on SIGTERM, and counting."""

OUR_ENVIRONMENT = [
    ("FI_EFA_USE_DEVICE_RDMA", "1"),
    ("NIXL_LOG_LEVEL", "INFO"),
    ("VLLM_ENGINE_READY_TIMEOUT_S", "7200"),
]

each_example = pytest.mark.parametrize("name", EXAMPLES)
each_role = pytest.mark.parametrize("role", list(Role))


def rendered(name: str, role: Role) -> EngineProcess:
    deployment = parse_deployment(example(name))
    ports = profile_of(deployment.spec).ports
    port = ports.prefill_http if role is Role.PREFILL else ports.decode_http
    return render_engine(deployment, role, EngineEndpoint("0.0.0.0", port, ADDRESS[role], ports.side_channel))


def transfer_config(process: EngineProcess) -> dict[str, object]:
    [text] = flag_table(process.argv)["--kv-transfer-config"]
    config = json.loads(text)
    assert isinstance(config, dict)
    extra = config.pop("kv_connector_extra_config")
    return config | {f"kv_connector_extra_config.{key}": value for key, value in extra.items()}


@each_example
@each_role
def test_model_and_served_name(name: str, role: Role) -> None:
    model, served = EXAMPLES[name]
    process = rendered(name, role)
    assert process.argv[:3] == ("vllm", "serve", model)
    assert flag_table(process.argv)["--served-model-name"] == [served]


@each_example
@each_role
@pytest.mark.parametrize(("flag", "values"), BOTH_ROLES + OURS)
def test_flag_on_both_roles(name: str, role: Role, flag: str, values: list[str]) -> None:
    assert flag_table(rendered(name, role).argv)[flag] == values


@each_example
@pytest.mark.parametrize(("role", "flag", "values"), ONE_ROLE)
def test_flag_on_one_role(name: str, role: Role, flag: str, values: list[str]) -> None:
    assert flag_table(rendered(name, role).argv)[flag] == values


@each_example
def test_decode_keeps_its_prefix_cache(name: str) -> None:
    assert "--no-enable-prefix-caching" not in rendered(name, Role.DECODE).argv


@each_example
@each_role
@pytest.mark.parametrize(("key", "value"), TRANSFER)
def test_transfer_key_on_both_roles(name: str, role: Role, key: str, value: object) -> None:
    assert transfer_config(rendered(name, role))[key] == value


@each_example
@pytest.mark.parametrize(("role", "kv_role"), TRANSFER_ROLE)
def test_kv_role(name: str, role: Role, kv_role: str) -> None:
    assert transfer_config(rendered(name, role))["kv_role"] == kv_role


@each_example
@each_role
def test_differences_from_the_benchmark_in_the_transfer_config(name: str, role: Role) -> None:
    config = transfer_config(rendered(name, role))
    assert "engine_id" not in config
    assert config["kv_connector"] == "PDConnector"
    assert config["kv_connector_module_path"] == "pd_connector.connector"
    # Nothing is kept on decode, so prefill may find blocks overwritten and computes those again.
    assert config["kv_connector_extra_config.pd_retention"] == "Unpinned"
    assert config["kv_load_failure_policy"] == ("recompute" if role is Role.PREFILL else "fail")


@each_example
@each_role
@pytest.mark.parametrize(("variable", "value"), ENVIRONMENT + OUR_ENVIRONMENT)
def test_environment(name: str, role: Role, variable: str, value: str) -> None:
    assert rendered(name, role).env[variable] == value


@each_example
@each_role
def test_side_channel_is_the_engines_own_address(name: str, role: Role) -> None:
    assert rendered(name, role).env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == ADDRESS[role]


@each_example
@each_role
def test_nothing_is_rendered_that_no_table_names(name: str, role: Role) -> None:
    process = rendered(name, role)
    one_role = {flag for where, flag, _ in ONE_ROLE if where is role}
    named = {flag for flag, _ in BOTH_ROLES + OURS} | one_role
    assert set(flag_table(process.argv)) == named | {"--served-model-name", "--host", "--kv-transfer-config"}
    variables = {variable for variable, _ in ENVIRONMENT + OUR_ENVIRONMENT}
    assert set(process.env) == variables | {"VLLM_NIXL_SIDE_CHANNEL_HOST"}


@each_example
def test_only_the_switch_differs_between_the_two_legs(name: str) -> None:
    on = example(name)
    off = example(name)
    off["spec"]["kvTransfer"]["bidirectional"] = "Disabled"
    for role in Role:
        endpoint = EngineEndpoint("0.0.0.0", 8100, ADDRESS[role], 5600)
        with_reuse = render_engine(parse_deployment(on), role, endpoint)
        without = render_engine(parse_deployment(off), role, endpoint)
        assert with_reuse.env == without.env
        changed = [pair for pair in zip(with_reuse.argv, without.argv, strict=True) if pair[0] != pair[1]]
        [(switched_on, switched_off)] = (tuple(map(json.loads, pair)) for pair in changed)
        extra = switched_on["kv_connector_extra_config"]
        assert extra["bidirectional_kv_xfer"] is True
        # Read by nobody without reuse.
        del extra["kv_recompute_threshold"], extra["decoder_kv_blocks_ttl"], extra["pd_retention"]
        extra["bidirectional_kv_xfer"] = False
        assert switched_off == switched_on
