"""Port plans: fixed ports are used or refused by name, others are searched, and none stands twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdctl.core.ports import (
    ADMIN_PORT,
    DECODE_PORT,
    MAX_PORT,
    PREFILL_PORT,
    ROUTER_PORT,
    SIDE_CHANNEL_PORT,
    EnginePorts,
    PortError,
    PortPlan,
    PortWishes,
    plan_ports,
)


def all_ports(plan: PortPlan) -> list[int]:
    engines = [port for one in (*plan.prefill, *plan.decode) for port in (one.http, one.side_channel)]
    return [plan.router, plan.admin, *engines]


def test_the_documented_ports_come_first():
    plan = plan_ports(PortWishes(), 1, 1, lambda port: True)
    assert plan == PortPlan(
        router=ROUTER_PORT,
        admin=ADMIN_PORT,
        prefill=(EnginePorts(PREFILL_PORT, SIDE_CHANNEL_PORT),),
        decode=(EnginePorts(DECODE_PORT, SIDE_CHANNEL_PORT + 1),),
    )


@given(
    prefill=st.integers(1, 5),
    decode=st.integers(1, 5),
    taken=st.sets(
        st.sampled_from([*range(5600, 5612), *range(8000, 8010), *range(8100, 8110), *range(8200, 8210), 9000])
    ),
    router=st.none() | st.sampled_from([8000, 8100, 8201, 5600]),
    admin=st.none() | st.sampled_from([8001, 8200, 9000]),
)
def test_no_port_stands_twice_or_belongs_to_somebody_else(prefill, decode, taken, router, admin):
    wishes = PortWishes(router, admin)
    try:
        plan = plan_ports(wishes, prefill, decode, lambda port: port not in taken)
    except PortError:
        assert {router, admin} & taken
        return
    ports = all_ports(plan)
    assert len(set(ports)) == len(ports) == 2 + 2 * (prefill + decode)
    assert not set(ports) & taken
    assert router in (None, plan.router)
    assert admin in (None, plan.admin)


def test_a_base_port_decides_all_engine_ports():
    plan = plan_ports(PortWishes(engine_base=7000), 2, 3, lambda port: True)
    assert plan.prefill == (EnginePorts(7000, 7200), EnginePorts(7001, 7201))
    assert plan.decode == (EnginePorts(7100, 7202), EnginePorts(7101, 7203), EnginePorts(7102, 7204))


@pytest.mark.parametrize(
    ("wishes", "taken", "problems"),
    [
        (PortWishes(router=8000), {8000}, ["port 8000 for the router is taken"]),
        (PortWishes(router=1, admin=2), {1, 2}, ["port 1 for the router is", "port 2 for the router's admin is"]),
        (PortWishes(router=9, admin=9), set(), ["port 9 is asked for twice: router and router's admin"]),
        (PortWishes(engine_base=7000), {7100}, ["port 7100 for the decode-0 is taken"]),
        (PortWishes(engine_base=7000), {7200}, ["port 7200 for the prefill-0's side channel is taken"]),
        (PortWishes(router=0), set(), ["port 0 for the router is not between 1 and 65535"]),
        (PortWishes(engine_base=65500), set(), ["port 65600 for the decode-0 is not between"] * 1),
    ],
)
def test_every_port_that_cannot_be_had_is_named(wishes, taken, problems):
    with pytest.raises(PortError) as caught:
        plan_ports(wishes, 1, 1, lambda port: port not in taken)
    for problem in problems:
        assert any(line.startswith(problem) for line in caught.value.problems)


def test_a_full_machine_is_an_error_not_an_endless_search():
    asked: list[int] = []

    def claim(port: int) -> bool:
        asked.append(port)
        return False

    with pytest.raises(PortError, match="no free port from 8100"):
        plan_ports(PortWishes(), 1, 1, claim)
    assert len(asked) == len(set(asked)) <= MAX_PORT


def test_nothing_is_searched_while_a_wish_is_refused():
    asked: list[int] = []

    def claim(port: int) -> bool:
        asked.append(port)
        return port != 8000

    with pytest.raises(PortError):
        plan_ports(PortWishes(router=8000), 1, 1, claim)
    assert asked == [8000]
