"""`--set`: values are YAML, objects on the way are made, and what can't be applied is quoted."""

import pytest

from pdctl.core.overrides import OverrideError, apply_overrides

DOCUMENT = {"spec": {"model": {"name": "m"}, "decode": None, "env": [1]}}


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("spec.decode.replicas=2", ("spec", "decode", "replicas"), 2),
        ("spec.model.name=a=b", ("spec", "model", "name"), "a=b"),
        ("spec.prefill.prefixCaching=false", ("spec", "prefill", "prefixCaching"), False),
        ("spec.engine.extraArgs=[--x, '1']", ("spec", "engine", "extraArgs"), ["--x", "1"]),
        ("spec.model.name=", ("spec", "model", "name"), None),
    ],
)
def test_a_value_lands_where_the_path_says(setting, path, value):
    node = apply_overrides(DOCUMENT, [setting])
    for key in path:
        node = node[key]
    assert node == value


def test_the_original_stays_and_the_last_one_wins():
    changed = apply_overrides(DOCUMENT, ["spec.model.name=x", "spec.model.name=y"])
    assert changed["spec"]["model"]["name"] == "y"
    assert DOCUMENT["spec"]["model"]["name"] == "m"


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("spec.model", "must be PATH=VALUE"),
        ("=1", "must be PATH=VALUE"),
        ("spec..name=1", "must be PATH=VALUE"),
        ("spec.model.name.x=1", "spec.model.name is not an object"),
        ("spec.env.x=1", "spec.env is not an object"),
        ("spec.model.name={", "the value is not YAML"),
        ("spec.model.name=&a [*a]", "the alias *a lies within what it stands for"),
        ("spec.x=" + "[" * 3000, "nested more than 64 levels"),
        ("x." * 3000 + "x=1", "a path of 3001 names"),
        ("spec.model.name=--- a\n--- b", "is 2 YAML documents"),
    ],
)
def test_what_cannot_be_applied_is_quoted(setting, words):
    with pytest.raises(OverrideError) as caught:
        apply_overrides(DOCUMENT, [setting])
    assert str(caught.value).startswith(f"--set {setting}: ")
    assert words in str(caught.value)


def test_a_document_that_is_no_object_is_an_error():
    with pytest.raises(OverrideError, match="the document is not an object"):
        apply_overrides("text", ["spec=1"])
