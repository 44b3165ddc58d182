"""Which rendered fields are ours on the live object, read from records as an API server writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pd_operator.core.plan_ownership import lost_fields

MANIFEST: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "StatefulSet",
    "metadata": {
        "name": "a",
        "namespace": "b",
        "labels": {"x": "y"},
        "ownerReferences": [{"uid": "u1", "name": "a"}],
    },
    "spec": {
        "replicas": 2,
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "engine",
                        "image": "i:1",
                        "command": ["vllm", "serve"],
                        "ports": [{"name": "http", "containerPort": 8000}],
                        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}],
                    }
                ],
                "volumes": [{"name": "shm", "emptyDir": {}}],
            }
        },
    },
}


def record() -> dict[str, Any]:
    """What the server notes after MANIFEST was applied."""
    env = {
        'k:{"name":"A"}': {".": {}, "f:name": {}, "f:value": {}},
        'k:{"name":"B"}': {".": {}, "f:name": {}, "f:value": {}},
    }
    ports = {'k:{"containerPort":8000,"protocol":"TCP"}': {".": {}, "f:containerPort": {}, "f:name": {}}}
    engine = {".": {}, "f:name": {}, "f:image": {}, "f:command": {}, "f:ports": ports, "f:env": env}
    return {
        "f:metadata": {
            "f:labels": {"f:x": {}},
            "f:ownerReferences": {'k:{"uid":"u1"}': {}},
        },
        "f:spec": {
            "f:replicas": {},
            "f:template": {
                "f:spec": {
                    "f:containers": {'k:{"name":"engine"}': engine},
                    "f:volumes": {'k:{"name":"shm"}': {".": {}, "f:emptyDir": {}, "f:name": {}}},
                }
            },
        },
    }


def lost(value: dict[str, Any]) -> set[str]:
    """Lost fields of MANIFEST under a record."""
    return set(lost_fields(MANIFEST, json.dumps(value)))


def test_all_is_ours_after_an_apply() -> None:
    assert lost(record()) == set()


def test_without_a_record_everything_is_lost() -> None:
    assert set(lost_fields(MANIFEST, "")) == {"metadata", "spec"}


CONTAINER = ("f:spec", "f:template", "f:spec", "f:containers", 'k:{"name":"engine"}')


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("f:spec", "f:replicas"), "spec.replicas"),
        (("f:metadata", "f:labels", "f:x"), "metadata.labels.x"),
        (("f:metadata", "f:ownerReferences", 'k:{"uid":"u1"}'), "metadata.ownerReferences[0]"),
        ((*CONTAINER, "f:image"), "spec.template.spec.containers[0].image"),
        ((*CONTAINER, "f:command"), "spec.template.spec.containers[0].command"),
        ((*CONTAINER, "f:env", 'k:{"name":"B"}'), "spec.template.spec.containers[0].env[1]"),
        ((*CONTAINER, "f:env", 'k:{"name":"A"}', "f:value"), "spec.template.spec.containers[0].env[0].value"),
        (
            (*CONTAINER, "f:ports", 'k:{"containerPort":8000,"protocol":"TCP"}', "f:name"),
            "spec.template.spec.containers[0].ports[0].name",
        ),
        (("f:spec", "f:template", "f:spec", "f:volumes", 'k:{"name":"shm"}'), "spec.template.spec.volumes[0]"),
        (CONTAINER, "spec.template.spec.containers[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_that_another_writer_took(path: tuple[str, ...], expected: str) -> None:
    value = record()
    here = value
    for part in path[:-1]:
        here = here[part]
        here.setdefault(".", {})  # an object that stays when its last field of ours goes
    del here[path[-1]]
    assert lost(value) == {expected}


def test_what_others_add_beside_ours_is_theirs() -> None:
    value = record()
    value["f:spec"]["f:template"]["f:spec"]["f:containers"]['k:{"name":"sidecar"}'] = {".": {}}
    value["f:spec"]["f:minReadySeconds"] = {}
    assert lost(value) == set()


def test_set_lists_are_matched_by_value() -> None:
    manifest = {"metadata": {"finalizers": ["a/b", "c/d"]}}
    assert (
        lost_fields(manifest, json.dumps({"f:metadata": {"f:finalizers": {'v:"a/b"': {}, 'v:"c/d"': {}}}}))
        == frozenset()
    )
    assert lost_fields(manifest, json.dumps({"f:metadata": {"f:finalizers": {'v:"a/b"': {}}}})) == {
        "metadata.finalizers[1]"
    }


def test_two_items_need_two_records() -> None:
    manifest = {"spec": {"ports": [{"port": 80}, {"port": 80, "protocol": "UDP"}]}}
    both = {'k:{"port":80,"protocol":"TCP"}': {".": {}, "f:port": {}}, 'k:{"port":80,"protocol":"UDP"}': {".": {}}}
    full = {
        'k:{"port":80,"protocol":"TCP"}': {"f:port": {}},
        'k:{"port":80,"protocol":"UDP"}': {"f:port": {}, "f:protocol": {}},
    }
    assert lost_fields(manifest, json.dumps({"f:spec": {"f:ports": full}})) == frozenset()
    assert lost_fields(manifest, json.dumps({"f:spec": {"f:ports": both}}))
