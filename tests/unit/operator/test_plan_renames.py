"""A renamed item is told from an added one by what is missing and by its content."""

from __future__ import annotations

from typing import Any

import pytest

from pd_operator.core.plan_renames import removals, renamed_items

ENGINE: dict[str, Any] = {
    "name": "engine",
    "image": "vllm:1",
    "command": ["vllm", "serve"],
    "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
    "ports": [{"name": "http", "containerPort": 8000}],
    "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    "securityContext": {"privileged": False},
}
SIDECAR = {"name": "sidecar", "image": "side:1"}


def pod(*containers: dict[str, Any]) -> dict[str, Any]:
    return {"spec": {"template": {"spec": {"containers": list(containers)}}}}


WANTED = pod(ENGINE)
AT = "/spec/template/spec/containers"
CASES: dict[str, tuple[dict[str, Any], list[tuple[str, Any]]]] = {
    "nothing": (WANTED, []),
    "added beside": (pod(ENGINE, SIDECAR), []),
    "a copy beside": (pod(ENGINE, {**ENGINE, "name": "engine2"}), []),
    "renamed": (pod({**ENGINE, "name": "x", "terminationMessagePath": "/log"}), [(f"{AT}/0/name", "engine")]),
    "renamed behind an added one": (pod(SIDECAR, {**ENGINE, "name": "x"}), [(f"{AT}/1/name", "engine")]),
    "renamed with another image": (pod({**ENGINE, "name": "x", "image": "o"}), [(f"{AT}/0/name", "engine")]),
    "replaced by something else": (pod(SIDECAR), []),
    "gone": (pod(), []),
    "a variable": (
        pod({**ENGINE, "env": [{"name": "X", "value": "1"}, {"name": "B", "value": "2"}]}),
        [(f"{AT}/0/env/0/name", "A")],
    ),
    "variables that changed places": (pod({**ENGINE, "env": ENGINE["env"][::-1]}), []),
    "a variable with another value": (
        pod({**ENGINE, "env": [{"name": "X", "value": "3"}, {"name": "B", "value": "2"}]}), [],
    ),
    "one of two with the same value": (
        pod({**ENGINE, "env": [{"name": "B", "value": "2"}, {"name": "Y", "value": "1"}, {"name": "X", "value": "1"}]}),
        [(f"{AT}/0/env/1/name", "A")],
    ),
    "a mount": (
        pod({**ENGINE, "volumeMounts": [{"name": "shm", "mountPath": "/x"}]}),
        [(f"{AT}/0/volumeMounts/0/mountPath", "/dev/shm")],
    ),
    "a container and a variable in it": (
        pod({**ENGINE, "name": "x", "env": [{"name": "A", "value": "1"}, {"name": "X", "value": "2"}]}),
        [(f"{AT}/0/name", "engine"), (f"{AT}/0/env/1/name", "B")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_renamed_item_gets_its_key_again(case: tuple[dict[str, Any], list[tuple[str, Any]]]) -> None:
    live, expected = case
    steps = [step for one in renamed_items(WANTED, live) for step in one.put_back()]
    assert [(one["path"], one["value"]) for one in steps] == expected
    assert {one["op"] for one in steps} <= {"replace"}


def test_items_without_content_are_different_ones() -> None:
    wanted = {"spec": {"env": [{"name": "A"}], "imagePullSecrets": [{"name": "a"}]}}
    live = {"spec": {"env": [{"name": "B"}], "imagePullSecrets": [{"name": "b"}]}}
    assert renamed_items(wanted, live) == ()


def test_an_empty_volume_is_known_by_its_kind() -> None:
    wanted = {"spec": {"volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}, {"name": "run", "emptyDir": {}}]}}
    live = {"spec": {"volumes": [{"name": "x", "emptyDir": {"medium": "Memory"}}, {"name": "run", "emptyDir": {}}]}}
    [one] = renamed_items(wanted, live)
    assert list(one.put_back()) == [{"op": "replace", "path": "/spec/volumes/0/name", "value": "shm"}]


def test_a_constraint_of_two_keys_is_put_back_in_the_one_that_differs() -> None:
    wanted = {"topologySpreadConstraints": [{"topologyKey": "zone", "whenUnsatisfiable": "A", "maxSkew": 1}]}
    live = {"topologySpreadConstraints": [{"topologyKey": "zone", "whenUnsatisfiable": "B", "maxSkew": 1}]}
    [one] = renamed_items(wanted, live)
    assert [step["path"] for step in one.put_back()] == ["/topologySpreadConstraints/0/whenUnsatisfiable"]


def test_what_could_not_be_put_back_is_removed_where_it_stands_after_the_apply() -> None:
    wanted = {
        "volumes": [{"name": "a", "emptyDir": {"medium": "M"}}, {"name": "b", "emptyDir": {"sizeLimit": "1"}}],
        "containers": [ENGINE],
    }
    other = {**ENGINE, "name": "x", "env": [{"name": "A", "value": "1"}, {"name": "X", "value": "2"}]}
    live = {
        "volumes": [{"name": "x", "emptyDir": {"medium": "M"}}, {"name": "y", "emptyDir": {"sizeLimit": "1"}}],
        "containers": [other],
    }
    renames = renamed_items(wanted, live)
    after = {"volumes": [*wanted["volumes"], *live["volumes"]], "containers": [ENGINE, other]}
    assert [(one["op"], one["path"]) for one in removals(renames, after)] == [
        ("remove", "/volumes/3"), ("remove", "/volumes/2"), ("remove", "/containers/1"),
    ]  # fmt: skip
    assert removals(renames, wanted) == removals((), after) == ()
