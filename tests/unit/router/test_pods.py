"""Pods to engines, as tables, and what must hold for any sequence of events."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_router.core.engine_pod import EnginePod, UnusablePod, read_pod
from pd_router.core.pods import REMEMBERED_DEAD, Change, Changed, Joined, Left, PodSet, Refused, Restarted
from pd_wire import names
from support.pods import make_pod


def read(**fields: Any) -> EnginePod | UnusablePod | None:
    return read_pod(make_pod("d-0", uid="u", **fields), "tiny")


def shown(changes: Iterable[Change]) -> list[str]:
    """Changes as short texts."""
    texts = []
    for change in changes:
        match change:
            case Left(name) | Restarted(name):
                texts.append(f"{type(change).__name__} {name}")
            case Joined(pod):
                texts.append(f"Joined {pod.name} {pod.host}:{pod.port}")
            case Changed(pod):
                texts.append(f"Changed {pod.name}{' ready' * pod.ready}{' draining' * pod.draining}")
            case Refused(pod):
                texts.append(f"Refused {pod.name}: {pod.why}")
    return texts


# -- one pod -------------------------------------------------------------------------------------------
def test_an_engine() -> None:
    pod = read(role="prefill", generation="7f3a", ip="10.1.2.3", ips=["fd00::3"], port=8123, start=4)
    assert isinstance(pod, EnginePod)
    assert (pod.role, pod.generation, pod.host, pod.port) == ("prefill", "7f3a", "10.1.2.3", 8123)
    assert pod.hosts == {"10.1.2.3", "fd00::3"}
    assert pod.process == "containerd://4@2026-11-30T10:04:00Z"
    assert (pod.ready, pod.draining) == (True, False)


@pytest.mark.parametrize(
    ("fields", "ready", "draining", "runs"),
    [
        ({"ready": False}, False, False, True),
        ({"deleting": True}, True, True, True),
        ({"deleting": True, "ready": False}, False, True, True),
        ({"start": None, "ready": False}, False, False, False),
        ({"phase": "Unknown"}, True, False, True),
    ],
)
def test_states(fields: dict[str, Any], ready: bool, draining: bool, runs: bool) -> None:
    pod = read(**fields)
    assert isinstance(pod, EnginePod)
    assert (pod.ready, pod.draining, bool(pod.process)) == (ready, draining, runs)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"ip": None}, id="no address yet"),
        pytest.param({"ip": ""}, id="empty address"),
        pytest.param({"phase": "Failed"}, id="failed"),
        pytest.param({"phase": "Succeeded"}, id="ended"),
        pytest.param({"deployment": "other"}, id="another deployment"),
        pytest.param({"role": "router"}, id="a router"),
        pytest.param({"role": "Prefill"}, id="a role that is none"),
    ],
)
def test_no_engine_of_ours_or_none_now(fields: dict[str, Any]) -> None:
    assert read(**fields) is None


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"generation": None}, names.LABEL_GENERATION),
        ({"generation": ""}, names.LABEL_GENERATION),
        ({"generation": "x" * 64}, names.LABEL_GENERATION),
        ({"generation": 'a"} 1\nup{x="'}, names.LABEL_GENERATION),
        ({"generation": 7}, names.LABEL_GENERATION),
        ({"container": "vllm"}, "no container named engine"),
        ({"port_name": "web"}, "no port named http"),
        ({"port": 0}, "no TCP port"),
        ({"port": 70000}, "no TCP port"),
        ({"port": "8000"}, "no TCP port"),
        ({"port": True}, "no TCP port"),
        ({"ip": "d-0.svc"}, "no IP address"),
        ({"ip": "0.0.0.0"}, "0.0.0.0"),
        ({"ip": "169.254.169.254"}, "169.254.169.254"),
        ({"ip": "fe80::1"}, "fe80::1"),
        ({"ip": "10.0.0.1", "ips": ["224.0.0.1"]}, "224.0.0.1"),
    ],
)
def test_pods_that_cannot_be_engines(fields: dict[str, Any], word: str) -> None:
    pod = read(**fields)
    assert isinstance(pod, UnusablePod)
    assert word in pod.why.replace("is not a TCP port", "is no TCP port")


@pytest.mark.parametrize("ip", ["10.0.0.1", "fd00::1", "2001:db8::2", "127.0.0.1", "::1", "100.64.3.4"])
def test_addresses_of_engines(ip: str) -> None:
    pod = read(ip=ip)
    assert isinstance(pod, EnginePod)
    assert pod.host == ip


def test_a_udp_port_is_none() -> None:
    raw = make_pod("d-0")
    raw["spec"]["containers"][1]["ports"][1]["protocol"] = "UDP"
    assert isinstance(read_pod(raw, "tiny"), UnusablePod)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.data())
def test_no_shape_of_a_pod_breaks_it(data: st.DataObject) -> None:
    raw: Any = make_pod("d-0")
    place, key = raw, data.draw(st.sampled_from(sorted(raw)))
    while isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
    place[key] = data.draw(JSON)
    pods = PodSet("tiny")
    pods.replace([raw])
    pods.apply("MODIFIED", raw)
    assert len(pods) <= 1


# -- events --------------------------------------------------------------------------------------------
D0 = {"uid": "d0", "ip": "10.0.0.1"}

EVENTS: list[tuple[str, list[tuple[str, dict[str, Any]]], list[str]]] = [
    ("joins", [("ADDED", D0)], ["Joined d-0 10.0.0.1:8000"]),
    ("doubled", [("ADDED", D0), ("ADDED", D0), ("MODIFIED", D0)], ["Joined d-0 10.0.0.1:8000"]),
    (
        "starts, becomes ready, drains, goes",
        [
            ("ADDED", {**D0, "ip": None, "start": None, "ready": False}),
            ("MODIFIED", {**D0, "start": None, "ready": False}),
            ("MODIFIED", {**D0, "ready": False}),
            ("MODIFIED", D0),
            ("MODIFIED", {**D0, "deleting": True}),
            ("MODIFIED", {**D0, "deleting": True, "ready": False}),
            ("DELETED", {**D0, "deleting": True, "ready": False}),
        ],
        [
            "Joined d-0 10.0.0.1:8000",
            "Changed d-0 ready",
            "Changed d-0 ready draining",
            "Changed d-0 draining",
            "Left d-0",
        ],
    ),
    (
        "its container starts again",
        [("ADDED", D0), ("MODIFIED", {**D0, "start": 2})],
        ["Joined d-0 10.0.0.1:8000", "Restarted d-0"],
    ),
    (
        "its container ends, then starts again",
        [("ADDED", D0), ("MODIFIED", {**D0, "start": None, "ready": False}), ("MODIFIED", {**D0, "start": 2})],
        ["Joined d-0 10.0.0.1:8000", "Restarted d-0", "Changed d-0", "Changed d-0 ready"],
    ),
    (
        "a start that was not known while it answered already",
        [("ADDED", {**D0, "start": None}), ("MODIFIED", D0)],
        ["Joined d-0 10.0.0.1:8000", "Restarted d-0"],
    ),
    (
        "another pod of its name and address",
        [("ADDED", D0), ("DELETED", D0), ("ADDED", {**D0, "uid": "new", "created": "2026-11-30T10:09:00Z"})],
        ["Joined d-0 10.0.0.1:8000", "Left d-0", "Joined d-0 10.0.0.1:8000"],
    ),
    (
        "another pod of its name, its end was lost",
        [("ADDED", D0), ("ADDED", {**D0, "uid": "new", "created": "2026-11-30T10:09:00Z"})],
        [
            "Joined d-0 10.0.0.1:8000",
            "Left d-0",
            "Joined d-0 10.0.0.1:8000",
            "Refused d-0: its name belongs to the newer pod d-0",
        ],
    ),
    (
        "loses its address",
        [("ADDED", D0), ("MODIFIED", {**D0, "ip": None})],
        ["Joined d-0 10.0.0.1:8000", "Left d-0"],
    ),
    ("fails", [("ADDED", D0), ("MODIFIED", {**D0, "phase": "Failed"})], ["Joined d-0 10.0.0.1:8000", "Left d-0"]),
    (
        "another address",
        [("ADDED", D0), ("MODIFIED", {**D0, "ip": "10.0.0.9"})],
        ["Joined d-0 10.0.0.1:8000", "Left d-0", "Joined d-0 10.0.0.9:8000"],
    ),
    (
        "another generation",
        [("ADDED", D0), ("MODIFIED", {**D0, "generation": "g2"})],
        ["Joined d-0 10.0.0.1:8000", "Left d-0", "Joined d-0 10.0.0.1:8000"],
    ),
    (
        "another role",
        [("ADDED", D0), ("MODIFIED", {**D0, "role": "prefill"})],
        ["Joined d-0 10.0.0.1:8000", "Left d-0", "Joined d-0 10.0.0.1:8000"],
    ),
    (
        "is labelled away and back",
        [("ADDED", D0), ("DELETED", {**D0, "deployment": "x"}), ("ADDED", D0)],
        ["Joined d-0 10.0.0.1:8000", "Left d-0", "Joined d-0 10.0.0.1:8000"],
    ),
    (
        "is mended",
        [("ADDED", {**D0, "port_name": "web"}), ("MODIFIED", {**D0, "port_name": "web"}), ("MODIFIED", D0)],
        ["Refused d-0: its container engine has no port named http", "Joined d-0 10.0.0.1:8000"],
    ),
    (
        "is broken by hand",
        [("ADDED", D0), ("MODIFIED", {**D0, "generation": None})],
        [
            "Joined d-0 10.0.0.1:8000",
            "Left d-0",
            "Refused d-0: its label pdserving.dev/generation is missing or no label value",
        ],
    ),
    ("was never there", [("DELETED", D0)], []),
    ("a kind that is none", [("SOMETHING", {**D0, "uid": ""})], []),
]


@pytest.mark.parametrize(("events", "changes"), [row[1:] for row in EVENTS], ids=[row[0] for row in EVENTS])
def test_events(events: list[tuple[str, dict[str, Any]]], changes: list[str]) -> None:
    pods = PodSet("tiny")
    told: list[Change] = []
    for version, (kind, fields) in enumerate(events, 1):
        told += pods.apply(kind, make_pod("d-0", version=version, **fields))
    assert shown(told) == changes


def test_late_events_change_nothing() -> None:
    pods = PodSet("tiny")
    pods.replace([make_pod("d-0", uid="d0", version=5, ready=True)])
    assert pods.apply("MODIFIED", make_pod("d-0", uid="d0", version=4, ready=False)) == []
    assert pods.apply("DELETED", make_pod("d-0", uid="d0", version=3)) == []
    assert shown(pods.apply("DELETED", make_pod("d-0", uid="d0", version=9))) == ["Left d-0"]
    assert pods.apply("MODIFIED", make_pod("d-0", uid="d0", version=8)) == []
    assert pods.apply("ADDED", make_pod("d-0", uid="d0", version=9)) == []
    assert shown(pods.apply("ADDED", make_pod("d-0", uid="d0", version=10))) == ["Joined d-0 10.0.0.1:8000"]


def test_the_dead_are_remembered_within_a_bound() -> None:
    pods = PodSet("tiny")
    for number in range(REMEMBERED_DEAD + 1):
        pods.apply("DELETED", make_pod(f"d-{number}", uid=f"u{number}", version=number + 1))
    assert pods.apply("ADDED", make_pod("d-1", uid="u1", version=1)) == []
    assert shown(pods.apply("ADDED", make_pod("d-0", uid="u0", version=1))) == ["Joined d-0 10.0.0.1:8000"]


def test_a_list_is_the_truth_even_when_it_is_older() -> None:
    # A cluster that was restored from a backup counts from an earlier version.
    pods = PodSet("tiny")
    pods.replace([make_pod("d-0", uid="a", version=900), make_pod("d-1", uid="b", ip="10.0.0.2", version=901)])
    changes = pods.replace([make_pod("d-0", uid="a", version=7, ready=False)])
    assert shown(changes) == ["Left d-1", "Changed d-0"]
    assert shown(pods.apply("MODIFIED", make_pod("d-0", uid="a", version=8))) == ["Changed d-0 ready"]


def test_purges_come_before_anything_joins() -> None:
    pods = PodSet("tiny")
    pods.replace([make_pod("d-0", uid="a", ip="10.0.0.1"), make_pod("d-1", uid="b", ip="10.0.0.2")])
    changes = pods.replace(
        [make_pod("d-2", uid="c", ip="10.0.0.1"), make_pod("d-1", uid="b", ip="10.0.0.2", start=2, ready=False)]
    )
    assert shown(changes) == ["Left d-0", "Restarted d-1", "Changed d-1", "Joined d-2 10.0.0.1:8000"]


def test_an_address_belongs_to_the_newest_pod() -> None:
    old = make_pod("d-0", uid="old", created="2026-11-30T10:00:00Z", version=1)
    new = make_pod("d-1", uid="new", created="2026-11-30T10:00:05Z", version=2)
    for order in ([old, new], [new, old]):
        pods = PodSet("tiny")
        pods.replace(order)
        assert set(pods.engines()) == {"d-1"}
        assert [pod.why for pod in pods.unusable()] == ["its address 10.0.0.1:8000 belongs to the newer pod d-1"]
        gone = make_pod("d-1", uid="new", version=3)
        assert shown(pods.apply("DELETED", gone)) == ["Left d-1", "Joined d-0 10.0.0.1:8000"]


def test_two_ports_of_one_address_are_two_engines() -> None:
    pods = PodSet("tiny")
    pods.replace([make_pod("d-0", port=8100), make_pod("d-1", port=8200)])
    assert set(pods.engines()) == {"d-0", "d-1"}


# -- any sequence of events ----------------------------------------------------------------------------
PODS = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["d-0", "d-1", "p-0"]),
        "uid": st.sampled_from("abcd"),
        "ip": st.sampled_from([None, "10.0.0.1", "10.0.0.2"]),
        "generation": st.sampled_from(["g1", "g2", None]),
        "start": st.sampled_from([None, 1, 2]),
        "ready": st.booleans(),
        "deleting": st.booleans(),
        "phase": st.sampled_from(["Running", "Failed"]),
        "role": st.sampled_from(["prefill", "decode"]),
    }
)
KINDS = st.sampled_from(["ADDED", "MODIFIED", "DELETED"])


def pod_of(fields: Mapping[str, Any], version: int) -> dict[str, Any]:
    """A pod of these fields; it is created in the order of uids."""
    created = f"2026-11-30T10:00:0{ord(fields['uid']) - ord('a')}Z"
    return make_pod(version=version, created=created, **fields)


class FakeFleet:
    """What discovery does with changes, and what must hold while it does."""

    def __init__(self) -> None:
        self.members: dict[str, EnginePod] = {}
        self.purges: dict[str, int] = {}

    def apply(self, changes: Iterable[Change]) -> None:
        for change in changes:
            match change:
                case Left(name):
                    del self.members[name]
                    self.purges[name] = self.purges.get(name, 0) + 1
                case Restarted(name):
                    assert name in self.members
                    self.purges[name] = self.purges.get(name, 0) + 1
                case Changed(pod):
                    assert self.members[pod.name].is_same_engine(pod)
                case Joined(pod):
                    assert pod.name not in self.members
                    taken = {(other.host, other.port) for other in self.members.values()}
                    assert (pod.host, pod.port) not in taken
                    self.members[pod.name] = pod


def states(pods: PodSet) -> dict[str, EnginePod]:
    return pods.engines()


@given(st.lists(st.tuples(KINDS, PODS), max_size=20))
def test_events_and_a_list_of_their_outcome_agree(events: list[tuple[str, dict[str, Any]]]) -> None:
    watched, fleet = PodSet("tiny"), FakeFleet()
    world: dict[str, dict[str, Any]] = {}
    for version, (kind, fields) in enumerate(events, 1):
        raw = pod_of(fields, version)
        if kind == "DELETED":
            world.pop(fields["uid"], None)
        else:
            world[fields["uid"]] = raw
        before, purges = states(watched), dict(fleet.purges)
        fleet.apply(watched.apply(kind, raw))
        _assert_purged(before, states(watched), purges, fleet.purges)
        listed = PodSet("tiny")
        listed.replace(world.values())
        assert states(watched) == states(listed)
        assert set(fleet.members) == set(states(watched))
    fleet.apply(watched.replace(world.values()))
    assert set(fleet.members) == set(states(watched))


def _assert_purged(
    before: Mapping[str, EnginePod],
    after: Mapping[str, EnginePod],
    purges: Mapping[str, int],
    purged: Mapping[str, int],
) -> None:
    """Whoever's memory may be another one now was purged."""
    for name, pod in before.items():
        now = after.get(name)
        if now is None or not now.is_same_engine(pod) or (pod.process and pod.process != now.process):
            assert purged.get(name, 0) > purges.get(name, 0)


