"""What an API server says of a child, in the fields that its user has written."""

from __future__ import annotations

import pytest

from pd_operator.core.refused_fields import in_fields

POD = "spec.template.spec"
ENGINE = [
    (f"{POD}.containers[0].resources.limits[hugepages-2Mi]: Invalid value",
     "spec.decode.resources.limits[hugepages-2Mi]"),
    (f"{POD}.initContainers[1].resources.requests[cpu]: Invalid value", "spec.decode.resources.requests[cpu]"),
    (f"{POD}.containers[0].env[12].name: Invalid value", "spec.engine.env or spec.decode.env"),
    (f"{POD}.containers[0].image: Required value", "spec.engine.image"),
    (f"{POD}.containers[0].volumeMounts[3].mountPath: Invalid value", "spec.engine.volumes or spec.model.source"),
    (f"{POD}.volumes[2].secret.secretName: Required value", "spec.engine.volumes or spec.model.source"),
    (f"{POD}.tolerations[4].effect: Invalid value", "spec.decode.pod.tolerations"),
    (f"{POD}.nodeSelector: Invalid value", "spec.decode.pod.nodeSelector"),
    (f"{POD}.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]: Required value",
     "spec.decode.pod.nodeMatchExpressions"),
    (f"{POD}.priorityClassName: Invalid value", "spec.decode.pod.priorityClassName"),
    (f"{POD}.securityContext.runAsUser: Invalid value", "spec.engine.securityProfile"),
    (f"{POD}.resourceClaims[0].resourceClaimTemplateName: Invalid value", "spec.decode.pod.resourceClaims"),
    ("spec.template.metadata.labels: Invalid value", "spec.decode.pod.labels"),
    ("spec.updateStrategy.rollingUpdate.partition: Invalid value", "spec.decode.updateStrategy.partition"),
    ("spec.minReadySeconds: Invalid value", "spec.decode.minReadySeconds"),
]  # fmt: skip
ROUTER = [
    ("Deployment", f"{POD}.containers[0].resources.limits[cpu]: Invalid value", "spec.router.resources.limits[cpu]"),
    ("Deployment", f"{POD}.containers[0].image: Required value", "spec.router.image"),
    ("Deployment", f"{POD}.tolerations[0].key: Invalid value", "spec.router.pod.tolerations"),
    ("Deployment", "spec.replicas: Invalid value", "spec.router.replicas"),
    ("Service", "spec.ports[0].port: Invalid value", "spec.router.service.port"),
    ("Service", "metadata.annotations: Too long", "spec.router.service.annotations"),
]


@pytest.mark.parametrize(("words", "field"), ENGINE, ids=[field for _, field in ENGINE])
def test_an_engines_paths(words: str, field: str) -> None:
    said = f'StatefulSet.apps "qwen-decode" is invalid: [{words}: "x": y, {words}]'
    path, _, rest = words.partition(": ")
    found = in_fields("StatefulSet", "decode", said)
    assert path not in found
    assert found == f'StatefulSet.apps "qwen-decode" is invalid: [{field}: {rest}: "x": y, {field}: {rest}]'


@pytest.mark.parametrize(("kind", "words", "field"), ROUTER, ids=[row[2] for row in ROUTER])
def test_a_routers_paths(kind: str, words: str, field: str) -> None:
    path = words.partition(": ")[0]
    assert in_fields(kind, "router", words) == words.replace(path, field)


@pytest.mark.parametrize(
    ("kind", "part", "words"),
    [
        ("StatefulSet", "decode", "ValidatingAdmissionPolicy 'sizes' denied request: too large"),
        ("StatefulSet", "decode", f"{POD}.initContainers[0].image: Required value"),
        ("StatefulSet", "decode", f"{POD}.containers[0].imagePullPolicy: Unsupported value"),
        ("StatefulSet", "decode", "my.spec.replicas and spec.decode.replicas"),
        ("Service", "decode", "spec.ports[0].port: Invalid value"),
        ("Role", "router", "metadata.annotations: Too long"),
    ],
)
def test_other_words_stay_as_they_are(kind: str, part: str, words: str) -> None:
    assert in_fields(kind, part, words) == words
