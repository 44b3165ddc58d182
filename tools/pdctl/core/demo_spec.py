"""The PDDeployment that the demo runs: one prefill and one decode engine on this machine's cores.

The two legs are this object with `kvTransfer.bidirectional` Disabled and Enabled; nothing else differs, as in the
reference benchmark.
"""

from __future__ import annotations

from typing import Any, Final

from pd_operator.core.choices import Switch
from pd_operator.core.model import API_VERSION
from pd_wire import names
from pdctl.core.tiny_model import MAX_POSITIONS

SERVED_NAME: Final = "tiny"
MIN_MODEL_LEN: Final = 16384
ROOM: Final = 256
"""Tokens that the chat template adds, and some to spare."""


def check_fits(longest_prompt: int, reply_tokens: int) -> None:
    """See that the tiny model can read the longest prompt and reply to it.

    Raises:
        ValueError: it can't; says what is possible.
    """
    most = MAX_POSITIONS - _model_len(0, reply_tokens)
    if longest_prompt > most:
        raise ValueError(
            f"a longest prompt of {longest_prompt} tokens with replies of {reply_tokens} is more than the tiny model's "
            f"{MAX_POSITIONS} tokens; at most {max(0, most)} fit"
        )


def demo_document(model_folder: str, longest_prompt: int, reply_tokens: int, bidirectional: bool) -> dict[str, Any]:
    """The raw object, as it could stand in a file."""
    return {
        "apiVersion": API_VERSION,
        "kind": names.KIND,
        "metadata": {"name": "demo"},
        "spec": {
            "nodeProfile": "CPU",
            "model": {
                "name": model_folder,
                "servedName": SERVED_NAME,
                "maxModelLen": max(MIN_MODEL_LEN, _model_len(longest_prompt, reply_tokens)),
                "dtype": "bfloat16",
            },
            # Nothing is worth finishing when a leg is over, and a decode engine that holds blocks would wait for them.
            "engine": {"maxNumSeqs": 8, "shutdownTimeoutSeconds": 0},
            # P forgets, so that whatever it needn't compute came from D.
            "prefill": {"prefixCaching": False},
            "router": {
                "auth": {"anonymous": "Allowed"},
                "timeouts": {"prefillSeconds": 300, "firstByteSeconds": 300, "idleSeconds": 300},
            },
            "kvTransfer": {"bidirectional": (Switch.ENABLED if bidirectional else Switch.DISABLED).value},
        },
    }


def _model_len(longest_prompt: int, reply_tokens: int) -> int:
    return longest_prompt + 2 * reply_tokens + ROOM
