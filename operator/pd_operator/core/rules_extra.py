"""Rules about the values of `spec.kvTransfer.extraConfig`: an engine reads them at its start, and dies of a wrong one.

Which keys may stand there is in `rules_transfer`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

from pd_operator.core.model import PDDeployment
from pd_operator.core.problems import Problem

VALUES: Final = {
    "num_threads": (r"^[1-9][0-9]{0,5}$", "must be a whole number from 1, such as 4"),
    "engine_ttl": (r"^[0-9]{0,9}[1-9][0-9]{0,9}([.][0-9]{1,9})?$|^0[.][0-9]{0,8}[1-9]$", "must be seconds above 0"),
}
"""By key: the form of the value, and what that is."""


def extra_values(deployment: PDDeployment) -> Iterator[Problem]:
    """Each value is what vLLM can use for that key."""
    for index, entry in enumerate(deployment.spec.kv_transfer.extra_config):
        form, what = VALUES.get(entry.name, ("", ""))
        if _is_json(entry.value) and not re.search(form, entry.value):
            yield Problem(f"spec.kvTransfer.extraConfig[{index}].value", f"{what}; got {entry.value}")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


RULES = (extra_values,)
