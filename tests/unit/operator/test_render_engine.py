"""The renderer beyond the reference setting: profiles, options, precedence, and what never differs by role."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_operator.core.choices import Role
from pd_operator.core.render_engine import EngineEndpoint, EngineProcess, kv_transfer_config, render_engine
from support.pddeployments import deployment, example, flag_table

HERE = EngineEndpoint("127.0.0.1", 8100, "127.0.0.1", 5600, cpu_cores="0")
CUSTOM: list[tuple[str, Any]] = [("spec.nodeProfile", "Custom"), ("spec.customProfile", {})]


def rendered(*edits: tuple[str, Any], role: Role = Role.PREFILL) -> EngineProcess:
    return render_engine(deployment(*edits), role, HERE)


def cpu(role: Role) -> EngineProcess:
    return render_engine(deployment(base=example("cpu-tiny")), role, HERE)


@pytest.mark.parametrize("role", list(Role))
def test_cpu_profile_starts_the_module_because_its_wheel_has_no_command(role: Role) -> None:
    assert cpu(role).argv[:5] == (
        "python",
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        "../build/tiny-model",
    )


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--served-model-name", ["tiny"]),
        ("--dtype", ["bfloat16"]),
        ("--max-model-len", ["16384"]),
        ("--max-num-seqs", ["8"]),
        ("--tensor-parallel-size", ["1"]),
        ("--enforce-eager", []),
        ("--host", ["127.0.0.1"]),
        ("--port", ["8100"]),
        ("--shutdown-timeout", ["5"]),
    ],
)
def test_cpu_profile_flags(role: Role, flag: str, values: list[str]) -> None:
    assert flag_table(cpu(role).argv)[flag] == values


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("UCX_TLS", "tcp,shm,self"),
        ("VLLM_CPU_KVCACHE_SPACE", "2"),
        ("VLLM_CPU_OMP_THREADS_BIND", "0"),
        ("HF_HUB_OFFLINE", "1"),
        ("NIXL_LOG_LEVEL", "INFO"),
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1"),
        ("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600"),
    ],
)
def test_cpu_profile_environment(variable: str, value: str) -> None:
    assert cpu(Role.PREFILL).env[variable] == value


def test_cpu_profile_moves_kv_in_host_memory_over_ucx() -> None:
    config = kv_transfer_config(deployment(base=example("cpu-tiny")), Role.PREFILL)
    assert config["kv_buffer_device"] == "cpu"
    assert config["kv_connector_extra_config"]["backends"] == ["UCX"]
    assert config["kv_connector_extra_config"]["decoder_kv_blocks_ttl"] == 120


def test_cpu_example_turns_the_prefix_cache_off_on_prefill_only() -> None:
    assert "--no-enable-prefix-caching" in cpu(Role.PREFILL).argv
    assert "--no-enable-prefix-caching" not in cpu(Role.DECODE).argv


def test_cores_are_pinned_on_cpu_engines_only() -> None:
    assert "VLLM_CPU_OMP_THREADS_BIND" not in rendered().env


@pytest.mark.parametrize(
    ("path", "value", "flag", "values"),
    [
        ("spec.model.revision", "abc123", "--revision", ["abc123"]),
        ("spec.engine.blockSize", 128, "--block-size", ["128"]),
        ("spec.engine.gpuMemoryUtilizationPercent", 90, "--gpu-memory-utilization", ["0.90"]),
        ("spec.engine.gpuMemoryUtilizationPercent", 7, "--gpu-memory-utilization", ["0.07"]),
        ("spec.engine.gpuMemoryUtilizationPercent", 100, "--gpu-memory-utilization", ["1.00"]),
        ("spec.engine.shutdownTimeoutSeconds", 0, "--shutdown-timeout", ["0"]),
        ("spec.engine.maxNumSeqs", 9, "--max-num-seqs", ["9"]),
        ("spec.prefill.maxNumSeqs", 3, "--max-num-seqs", ["3"]),
        ("spec.model.servedName", "chat", "--served-model-name", ["chat"]),
    ],
)
def test_field_becomes_flag(path: str, value: Any, flag: str, values: list[str]) -> None:
    assert flag_table(rendered((path, value)).argv)[flag] == values


@pytest.mark.parametrize("flag", ["--revision", "--block-size", "--gpu-memory-utilization", "--max-model-len"])
def test_absent_field_leaves_the_flag_out(flag: str) -> None:
    assert flag not in rendered().argv


def test_a_role_limit_does_not_touch_the_other_role() -> None:
    assert flag_table(rendered(("spec.prefill.maxNumSeqs", 3), role=Role.DECODE).argv)["--max-num-seqs"] == ["256"]


@pytest.mark.parametrize(
    ("name", "served"),
    [
        ("Qwen/Qwen3-32B", "Qwen/Qwen3-32B"),
        ("/models/qwen", "qwen"),
        ("./build/tiny/", "tiny"),
        ("../tiny", "tiny"),
    ],
)
def test_served_name_stands_in_for_the_model(name: str, served: str) -> None:
    assert flag_table(rendered(("spec.model.name", name)).argv)["--served-model-name"] == [served]


def test_resolving_the_folder_keeps_the_served_name() -> None:
    resolved = deployment(("spec.model.name", "./tiny")).with_model_name("/srv/elsewhere/v2")
    argv = render_engine(resolved, Role.PREFILL, HERE).argv
    assert argv[2] == "/srv/elsewhere/v2"
    assert flag_table(argv)["--served-model-name"] == ["tiny"]


def test_extra_arguments_come_last_with_the_role_after_the_engine() -> None:
    process = rendered(
        ("spec.engine.extraArgs", ["--max-num-batched-tokens", "8192"]), ("spec.prefill.extraArgs", ["--enforce-eager"])
    )
    assert process.argv[-3:] == ("--max-num-batched-tokens", "8192", "--enforce-eager")


def test_environment_precedence_is_profile_then_engine_then_role() -> None:
    one, two = {"name": "A", "value": "engine"}, {"name": "B", "value": "engine"}
    process = rendered(
        ("spec.engine.env", [one, two, {"name": "NIXL_LOG_LEVEL", "value": "DEBUG"}]),
        ("spec.prefill.env", [{"name": "B", "value": "role"}]),
    )
    assert (process.env["A"], process.env["B"], process.env["NIXL_LOG_LEVEL"]) == ("engine", "role", "DEBUG")


def test_a_secret_is_not_rendered_as_a_value() -> None:
    secret = {"name": "HF_TOKEN", "secretKeyRef": {"name": "hub", "key": "token"}}
    process = rendered(("spec.engine.env", [secret]))
    assert "HF_TOKEN" not in process.env


def test_a_roles_secret_takes_the_place_of_a_plain_value() -> None:
    secret = {"name": "A", "secretKeyRef": {"name": "s", "key": "k"}}
    edits = (("spec.engine.env", [{"name": "A", "value": "plain"}]), ("spec.prefill.env", [secret]))
    assert "A" not in rendered(*edits).env
    assert rendered(*edits, role=Role.DECODE).env["A"] == "plain"


@pytest.mark.parametrize(
    ("edit", "offline"),
    [
        (("spec.model.name", "Qwen/Qwen3-32B"), False),
        (("spec.model.source.download", "Forbidden"), True),
        (("spec.model.name", "/models/qwen"), True),
    ],
)
def test_hub_is_off_when_it_is_forbidden_or_useless(edit: tuple[str, Any], offline: bool) -> None:
    assert ("HF_HUB_OFFLINE" in rendered(edit).env) is offline


def test_pod_address_passes_through_as_text() -> None:
    endpoint = EngineEndpoint("0.0.0.0", 8000, "$(POD_IP)", 5600)
    assert render_engine(deployment(), Role.DECODE, endpoint).env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"


def test_stock_connector_has_no_module_path() -> None:
    config = kv_transfer_config(deployment(("spec.kvTransfer.connector", "Stock")), Role.DECODE)
    assert config["kv_connector"] == "NixlConnector"
    assert "kv_connector_module_path" not in config


@pytest.mark.parametrize(
    ("path", "value", "key", "expected"),
    [
        ("spec.kvTransfer.recomputeThresholdTokens", 0, "kv_recompute_threshold", 0),
        ("spec.kvTransfer.decoderBlocksTTLSeconds", 900, "decoder_kv_blocks_ttl", 900),
        ("spec.kvTransfer.leaseDurationSeconds", 60, "kv_lease_duration", 60),
        ("spec.kvTransfer.bidirectional", "Disabled", "bidirectional_kv_xfer", False),
        ("spec.kvTransfer.extraConfig", [{"name": "num_threads", "value": "8"}], "num_threads", 8),
    ],
)
def test_transfer_field_becomes_extra_config(path: str, value: Any, key: str, expected: Any) -> None:
    for role in Role:
        assert kv_transfer_config(deployment((path, value)), role)["kv_connector_extra_config"][key] == expected


RETENTION_KEYS = ("pd_retention", "pd_lease_seconds", "pd_lease_share")
LEASED = {"retention": "Leased", "lease": {"seconds": 15, "sharePercent": 29}}


@pytest.mark.parametrize(
    ("transfer", "prefill", "decode"),
    [
        ({}, ["Unpinned"], ["Unpinned"]),
        ({"retention": "Pinned"}, [], []),
        ({"connector": "Stock"}, [], []),
        ({"retention": "Leased"}, ["Unpinned"], ["Leased", 60, 0.5]),
        (LEASED, ["Unpinned"], ["Leased", 15, 0.29]),
        ({**LEASED, "bidirectional": "Disabled"}, [], []),
    ],
)
def test_what_each_role_is_told_of_retention(
    transfer: dict[str, Any], prefill: list[object], decode: list[object]
) -> None:
    value = deployment(("spec.kvTransfer", transfer))
    for role, expected in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        config = kv_transfer_config(value, role)
        told = config["kv_connector_extra_config"]
        assert [told[key] for key in RETENTION_KEYS if key in told] == expected
    recomputes = transfer.get("retention") != "Pinned" and "connector" not in transfer
    policy = kv_transfer_config(value, Role.PREFILL)["kv_load_failure_policy"]
    assert policy == ("recompute" if recomputes else "fail")


@pytest.mark.parametrize("transfer", [{}, {"retention": "Pinned"}, LEASED, {**LEASED, "bidirectional": "Disabled"}])
def test_only_a_decode_engine_with_leases_has_their_endpoint(transfer: dict[str, Any]) -> None:
    for role in Role:
        argv = rendered(("spec.kvTransfer", transfer), role=role).argv
        added = [word for flag, word in pairwise(argv) if flag == "--middleware"]
        leased = role is Role.DECODE and transfer == LEASED
        assert added == (["pd_connector.shell.lease_api.LeaseApi"] if leased else [])


def test_load_failure_policy_is_beside_the_extra_config_where_vllm_reads_it() -> None:
    config = kv_transfer_config(deployment(("spec.kvTransfer.loadFailurePolicy", "Recompute")), Role.PREFILL)
    assert config["kv_load_failure_policy"] == "recompute"
    assert "kv_load_failure_policy" not in config["kv_connector_extra_config"]


@pytest.mark.parametrize(
    ("custom", "device", "backend", "launcher"),
    [
        ({}, "cuda", "UCX", "vllm"),
        ({"defaultBackend": "LIBFABRIC"}, "cuda", "LIBFABRIC", "vllm"),
        ({"device": "CPU"}, "cpu", "UCX", "python"),
    ],
)
def test_custom_profile(custom: dict[str, Any], device: str, backend: str, launcher: str) -> None:
    process = rendered(("spec.nodeProfile", "Custom"), ("spec.customProfile", custom))
    config = json.loads(flag_table(process.argv)["--kv-transfer-config"][0])
    assert config["kv_buffer_device"] == device
    assert config["kv_connector_extra_config"]["backends"] == [backend]
    assert process.argv[0] == launcher
    assert process.env.get("FI_PROVIDER") == ("efa" if backend == "LIBFABRIC" else None)


def test_a_custom_profile_may_choose_a_provider_on_purpose() -> None:
    process = rendered(
        *CUSTOM,
        ("spec.kvTransfer.backend", "LIBFABRIC"),
        ("spec.engine.env", [{"name": "FI_PROVIDER", "value": "tcp"}]),
    )
    assert process.env["FI_PROVIDER"] == "tcp"


seconds = st.integers(20, 86400)


@given(
    profile=st.sampled_from(["P5enEFA", "CPU"]),
    bidirectional=st.sampled_from(["Enabled", "Disabled"]),
    connector=st.sampled_from(["Verified", "Stock"]),
    ttl=seconds,
    threshold=st.integers(0, 1_000_000),
    prefill_cache=st.booleans(),
)
@settings(deadline=None)
def test_roles_agree_on_everything_but_the_kv_role(
    profile: str, bidirectional: str, connector: str, ttl: int, threshold: int, prefill_cache: bool
) -> None:
    spec = deployment(
        ("spec.nodeProfile", profile),
        ("spec.prefill.prefixCaching", prefill_cache),
        (
            "spec.kvTransfer",
            {
                "bidirectional": bidirectional,
                "connector": connector,
                "decoderBlocksTTLSeconds": ttl,
                "recomputeThresholdTokens": threshold,
            },
        ),
    )
    prefill, decode = (kv_transfer_config(spec, role) for role in Role)
    assert (prefill.pop("kv_role"), decode.pop("kv_role")) == ("kv_producer", "kv_consumer")
    policies = prefill.pop("kv_load_failure_policy"), decode.pop("kv_load_failure_policy")
    assert policies == ("fail" if connector == "Stock" else "recompute", "fail")
    assert prefill == decode
    assert "engine_id" not in prefill