@given(st.lists(st.tuples(KINDS, PODS), max_size=12), st.randoms(use_true_random=False))
def test_the_order_and_number_of_events_do_not_matter(
    events: list[tuple[str, dict[str, Any]]], shuffle: random.Random
) -> None:
    lines = [(kind, pod_of(fields, version)) for version, (kind, fields) in enumerate(events, 1)]
    straight, jumbled = PodSet("tiny"), PodSet("tiny")
    for kind, raw in lines:
        straight.apply(kind, raw)
    mixed = lines * 2
    shuffle.shuffle(mixed)
    fleet = FakeFleet()
    for kind, raw in mixed:
        fleet.apply(jumbled.apply(kind, raw))
    assert states(jumbled) == states(straight)
    assert set(fleet.members) == set(states(straight))


@given(st.lists(PODS, max_size=8), st.lists(PODS, max_size=8))
def test_from_any_list_to_any_list(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    pods, fleet = PodSet("tiny"), FakeFleet()
    for listed in (first, second):
        before, purges = states(pods), dict(fleet.purges)
        unique = {fields["uid"]: pod_of(fields, number) for number, fields in enumerate(listed, 1)}
        fleet.apply(pods.replace(unique.values()))
        _assert_purged(before, states(pods), purges, fleet.purges)
        assert set(fleet.members) == set(states(pods))
    assert pods.replace(list(unique.values())) == []


def test_work_per_event_does_not_grow_with_the_pods() -> None:
    looked: list[int] = []

    class Counting(PodSet):
        def _effective(self, uid: str) -> EnginePod | UnusablePod | None:
            looked.append(1)
            return super()._effective(uid)

    pods = Counting("tiny")
    crowd = [
        make_pod(f"d-{number}", uid=f"u{number}", ip=f"10.0.{number // 200}.{number % 200 + 1}", version=1)
        for number in range(1000)
    ]
    pods.replace(crowd)
    looked.clear()
    pods.apply("MODIFIED", make_pod("d-7", uid="u7", ip="10.0.0.8", version=2, ready=False))
    assert len(looked) == 1
