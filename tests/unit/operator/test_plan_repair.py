"""What an edit of a list's key leaves in the way of an apply, and how it is put back."""

from __future__ import annotations

from typing import Any

import pytest

from pd_operator.core.observed import REPAIR_MANAGER
from pd_operator.core.plan_repair import moved_items, without_claims


def service(*ports: tuple[str, int]) -> dict[str, Any]:
    return {"spec": {"ports": [{"name": name, "port": number, "protocol": "TCP"} for name, number in ports]}}


def pod(*containers: tuple[str, dict[str, int]]) -> dict[str, Any]:
    made = [
        {"name": name, "ports": [{"name": port, "containerPort": number} for port, number in ports.items()]}
        for name, ports in containers
    ]
    return {"spec": {"template": {"spec": {"containers": made}}}}


WANTED = service(("http", 80), ("nixl", 5600))
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], list[tuple[str, str, Any]]]] = {
    "nothing": (WANTED, WANTED, []),
    "others beside ours": (WANTED, service(("x", 1), ("http", 80), ("nixl", 5600)), []),
    "renamed, which an apply heals": (WANTED, service(("web", 80), ("nixl", 5600)), []),
    "moved": (WANTED, service(("http", 8080), ("nixl", 5600)), [("replace", "/spec/ports/0/port", 80)]),
    "both moved": (
        WANTED, service(("http", 1), ("nixl", 2)),
        [("replace", "/spec/ports/0/port", 80), ("replace", "/spec/ports/1/port", 5600)],
    ),
    "moved, and the number taken": (
        WANTED, service(("http", 1), ("x", 80), ("nixl", 2), ("y", 5600)),
        [("remove", "/spec/ports/2", None), ("remove", "/spec/ports/0", None)],
    ),
    "second container": (
        pod(("a", {"http": 1}), ("b", {"admin": 2})), pod(("x", {}), ("b", {"admin": 3}), ("a", {"http": 1})),
        [("replace", "/spec/template/spec/containers/1/ports/0/containerPort", 2)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_moved_key_is_put_back(case: tuple[dict[str, Any], dict[str, Any], list[tuple[str, str, Any]]]) -> None:
    wanted, live, expected = case
    assert [(one["op"], one["path"], one.get("value")) for one in moved_items(wanted, live)] == expected


def test_another_protocol_is_another_key() -> None:
    live = service(("http", 80))
    live["spec"]["ports"][0]["protocol"] = "UDP"
    assert [one["path"] for one in moved_items(service(("http", 80)), live)] == ["/spec/ports/0/protocol"]


def test_lists_without_named_items_and_missing_parts_are_no_concern() -> None:
    wanted = {"spec": {"args": ["a"], "rules": [{"x": 1}], "ports": [{"name": "a", "port": 1}], "more": {"b": 2}}}
    assert moved_items(wanted, {"spec": {"args": ["b"], "rules": [{"x": 2}]}}) == ()


def test_ownership_of_a_repair_ends_and_that_of_others_stays() -> None:
    entries = [{"manager": name} for name in ("pd-operator", REPAIR_MANAGER, "kubectl")]
    assert without_claims({"metadata": {"managedFields": [entries[0], entries[2]]}}) == ()
    assert without_claims({"metadata": {}}) == ()
    [step] = without_claims({"metadata": {"managedFields": entries}})
    assert step == {"op": "replace", "path": "/metadata/managedFields", "value": [entries[0], entries[2]]}
