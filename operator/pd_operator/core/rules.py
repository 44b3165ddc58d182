"""All rules that span several fields of a PDDeployment: what a schema alone cannot refuse.

A rule is a function that yields the problems it sees and never raises. What is refused would start and then be slow,
wrong or silent, so each message says what to write instead. The rules lie in `rules_engine`, `rules_transfer`,
`rules_extra`, `rules_pod`, `rules_volumes`, `rules_access` and `rules_store`.
"""

from __future__ import annotations

from pd_operator.core import (
    rules_access,
    rules_engine,
    rules_extra,
    rules_pod,
    rules_store,
    rules_transfer,
    rules_volumes,
)
from pd_operator.core.model import PDDeployment
from pd_operator.core.problems import Problem

RULES = (
    *rules_engine.RULES,
    *rules_transfer.RULES,
    *rules_extra.RULES,
    *rules_pod.RULES,
    *rules_volumes.RULES,
    *rules_access.RULES,
    *rules_store.RULES,
)


def check(deployment: PDDeployment) -> list[Problem]:
    """Every problem that the rules see, in no particular order."""
    return [problem for rule in RULES for problem in rule(deployment)]
