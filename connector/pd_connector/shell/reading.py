"""Reading blocks that the holder does not keep: the scheduler's part.

Before a read the holder is asked how many of the leading blocks are intact, and only those are offered to vLLM: what is
gone is then computed in the same step as the rest. After the read the worker asks again, with what `attach` gives it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllm.logger import init_logger

from pd_connector.core.question import Question
from pd_connector.shell.asking import Asker, Patience
from pd_connector.shell.ledger import Entry, Ledger
from pd_connector.shell.worker import Check

logger = init_logger("vllm.pd_connector")


class UnpinnedReading:
    """One engine's, or data-parallel rank's. Used by the scheduler's thread only."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._asker = Asker()
        self._patience = Patience()

    def begin(self, entry: Entry) -> None:
        """Ask about the blocks that a newly arrived request may read, so that the answer is there when it is needed."""
        if entry.admission.may_pull and entry.admission.moment is not None:
            params = entry.request.kv_transfer_params
            entry.asked = self._asker.ask(params["remote_host"], params["remote_port"], _question(entry))

    def narrow(self, entry: Entry) -> bool:
        """Cut the offer to what is intact. ``False`` while that is not known; ask again in the next step."""
        if entry.asked is None:
            return True
        intact = entry.asked.intact(self._patience)
        if intact is None:
            return False
        entry.asked = None
        params = entry.request.kv_transfer_params
        offered = params["remote_block_ids"][0]
        if intact < len(offered):
            entry.gone_tokens = (len(offered) - intact) * self._block_tokens
            entry.admission = replace(
                entry.admission,
                may_pull=intact > 0,
                reason=f"{intact} of {len(offered)} blocks are intact, the holder has reused the others",
            )
            params["remote_block_ids"] = [offered[:intact]]
            params["remote_num_tokens"] = intact * self._block_tokens
        return True

    def attach(self, reads: dict[str, Any], ledger: Ledger) -> None:
        """Give the worker what it has to ask once a read is over."""
        for request_id, meta in reads.items():
            entry = ledger.get(request_id)
            if entry is not None and entry.admission.moment is not None and any(meta.local_block_ids):
                meta.pd_check = Check(meta.remote.host, meta.remote.port, _question(entry))

    def begin_step(self) -> None:
        """A new step may wait for answers again."""
        self._patience.renew()


def _question(entry: Entry) -> Question:
    params, moment = entry.request.kv_transfer_params, entry.admission.moment
    assert moment is not None
    return Question(params["remote_engine_id"], moment, list(params["remote_block_ids"][0]))
