"""vLLM's pull worker, with a second look at what it has read from blocks that nobody kept.

A read of unpinned blocks is only worth something if none of them was handed to another request before the read was over
(`core.stamps`). So a finished read is not reported before the holder has been asked; what was overwritten goes to vLLM
as load errors, which it computes again.

The worker object is vLLM's own: `adopt` changes its class, because a second object would be a second NIXL agent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.logger import init_logger

from pd_connector.core.notices import without_unpinned
from pd_connector.core.overwritten import to_recompute
from pd_connector.core.question import Question
from pd_connector.shell.asking import Asked, Asker, Patience

logger = init_logger("vllm.pd_connector")


@dataclass(frozen=True, slots=True)
class Check:
    """Goes from the scheduler to the worker with a read: whom to ask what when it is over."""

    host: str
    port: int
    question: Question


class PDPullWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """Worker side of the connector; one per rank."""

    pd_asker: Asker
    pd_asked: dict[str, Asked]
    pd_patience: Patience

    def _pop_done_transfers(self, transfers: dict[str, list[int]]) -> tuple[set[str], set[str]]:
        """Hold reads of unpinned blocks back until the holder has answered."""
        done, failed = super()._pop_done_transfers(transfers)
        for request_id in list(done):
            check = getattr(self._recving_metadata.get(request_id), "pd_check", None)
            if check is None or request_id in failed or request_id in self._recv_failures:
                continue
            done.discard(request_id)
            self.pd_asked[request_id] = self.pd_asker.ask(check.host, check.port, check.question)
        if self.pd_asked:
            done |= self._judged()
        return done, failed

    def _judged(self) -> set[str]:
        """Requests whose holder has answered, or never will."""
        self.pd_patience.renew()
        judged = set()
        for request_id, asked in list(self.pd_asked.items()):
            intact = asked.intact(self.pd_patience)
            if intact is None:
                continue
            del self.pd_asked[request_id]
            meta = self._recving_metadata.get(request_id)
            if meta is None:
                continue  # reported as failed meanwhile, with its peer
            judged.add(request_id)
            bad = to_recompute(meta.local_block_ids[0], len(meta.pd_check.question.blocks), intact)
            if bad:
                logger.info("%d blocks of %s were overwritten while they were read", len(bad), request_id)
                self._invalid_block_ids.put(bad)
        return judged


def adopt(worker: Any) -> None:
    """Make vLLM's worker ours."""
    worker.__class__ = PDPullWorker
    worker.pd_asker, worker.pd_asked, worker.pd_patience = Asker(), {}, Patience()
    agent = worker.nixl_wrapper
    arrived = agent.get_new_notifs
    # The holder keeps nothing for such reads, so there is nothing that the notice could end; vLLM logs it as an error.
    agent.get_new_notifs = lambda: without_unpinned(arrived())
