"""Where the engines come from: flags that fit together, and what is said when they don't."""

from __future__ import annotations

import pytest

from pd_router.__main__ import parse_settings
from pd_router.core.addresses import SettingsError
from pd_router.core.settings import PodDiscovery

BASE = ["--listen", "127.0.0.1:8000", "--admin", "127.0.0.1:9000"]
PODS = [*BASE, "--discover-kubernetes", "prod/qwen"]


def test_pods_of_a_deployment() -> None:
    settings, _ = parse_settings(PODS)
    assert settings.pods == PodDiscovery("prod", "qwen")
    assert (settings.prefill, settings.decode) == ((), ())


def test_all_flags() -> None:
    more = ["--kubeconfig", "/k", "--discovery-relist", "60", "--discovery-stall", "5", "--discovery-retry-max", "2"]
    # The operator renders the generation always; pods have theirs as a label.
    settings, _ = parse_settings([*PODS, *more, "--generation", "g1"])
    assert settings.pods == PodDiscovery("prod", "qwen", "/k", 60.0, 5.0, 2.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            BASE,
            ["--prefill: at least one engine URL", "--decode: at least one", "--discover-kubernetes NAMESPACE/NAME"],
        ),
        ([*PODS, "--prefill", "http://a:1"], ["--discover-kubernetes: cannot be combined with --prefill or --decode"]),
        ([*PODS, "--decode", "http://a:1"], ["--discover-kubernetes: cannot be combined with --prefill or --decode"]),
        ([*BASE, "--prefill", "http://a:1", "--decode", "http://b:1", "--kubeconfig", "/k"], ["--kubeconfig: is for"]),
        ([*PODS, "--discovery-stall", "0"], ["--discovery-stall: must be above 0"]),
        ([*PODS, "--discovery-relist", "-1"], ["--discovery-relist: must be above 0"]),
        ([*PODS, "--discovery-retry-max", "0"], ["--discovery-retry-max: must be above 0"]),
        *(
            ([*BASE, "--discover-kubernetes", value], ["must be NAMESPACE/NAME"])
            for value in (
                "qwen",
                "prod/",
                "/qwen",
                "a/b/c",
                "Prod/qwen",
                "prod/qwen ",
                "prod/q,role=x",
                "a" * 64 + "/b",
            )
        ),
    ],
)
def test_flags_that_do_not_fit(arguments: list[str], words: list[str]) -> None:
    with pytest.raises(SettingsError) as refused:
        parse_settings(arguments)
    for word in words:
        assert word in str(refused.value)
