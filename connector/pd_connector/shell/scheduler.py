"""vLLM's pull scheduler with our decisions in its hooks.

Each hook reads plain values from vLLM's objects, asks `core`, and lets vLLM's own code do the transfer. Order of a
request's life: `on_new_request`, then any number of `get_num_new_matched_tokens`, `update_state_after_alloc`,
`update_connector_output`, `request_finished`.
"""

from __future__ import annotations

import secrets
import time
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.request import RequestStatus

from pd_connector import compat
from pd_connector.core.admission import NOTHING, Admission, Engine, Leg, Prompt, admit, leg_of
from pd_connector.core.notices import marked
from pd_connector.core.progress import Event, Progress
from pd_connector.core.scope import Shape, proof_obstacle, proven_length, pull_obstacle, scope_bytes
from pd_connector.core.spent import SpentHandles
from pd_connector.shell import listener
from pd_connector.shell.leasing import make_retention
from pd_connector.shell.ledger import Entry, Ledger
from pd_connector.shell.reading import UnpinnedReading
from pd_connector.shell.retention import Kept, UnpinnedRetention, without_leases
from pd_wire import names, proof

logger = init_logger("vllm.pd_connector")

LISTENER_GRACE: Final = 0.2
"""Seconds in which a listener that could not bind its port ends."""

IDLE_PAUSE_CPU: Final = 0.01
"""Seconds. Where the engine computes on the cores that it polls with, a poll costs what a neighbour could use."""


class PDPullScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Scheduler side of the connector; one per engine, or per data-parallel rank."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        faults = compat.hook_faults(NixlPullConnectorScheduler) + compat.state_faults(self)
        if faults:
            raise compat.UnsupportedVllm(f"this vLLM's pull connector is not as expected: {'; '.join(faults)}")
        self.pd_ledger = Ledger()
        self._spent = SpentHandles()
        # Drawn per start: fingerprints of one start say nothing about another's.
        self._proof_key = secrets.token_bytes(proof.KEY_BYTES)
        self._idle_pause = IDLE_PAUSE_CPU if current_platform.device_type == "cpu" else 0.0
        self._engine = Engine(
            block_tokens=self.block_size,
            groups=len(kv_cache_config.transfer_groups),
            pull_obstacle=self._pull_obstacle(),
            unpinned_obstacle=self._reading_obstacle() or self._unpinned_obstacle(),
            proof_obstacle=_context_parallel_obstacle(vllm_config.parallel_config),
        )
        self._reading = UnpinnedReading(self.block_size) if self._engine.unpinned_obstacle is None else None
        self._retention: UnpinnedRetention | None = None
        self._fallback = ""
        self._pinned_blocks: dict[str, int] = {}

    def _pull_obstacle(self) -> str | None:
        if not self.is_bidirectional_kv_xfer_enabled:
            return "bidirectional_kv_xfer is off on this engine"
        if self.use_host_buffer:
            return "this engine keeps its KV behind a host buffer"
        return None

    def _reading_obstacle(self) -> str | None:
        if self.vllm_config.kv_transfer_config.kv_load_failure_policy != "recompute":
            return "kv_load_failure_policy is not recompute on this engine"
        return None

    def _unpinned_obstacle(self) -> str | None:
        """Why blocks can be neither left in the pool nor read from there."""
        if self._is_hma_required or len(self.kv_cache_config.transfer_groups) > 1:
            return "the model has KV cache groups other than one of full attention"
        return compat.unpinned_obstacle()

    def bind_block_pool(self, pool: Any, watermark_blocks: int = 0) -> None:
        """vLLM's scheduler has made its block pool: decide what becomes of finished turns' blocks.

        `watermark_blocks` stay free when it admits a request.
        """
        transfer = self.vllm_config.kv_transfer_config
        wanted = transfer.get_from_extra_config(names.RETENTION_OPTION, names.MODE_PINNED)
        if wanted == names.MODE_PINNED or transfer.kv_role != names.KV_ROLES[names.ROLE_DECODE]:
            return
        obstacle = self._engine.pull_obstacle or self._engine.proof_obstacle or self._unpinned_obstacle()
        if obstacle:
            logger.warning("Retention is %s, not %s: %s", names.MODE_PINNED, wanted, obstacle)
            self._fallback = obstacle
            return
        self._retention = make_retention(wanted, self.vllm_config, pool, self.engine_id, watermark_blocks)
        logger.info("Retention is %s", wanted)

    def counts(self) -> dict[str, int]:
        """On decode, numbers about finished turns' blocks by their keys in `core.counts`."""
        if self.vllm_config.kv_transfer_config.kv_role != names.KV_ROLES[names.ROLE_DECODE]:
            return {}
        kept = {} if self._retention is None else self._retention.counts()
        return {"pinned_blocks": sum(self._pinned_blocks.values()), **kept}

    def relieve(self) -> bool:
        """Give blocks of finished turns back for a running request; whether there were any."""
        return self._retention is not None and self._retention.relieve()

    def forget_blocks(self) -> None:
        """The KV cache was reset."""
        if self._retention is not None:
            self._retention.forget()

    # --- hooks, in the order of a request's life ------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Judge the parameters and replace them by what vLLM may act on."""
        raw = request.kv_transfer_params
        if raw is None:
            return
        leg = leg_of(raw)
        if leg is Leg.PREFILL:
            # vLLM may shorten the prompt for P; the judgement needs the prompt that will be computed.
            request.kv_transfer_params = dict(raw)
            super().on_new_request(request)
            self._admit(request)
        elif leg is Leg.DECODE:
            self._admit(request)
            super().on_new_request(request)
        else:
            request.kv_transfer_params = None

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens to pull; ``None`` while that is not known.

        May be called any number of times before the allocation, and the answer stays the same.
        """
        if self._retention is not None:
            self._retention.make_room(request, num_computed_tokens)
        entry = self._entry(request)
        if entry is None:
            return 0, False
        if entry.progress is not Progress.WAITING:
            return 0, False
        entry.local_tokens = num_computed_tokens
        if self._reading is not None and not self._reading.narrow(entry):
            return None, False
        if not entry.admission.may_pull:
            return 0, False
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return count, is_async

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Start the pull, or tell the holder that there will be none."""
        if self._retention is not None:
            self._retention.allocated(request, len(blocks.blocks[0]))
        entry = self._entry(request)
        if entry is None:
            return
        first = entry.progress is Progress.WAITING
        if first and num_external_tokens == 0:
            self._decline(entry)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        pulls = first and num_external_tokens > 0
        entry.offered_tokens = num_external_tokens if pulls else entry.offered_tokens
        self.pd_ledger.advance(entry, Event.ALLOCATED_TO_PULL if pulls else Event.ALLOCATED)

    def update_connector_output(self, connector_output: Any) -> None:
        """Drop the completions that vLLM's scheduler would assert on, or free blocks too early for (EL-03)."""
        super().update_connector_output(connector_output)
        received, sent = connector_output.finished_recving, connector_output.finished_sending
        if not received and not sent:
            return
        failed = getattr(connector_output, "failed_recving", None)
        result = self.pd_ledger.admit_completions(received or (), sent or (), failed)
        for request_id in result.sent:
            self._pinned_blocks.pop(request_id, None)
        if not result.dropped:
            return
        for sentence in result.dropped:
            logger.warning("Dropped a KV transfer completion: %s", sentence)
        connector_output.finished_recving = set(result.received)
        connector_output.finished_sending = set(result.sent)

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Decide what happens to the blocks, and complete the answer's parameters."""
        if self._retention is not None:
            self._retention.gone(request.request_id)
        entry = self.pd_ledger.get(request.request_id)
        if entry is None:
            # No parameters, or junk that was removed on arrival: nothing may be kept, nobody would free it.
            return False, None
        if entry.progress is Progress.WAITING:
            self._decline(entry)
        shown = self._proof(request) if entry.admission.leg is Leg.DECODE else None
        if entry.admission.leg is Leg.DECODE and _ended_well(request) and (shown is None or not entry.admission.retain):
            delayed, params = self._free_now(request), None
        else:
            delayed, params = super().request_finished(request, block_ids)
        kept = None
        if delayed and shown is not None and self._retention is not None:
            kept, delayed = self._retention.keep_readable(block_ids[0][: shown.blocks]), False
            # vLLM has noted a lease by now.
            del self._reqs_need_send[request.request_id]
            self._reqs_not_processed.add(request.request_id)
        if delayed and shown is not None:
            self._pinned_blocks[request.request_id] = sum(map(len, block_ids))
        if delayed:
            # The worker arms the end of a lease only for requests that it has seen in a batch (HL-09).
            self._reqs_in_batch.add(request.request_id)
        self.pd_ledger.advance(entry, Event.FINISHED_RETAINED if delayed else Event.FINISHED)
        if delayed and shown is not None and params is not None and self._fallback:
            params[names.FALLBACK_KEY] = self._fallback
        return delayed, _completed(params, entry, shown, kept)

    def has_pending_push_work(self) -> bool:
        """Keep an idle engine stepping until finished turns' blocks are back in the pool."""
        return super().has_pending_push_work() or (self._retention is not None and self._retention.pending)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Breathe, on a CPU, when a step has nothing to compute.

        While a finished request's blocks are kept, vLLM's engine core steps a thousand times a second, and each step
        wakes every worker: one retained turn keeps an engine's processes busy for its whole TTL.
        """
        if (
            self._idle_pause
            and not scheduler_output.total_num_scheduled_tokens
            and not self._reqs_need_recv
            and not self._reqs_need_send
        ):
            time.sleep(self._idle_pause)
        meta = super().build_connector_meta(scheduler_output)
        if self._reading is not None:
            self._reading.attach(meta.reqs_to_recv, self.pd_ledger)
            self._reading.begin_step()
        if self._retention is not None:
            self._retention.end_step(scheduler_output.num_scheduled_tokens)
        return meta

    # --- parts ----------------------------------------------------------------------------------

    def _entry(self, request: Any) -> Entry | None:
        """The request's entry; ``None`` for a request without KV parameters, which is no concern of the connector."""
        if request.request_id not in self.pd_ledger and request.kv_transfer_params is not None:
            self.on_new_request(request)
        return self.pd_ledger.get(request.request_id)

    def _admit(self, request: Any) -> Admission:
        tokens = request.prompt_token_ids or []
        shape = _shape(request)
        prompt = Prompt(
            tokens=tokens,
            scope=scope_bytes(shape),
            obstacle=pull_obstacle(shape),
            length=self._get_remote_prefill_token_count(request.num_prompt_tokens),
        )
        admission = admit(request.kv_transfer_params, prompt, self._engine, self._spent)
        request.kv_transfer_params = admission.params
        if admission is not NOTHING:
            entry = self.pd_ledger.add(request, admission)
            if self._reading is not None:
                self._reading.begin(entry)
        if admission.reason:
            logger.info(
                "KV handle of %s: %s (%s)", request.request_id, admission.verdict or "refused", admission.reason
            )
        return admission

    def _decline(self, entry: Entry) -> None:
        """No pull for this request: hide the offer from vLLM and let the holder free its blocks."""
        admission = entry.admission
        if admission.declined is None or (admission.leg is Leg.DECODE and admission.may_pull):
            # No holder, or one that vLLM itself notifies: it does so for a prefill engine's handle.
            return
        entry.request.kv_transfer_params = dict(admission.declined)
        if admission.notify:
            self._reqs_need_recv[entry.request.request_id] = compat.release_notice(entry.request, NixlConnectorMetadata)

    def _free_now(self, request: Any) -> bool:
        """End a decode turn without keeping its blocks."""
        self._stop_heartbeat(request.request_id)
        self._reqs_not_processed.add(request.request_id)
        return False

    def _proof(self, request: Any) -> proof.Proof | None:
        """The proof for the blocks of a finished turn, or ``None`` when they could never be used."""
        shape = _shape(request)
        if proof_obstacle(shape) or self._engine.proof_obstacle:
            return None
        known = request.all_token_ids
        length = proven_length(request.num_computed_tokens, compat.tokens_in_flight(request), len(known))
        shown = proof.prove(list(known[:length]), self.block_size, self._proof_key, scope_bytes(shape))
        return shown if shown.blocks else None

    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        """Start serving handshakes.

        Raises:
            RuntimeError: when the side channel's port is taken; vLLM's own code would wait for ever.
        """
        super().set_xfer_handshake_metadata(metadata)
        listener = self._nixl_handshake_listener_t
        if listener is None:
            return
        listener.join(LISTENER_GRACE)
        if not listener.is_alive():
            raise RuntimeError(
                f"the NIXL side channel can't listen on {self.side_channel_host}:{self.side_channel_port}: set "
                "VLLM_NIXL_SIDE_CHANNEL_HOST to an address of this host and VLLM_NIXL_SIDE_CHANNEL_PORT to a free port "
                "(data-parallel ranks take the ports after it)"
            )

    def _nixl_handshake_listener(self, *args: Any, **kwargs: Any) -> None:
        answer = without_leases if self._retention is None else self._retention.answer
        listener.serve(NixlPullConnectorScheduler._nixl_handshake_listener, answer, *args, **kwargs)


