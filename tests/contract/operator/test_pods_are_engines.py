"""The pods that the operator renders are engines to the router, and P and D of one object are of one generation."""

from __future__ import annotations

import pytest

from pd_operator.core.render_children import RenderContext, render_children
from pd_router.core.engine_pod import EnginePod, read_pod
from support.fake_api_server import selected
from support.pddeployments import EXAMPLES, deployment, example
from support.pods import make_pod

CONTEXT = RenderContext("uid-1", "r.example/pd-router:1", "r.example/pd-connector:1")


@pytest.mark.parametrize("name", [path.stem for path in sorted(EXAMPLES.glob("*.yaml"))])
def test_pods_of_the_examples_are_engines(name: str) -> None:
    value = deployment(base=example(name))
    found = {}
    for child in render_children(value, CONTEXT):
        if child["kind"] in ("StatefulSet", "Deployment"):
            template = child["spec"]["template"]
            raw = make_pod(f"{child['metadata']['name']}-0")
            raw["metadata"]["labels"] = template["metadata"]["labels"]
            raw["spec"] = template["spec"]
            pod = read_pod(raw, value.metadata.name)
            wanted = f"pdserving.dev/pddeployment={value.metadata.name},pdserving.dev/role in (prefill,decode)"
            assert selected(raw, wanted) is (child["kind"] == "StatefulSet")
            found[child["kind"], pod.role if isinstance(pod, EnginePod) else None] = pod
    assert set(found) == {("StatefulSet", "prefill"), ("StatefulSet", "decode"), ("Deployment", None)}
    prefill, decode = found["StatefulSet", "prefill"], found["StatefulSet", "decode"]
    assert isinstance(prefill, EnginePod)
    assert isinstance(decode, EnginePod)
    assert prefill.generation == decode.generation
    assert prefill.process
    assert decode.process
