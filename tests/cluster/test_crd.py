"""The custom resource definition on a real API server: accepted, defaults filled in, bad objects refused by field.

Rendered children are applied too, since only a real server knows whether it takes them and keeps them as they are.
"""

from __future__ import annotations

from typing import Any

import pytest

from pd_operator.core.crd import PLURAL
from pd_operator.core.parse import parse_deployment
from pd_operator.core.render_children import RenderContext
from pdctl.shell.cluster.api import MERGE, Api, ApiError
from pdctl.shell.cluster.cluster import EmbeddedCluster
from support.bad_specs import NEIGHBOURS, BadSpec, bad_specs
from support.definition import objects_in
from support.pddeployments import EXAMPLES, edited, example, smallest
from support.spec_edits import IMAGE, TABLE, Edit

CONTEXT = RenderContext("", "r.example/pd-router:1", "r.example/pd-connector:1")
NAMES = [path.stem for path in sorted(EXAMPLES.glob("*.yaml"))]
BAD = list(bad_specs())


def tried(api: Api, raw: dict[str, Any]) -> Any:
    """What the server would make of an object; unknown fields are errors, as with kubectl."""
    return api.request("POST", f"{objects_in('default')}?dryRun=All&fieldValidation=Strict", raw)


def test_the_server_finds_no_fault_with_the_schema(api: Api) -> None:
    """A schema that is not structural is stored all the same, with a condition that says so."""
    path = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{PLURAL}.pdserving.dev"
    conditions = {one["type"]: one for one in api.get(path)["status"]["conditions"]}
    assert conditions["Established"]["status"] == "True"
    assert "NonStructuralSchema" not in conditions


@pytest.mark.parametrize("bad", BAD, ids=[bad.name for bad in BAD])
def test_a_bad_object_is_refused_by_name_of_the_field(api: Api, bad: BadSpec) -> None:
    raw = edited(edited(smallest(), IMAGE), *bad.edits)
    if not bad.by_server:
        assert tried(api, raw)["kind"] == "PDDeployment"
        return
    with pytest.raises(ApiError) as refused:
        tried(api, raw)
    assert refused.value.status in (400, 422)
    assert bad.server_path in str(refused.value)


@pytest.mark.parametrize(("field", "value", "first"), [(row[0], row[1], row[3]) for row in TABLE])
def test_what_is_good_here_is_good_there(api: Api, field: str, value: Any, first: tuple[Edit, ...]) -> None:
    raw = edited(smallest(), IMAGE, *first, (f"spec.{field}", value))
    assert parse_deployment(tried(api, raw)).spec == parse_deployment(raw).spec


@pytest.mark.parametrize("edits", [row[1] for row in NEIGHBOURS], ids=[row[0] for row in NEIGHBOURS])
def test_neighbours_of_bad_values_are_accepted(api: Api, edits: list[Edit]) -> None:
    raw = edited(edited(smallest(), ("spec.engine.image", "r.example/engine:1")), *edits)
    assert parse_deployment(tried(api, raw)).spec == parse_deployment(raw).spec


def test_there_are_many_bad_objects() -> None:
    assert sum(bad.by_server for bad in BAD) >= 40


def test_without_an_image_there_can_be_no_pods(api: Api) -> None:
    with pytest.raises(ApiError, match=r"spec\.engine\.image: Invalid value: .*is required in a cluster"):
        tried(api, smallest())


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ([("spec.kvTransfer.routerTTLSeconds", 480)], "at least 10 s less than decoderBlocksTTLSeconds"),
        ([("spec.kvTransfer.backend", "UCX")], "UCX falls back to TCP there and says nothing"),
        ([("metadata.name", "a" * 41)], "40"),
        ([("spec.prefill.tensorParallelSize", 16), ("spec.decode.tensorParallelSize", 16)], "at most 8"),
        ([("spec.engine.env", [{"name": "NIXL_BACKEND", "value": "UCX"}])], "use spec.kvTransfer.backend"),
        ([("spec.decode.sort", 1)], 'unknown field "spec.decode.sort"'),
    ],
)
def test_the_message_says_what_to_write_instead(api: Api, edits: list[Edit], message: str) -> None:
    with pytest.raises(ApiError) as refused:
        tried(api, edited(edited(smallest(), IMAGE), *edits))
    assert message in str(refused.value)


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_accepted_and_read_back_as_they_are_here(api: Api, place: str, name: str) -> None:
    raw = example(name)
    stored = api.request("POST", f"{place}?fieldValidation=Strict", raw)
    here = parse_deployment(raw)
    assert parse_deployment(stored).spec == here.spec
    assert stored["spec"] == here.spec.model_dump(mode="json", by_alias=True, exclude_none=True)


