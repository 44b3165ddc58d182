"""Reading a raw object: defaults, empty values, all problems at once, unknown fields, and no other error than ours."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_operator.core.choices import Backend, NodeProfile
from pd_operator.core.model import API_VERSION, PDDeployment
from pd_operator.core.parse import parse_deployment
from pd_operator.core.problems import Problem, SpecError
from pd_operator.core.profiles import backend_of
from pd_wire import names
from support.pddeployments import EXAMPLES, deployment, edited, example, smallest

DEFAULTS = [
    ("engine.maxNumSeqs", 256),
    ("engine.startupTimeoutSeconds", 7200),
    ("engine.shutdownTimeoutSeconds", 120),
    ("engine.extraArgs", []),
    ("engine.env", []),
    ("model.dtype", "auto"),
    ("model.source.download", "Allowed"),
    ("model.source.mountPath", "/models"),
    ("nodeProfile", "P5enEFA"),
    ("prefill.replicas", 1),
    ("prefill.scaling", "Fixed"),
    ("prefill.tensorParallelSize", 1),
    ("prefill.prefixCaching", True),
    ("decode.replicas", 1),
    ("decode.prefixCaching", True),
    ("router.replicas", 1),
    ("router.scaling", "Fixed"),
    ("router.handleStore.type", "Memory"),
    ("router.auth.tenantFrom", "Authorization"),
    ("router.auth.anonymous", "NoReuse"),
    ("router.limits.maxBodyBytes", 16 * 1024 * 1024),
    ("router.limits.responseBytes", 64 * 1024 * 1024),
    ("router.timeouts.connectSeconds", 2),
    ("router.placement.decodeOverloadTurns", 4),
    ("router.placement.retryPercent", 20),
    ("router.placement.bypass.maxNewTokens", 0),
    ("router.service.type", "ClusterIP"),
    ("router.service.port", 80),
    ("kvTransfer.bidirectional", "Enabled"),
    ("kvTransfer.decoderBlocksTTLSeconds", 480),
    ("kvTransfer.recomputeThresholdTokens", 64),
    ("kvTransfer.connector", "Verified"),
    ("kvTransfer.loadFailurePolicy", "Fail"),
    ("kvTransfer.leaseDurationSeconds", 30),
]
ABSENT = ["engine.image", "engine.blockSize", "model.maxModelLen", "kvTransfer.backend", "kvTransfer.routerTTLSeconds"]


def at(path: str) -> Any:
    value: Any = deployment().model_dump(mode="json", by_alias=True)["spec"]
    for part in path.split("."):
        value = value[part]
    return value


@pytest.mark.parametrize(("path", "value"), DEFAULTS)
def test_default(path: str, value: Any) -> None:
    assert at(path) == value


@pytest.mark.parametrize("path", ABSENT)
def test_stays_unset(path: str) -> None:
    assert at(path) is None


def test_api_version_and_kind_are_the_shared_names() -> None:
    assert f"{names.API_GROUP}/{names.API_VERSION}" == API_VERSION == deployment().api_version
    assert deployment().kind == names.KIND


@pytest.mark.parametrize(
    ("profile", "backend"), [(NodeProfile.P5EN_EFA, Backend.LIBFABRIC), (NodeProfile.CPU, Backend.UCX)]
)
def test_backend_comes_from_the_profile(profile: NodeProfile, backend: Backend) -> None:
    assert backend_of(deployment(("spec.nodeProfile", profile.value)).spec) is backend


@pytest.mark.parametrize(
    ("ttl", "router"), [(480, 450), (120, 90), (60, 30), (59, 29), (40, 20), (20, 10), (86400, 86370)]
)
def test_router_ttl_is_derived(ttl: int, router: int) -> None:
    transfer = deployment(("spec.kvTransfer.decoderBlocksTTLSeconds", ttl)).spec.kv_transfer
    assert transfer.handle_ttl_seconds == router


@pytest.mark.parametrize("path", [path.name for path in sorted(EXAMPLES.glob("*.yaml"))])
def test_shipped_examples_are_valid(path: str) -> None:
    raw = example(path.removesuffix(".yaml"))
    assert parse_deployment(raw).metadata.name == raw["metadata"]["name"]


def test_a_key_without_value_means_unset_as_on_an_api_server() -> None:
    raw = edited(smallest(), ("spec.router", None), ("spec.engine", {"env": None, "image": None}))
    assert parse_deployment(raw) == deployment()


def test_what_a_cluster_adds_is_no_problem() -> None:
    raw = edited(smallest(), ("metadata.uid", "1"), ("metadata.resourceVersion", "7"), ("status", {"conditions": []}))
    assert parse_deployment(raw) == deployment()


def test_unknown_fields_can_be_ignored() -> None:
    raw = edited(smallest(), ("spec.fromTheFuture", 1), ("spec.decode.alsoNew", {}))
    assert parse_deployment(raw, unknown_fields="ignore") == deployment()
    with pytest.raises(SpecError, match=r"spec\.fromTheFuture"):
        parse_deployment(raw)


def test_values_stay_checked_when_unknown_fields_are_ignored() -> None:
    with pytest.raises(SpecError, match=r"spec\.prefill\.replicas"):
        parse_deployment(edited(smallest(), ("spec.prefill.replicas", -1)), unknown_fields="ignore")


BROKEN = [
    ("metadata.name", "Not_A_Label"),
    ("spec.model", {}),
    ("spec.nodeProfil", "CPU"),
    ("spec.prefill.replicas", -1),
    ("spec.engine.extraArgs", ["--port", "1"]),
    ("spec.decode.env", [{"name": "NIXL_BACKEND", "value": "UCX"}]),
    ("spec.kvTransfer.routerTTLSeconds", 480),
    ("spec.kvTransfer.backend", "UCX"),
]


def test_all_problems_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        parse_deployment(edited(smallest(), *BROKEN))
    assert [problem.path for problem in caught.value.problems] == [
        "metadata.name",
        "spec.decode.env[0]",
        "spec.engine.extraArgs[0]",
        "spec.kvTransfer.backend",
        "spec.kvTransfer.routerTTLSeconds",
        "spec.model.name",
        "spec.nodeProfil",
        "spec.prefill.replicas",
    ]


def test_a_wrong_field_is_not_reported_twice() -> None:
    raw = edited(smallest(), ("spec.kvTransfer.routerTTLSeconds", -1), ("spec.model", 7), ("spec.decode.replicas", "x"))
    with pytest.raises(SpecError) as caught:
        parse_deployment(raw)
    assert len(caught.value.problems) == 3


def test_text_of_the_error() -> None:
    raw = edited(smallest(), ("spec.kvTransfer.decoderBlocksTTLSeconds", 5), ("spec.nodeProfil", "CPU"))
    with pytest.raises(SpecError) as caught:
        parse_deployment(raw)
    assert str(caught.value).splitlines() == [
        "2 problems in PDDeployment qwen:",
        "  spec.kvTransfer.decoderBlocksTTLSeconds",
        "      must be an integer from 20 to 86400, got 5",
        "  spec.nodeProfil",
        "      unknown field; did you mean nodeProfile?",
    ]


def test_a_long_value_is_cut() -> None:
    with pytest.raises(SpecError) as caught:
        parse_deployment(edited(smallest(), ("spec.nodeProfile", "x" * 10_000)))
    assert max(len(line) for line in str(caught.value).splitlines()) < 200


def test_a_long_key_is_cut() -> None:
    with pytest.raises(SpecError) as caught:
        parse_deployment(edited(smallest(), ("spec." + "x" * 10_000, 1)))
    assert max(len(line) for line in str(caught.value).splitlines()) < 400


@pytest.mark.parametrize("key", [1, True, 2.5])
def test_a_key_that_yaml_reads_as_something_else_is_unknown(key: Any) -> None:
    raw = smallest()
    raw["spec"][key] = 1
    with pytest.raises(SpecError) as caught:
        parse_deployment(raw)
    [problem] = caught.value.problems
    assert problem.path == f"spec.{key}"


@pytest.mark.parametrize("value", [None, [], "text", 7, True])
def test_not_an_object(value: Any) -> None:
    with pytest.raises(SpecError) as caught:
        parse_deployment(value)
    [problem] = caught.value.problems
    assert problem.path == "(the whole document)"


def test_an_object_without_an_end_is_refused() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"x": [deep]}
    round_about = smallest()
    round_about["spec"]["router"] = round_about
    for raw in (edited(smallest(), ("spec.router", 1)) | {"spec": deep}, round_about):
        with pytest.raises(SpecError) as caught:
            parse_deployment(raw, unknown_fields="ignore")
        [problem] = caught.value.problems
        assert problem == Problem("spec", "is nested more than 128 levels deep")


def test_an_empty_object_names_what_is_required() -> None:
    with pytest.raises(SpecError) as caught:
        parse_deployment({})
    assert {problem.path for problem in caught.value.problems} >= {"apiVersion", "kind", "metadata", "spec"}


def test_problems_are_unique_and_sorted() -> None:
    one, two = Problem("b", "x"), Problem("a", "x")
    assert SpecError([one, two, one]).problems == (two, one)


keys = st.sampled_from(
    ["apiVersion", "kind", "metadata", "spec", "model", "name", "engine", "env", "extraArgs", "prefill", "kvTransfer",
     "router", "auth", "value", "extraConfig", "source", "x"]
)  # fmt: skip
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(keys | st.integers() | st.booleans(), inner, max_size=4)
    ),
    max_leaves=12,
)


def outcome(raw: Any) -> PDDeployment | SpecError:
    try:
        return parse_deployment(raw)
    except SpecError as error:
        return error


@given(anything)
@settings(deadline=None, max_examples=200)
def test_any_value_is_read_or_refused(value: Any) -> None:
    result = outcome(value)
    assert isinstance(result, PDDeployment) or result.problems


@given(
    st.sampled_from(["metadata", "spec", "spec.model", "spec.engine", "spec.prefill", "spec.router"]), keys, anything
)
@settings(deadline=None, max_examples=300)
def test_any_edit_is_read_or_refused(path: str, key: str, value: Any) -> None:
    result = outcome(edited(smallest(), (f"{path}.{key}", value)))
    if isinstance(result, SpecError):
        assert str(result).startswith(f"{len(result.problems)} problem")
    else:
        assert result.spec.model.name


def test_a_parsed_object_survives_a_round_trip() -> None:
    for path in sorted(EXAMPLES.glob("*.yaml")):
        first = parse_deployment(example(path.stem))
        text = json.dumps(first.model_dump(mode="json", by_alias=True, exclude_none=True))
        assert parse_deployment(json.loads(text)) == first
