"""The processes of a local deployment: addresses agree with each other and stay on loopback."""

import json

import pytest

from pd_operator.core.parse import parse_deployment
from pdctl.core.commands import Part, Programs, plan_commands
from pdctl.core.placement import Machine, plan_seats
from pdctl.core.ports import PortWishes, plan_ports
from support.pddeployments import edited, example

PROGRAMS = Programs("/engine/python", "/router/python", ("/engine/vllm",))


def planned(raw, machine=None, host="127.0.0.1"):
    deployment = parse_deployment(raw)
    seats = plan_seats(deployment, machine or Machine(cores=(0, 1)))
    spec = deployment.spec
    ports = plan_ports(PortWishes(), spec.prefill.replicas, spec.decode.replicas, lambda port: True)
    return plan_commands(deployment, seats, ports, host, PROGRAMS)


def value_after(argv, flag):
    return argv[argv.index(flag) + 1]


def test_every_engine_listens_where_the_router_looks():
    commands, urls = planned(edited(example("cpu-tiny"), ("spec.decode.replicas", 2)))
    engines = [one for one in commands if one.part is not Part.ROUTER]
    router = commands[-1]
    assert [one.name for one in commands] == ["prefill-0", "decode-0", "decode-1", "router"]
    for engine in engines:
        assert engine.url == f"http://127.0.0.1:{value_after(engine.argv, '--port')}"
        assert value_after(engine.argv, "--host") == "127.0.0.1"
        assert engine.health == f"{engine.url}/health"
        assert engine.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1"
    sides = [engine.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] for engine in engines]
    assert len(set(sides)) == 3
    looked_at = [router.argv[at + 1] for at, word in enumerate(router.argv) if word in ("--prefill", "--decode")]
    assert looked_at == [engine.url for engine in engines] == [*urls.prefill, *urls.decode]
    assert router.health == f"{urls.admin}/readyz"


def test_interpreters_are_this_machines():
    commands, _ = planned(example("cpu-tiny"))
    assert [one.argv[0] for one in commands] == ["/engine/python", "/engine/python", "/router/python"]
    assert commands[-1].argv[1:3] == ("-m", "pd_router")
    machine = Machine(cores=(0,), gpus=tuple(map(str, range(16))), efa_devices=16)
    commands, _ = planned(example("qwen3-32b-p5en"), machine)
    assert commands[0].argv[:2] == ("/engine/vllm", "serve")
    assert commands[1].env["CUDA_VISIBLE_DEVICES"] == "8,9,10,11,12,13,14,15"


def test_cores_are_pinned_apart():
    commands, _ = planned(example("cpu-tiny"))
    assert [one.env.get("VLLM_CPU_OMP_THREADS_BIND") for one in commands] == ["0", "1", None]
    assert all("OMP_NUM_THREADS" not in one.env for one in commands)


def test_engines_that_share_cores_are_placed_by_the_kernel_with_one_thread_each():
    commands, _ = planned(example("cpu-tiny"), Machine(cores=(3,)))
    assert [one.env.get("VLLM_CPU_OMP_THREADS_BIND") for one in commands] == ["nobind", "nobind", None]
    assert [one.env.get("OMP_NUM_THREADS") for one in commands] == ["1", "1", None]


@pytest.mark.parametrize(
    ("host", "listen", "url"),
    [
        ("0.0.0.0", "0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("192.0.2.7", "192.0.2.7:8000", "http://192.0.2.7:8000"),
        ("::1", "[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_only_the_router_listens_elsewhere(host, listen, url):
    commands, urls = planned(example("cpu-tiny"), host=host)
    assert value_after(commands[-1].argv, "--listen") == listen
    assert value_after(commands[-1].argv, "--admin").startswith("127.0.0.1:")
    assert urls.router == url
    assert all(value_after(one.argv, "--host") == "127.0.0.1" for one in commands[:-1])


def test_the_engines_differ_in_role_and_nothing_of_the_transfer_else():
    commands, _ = planned(example("cpu-tiny"))
    configs = [json.loads(value_after(one.argv, "--kv-transfer-config")) for one in commands[:-1]]
    assert [config.pop("kv_role") for config in configs] == ["kv_producer", "kv_consumer"]
    policies = [config.pop("kv_load_failure_policy") for config in configs]
    assert policies == ["recompute", "fail"]
    assert configs[0] == configs[1]
    assert "engine_id" not in configs[0]