def test_the_smallest_object_gets_the_models_defaults(api: Api, place: str) -> None:
    raw = edited(smallest(), IMAGE)
    stored = api.request("POST", place, raw)["spec"]
    assert stored == parse_deployment(raw).spec.model_dump(mode="json", by_alias=True, exclude_none=True)


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
def test_replicas_that_would_not_be_applied_cannot_be_set(api: Api, place: str, role: str) -> None:
    api.request("POST", place, edited(smallest(), IMAGE, (f"spec.{role}.scaling", "External")))
    with pytest.raises(ApiError, match=rf"spec\.{role}\.replicas: .*is not applied while scaling is External"):
        api.request("PATCH", f"{place}/qwen", {"spec": {role: {"replicas": 3}}}, MERGE)
    back = {"spec": {role: {"replicas": 3, "scaling": "Fixed"}}}
    assert api.request("PATCH", f"{place}/qwen", back, MERGE)["spec"][role]["replicas"] == 3


def test_decode_has_the_scale_subresource(
    defined_cluster: EmbeddedCluster, api: Api, place: str, namespace: str
) -> None:
    api.request("POST", place, edited(smallest(), IMAGE))
    defined_cluster.kubectl("-n", namespace, "scale", "pdd/qwen", "--replicas=3")
    assert api.get(f"{place}/qwen")["spec"]["decode"]["replicas"] == 3
    assert api.get(f"{place}/qwen")["spec"]["prefill"]["replicas"] == 1


def test_status_is_kept_apart_and_shown_in_columns(
    defined_cluster: EmbeddedCluster, api: Api, place: str, namespace: str
) -> None:
    api.request("POST", place, edited(smallest(), IMAGE))
    time = "2026-01-01T00:00:00Z"
    ready = {"type": "Ready", "status": "True", "reason": "AllReady", "message": "", "lastTransitionTime": time}
    reuse = {**ready, "type": "BidirectionalActive", "status": "Unknown", "reason": "RouterUnreachable"}
    roles = {"prefill": {"ready": "1/1"}, "decode": {"ready": "2/3"}, "router": {"ready": "1/2"}}
    before = api.get(f"{place}/qwen")["metadata"]["generation"]
    api.request("PATCH", f"{place}/qwen/status", {"status": {"conditions": [ready, reuse], **roles}}, MERGE)
    assert api.get(f"{place}/qwen")["metadata"]["generation"] == before
    header, row = defined_cluster.kubectl("-n", namespace, "get", "pdd").splitlines()
    assert header.split() == ["NAME", "READY", "MODEL", "PREFILL", "DECODE", "ROUTER", "BIDIRECTIONAL", "AGE"]
    assert row.split()[:7] == ["qwen", "True", "Qwen/Qwen3-32B", "1/1", "2/3", "1/2", "Unknown"]


def test_a_condition_of_somebody_else_may_carry_a_domain(api: Api, place: str) -> None:
    api.request("POST", place, edited(smallest(), IMAGE))
    time = "2026-01-01T00:00:00Z"
    theirs = {"type": "example.com/Audited", "status": "True", "reason": "Yes", "lastTransitionTime": time}
    api.request("PATCH", f"{place}/qwen/status", {"status": {"conditions": [theirs]}}, MERGE)
    assert api.get(f"{place}/qwen")["status"]["conditions"] == [theirs]
    wrong = {"status": {"conditions": [theirs | {"type": "example.com/"}]}}
    with pytest.raises(ApiError, match=r"status\.conditions\[0\]\.type"):
        api.request("PATCH", f"{place}/qwen/status", wrong, MERGE)


def test_it_is_found_by_its_short_name_and_category_but_not_among_all(defined_cluster: EmbeddedCluster) -> None:
    resources = defined_cluster.kubectl("api-resources", "--api-group=pdserving.dev", "-o", "wide")
    assert "pdd" in resources
    assert "llm" in resources.split()
    assert "all" not in resources.split()


def explained(defined_cluster: EmbeddedCluster, path: str) -> str:
    return defined_cluster.kubectl("explain", f"pdd.{path}")


def test_explain_has_a_text_for_every_field(defined_cluster: EmbeddedCluster) -> None:
    assert "moves between the roles" in explained(defined_cluster, "spec.kvTransfer")
    assert "LIBFABRIC on EFA, UCX elsewhere" in " ".join(explained(defined_cluster, "spec.kvTransfer.backend").split())
    everything = defined_cluster.kubectl("explain", "pdd", "--recursive")
    assert "decoderBlocksTTLSeconds" in everything
    assert "<no description>" not in explained(defined_cluster, "spec.decode.pod.tolerations")
