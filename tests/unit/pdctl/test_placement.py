"""Cores and accelerators: how they are shared out, and which machines are refused with which words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.core.parse import parse_deployment
from pdctl.core.placement import Machine, PlacementError, plan_seats, split_cores
from support.pddeployments import edited, example, smallest


@given(cores=st.lists(st.integers(0, 500), min_size=1, max_size=64, unique=True), engines=st.integers(1, 8))
def test_cores_are_all_used_and_nothing_is_bound_when_there_are_too_few(cores, engines):
    shares = split_cores(cores, engines)
    assert len(shares) == engines
    if len(cores) < engines:
        assert set(shares) == {"nobind"}
        return
    lists = [[int(core) for core in share.split(",")] for share in shares]
    assert sorted(core for share in lists for core in share) == sorted(cores)
    assert max(map(len, lists)) - min(map(len, lists)) <= 1


def test_cpu_engines_get_disjoint_cores():
    deployment = parse_deployment(edited(example("cpu-tiny"), ("spec.decode.replicas", 2)))
    seats = plan_seats(deployment, Machine(cores=(0, 1, 2, 3, 8)))
    assert [(seat.role.value, seat.index, seat.cores) for seat in seats] == [
        ("prefill", 0, "0,1"),
        ("decode", 0, "2,3"),
        ("decode", 1, "8"),
    ]


def test_gpus_go_to_engines_by_their_size():
    raw = edited(
        smallest(),
        ("spec.nodeProfile", "Custom"),
        ("spec.customProfile", {"device": "CUDA", "acceleratorsPerNode": 8}),
        ("spec.prefill.tensorParallelSize", 2),
        ("spec.decode.replicas", 2),
        # Roles of different size can't hand their KV to each other unless both agree.
        ("spec.decode.tensorParallelSize", 2),
    )
    seats = plan_seats(parse_deployment(raw), Machine(cores=(0,), gpus=("0", "1", "2", "3", "4", "5", "6")))
    assert [seat.gpus for seat in seats] == [("0", "1"), ("2", "3"), ("4", "5")]
    assert {seat.cores for seat in seats} == {None}


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (Machine(cores=(0, 1)), ["16 NVIDIA GPUs (this machine shows 0) and EFA devices", "nodeProfile=CPU"]),
        (Machine(cores=(0,), gpus=tuple("01234567")), ["16 NVIDIA GPUs (this machine shows 8)"]),
        (Machine(cores=(0,), gpus=tuple(map(str, range(16)))), ["needs EFA devices"]),
    ],
)
def test_the_efa_profile_is_refused_where_it_would_run_on_something_else(machine, words):
    with pytest.raises(PlacementError) as caught:
        plan_seats(parse_deployment(example("qwen3-32b-p5en")), machine)
    for word in words:
        assert word in str(caught.value)


def test_the_efa_profile_runs_where_everything_is_there():
    machine = Machine(cores=(0,), gpus=tuple(map(str, range(16))), efa_devices=16)
    seats = plan_seats(parse_deployment(example("qwen3-32b-p5en")), machine)
    assert [len(seat.gpus) for seat in seats] == [8, 8]


def test_a_role_without_engines_is_refused():
    raw = edited(example("cpu-tiny"), ("spec.decode.replicas", 0))
    with pytest.raises(PlacementError, match=r"spec\.decode\.replicas is 0"):
        plan_seats(parse_deployment(raw), Machine(cores=(0, 1)))