def _shape(request: Any) -> Shape:
    adapter = request.lora_request
    return Shape(
        adapter_name=adapter.lora_name if adapter else None,
        adapter_id=adapter.lora_int_id if adapter else None,
        cache_salt=request.cache_salt,
        media_items=len(request.mm_features or ()),
        has_embeddings=request.prompt_embeds is not None or request.prompt_token_ids is None,
        reads_no_cache=compat.reads_no_cache(request),
    )


def _ended_well(request: Any) -> bool:
    return request.status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


def _context_parallel_obstacle(parallel: Any) -> str | None:
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism spreads a block's tokens over ranks"
    return None


def _completed(
    params: dict[str, Any] | None, entry: Entry, shown: proof.Proof | None, kept: Kept | None
) -> dict[str, Any] | None:
    """vLLM's answer parameters with ours added."""
    if params is None:
        return None
    if shown is not None:
        params[names.PROOF_KEY] = proof.encode(shown)
        params[names.MODE_KEY] = names.MODE_PINNED if kept is None else kept.mode
    if kept is not None:
        params[names.MOMENT_KEY] = str(kept.moment)
        if kept.lease is not None:
            params[names.LEASE_KEY] = str(kept.lease)
        params["remote_blocks_expiry_time"] = None
        params["remote_request_id"] = marked(params["remote_request_id"])
    report = entry.report()
    if report is not None:
        params[names.REPORT_KEY] = report.as_json()
    return params
