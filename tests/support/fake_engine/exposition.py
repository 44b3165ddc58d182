"""The ``/metrics`` page of a fake engine: the few of vLLM's metrics that a router or a report reads.

Separate because names and labels must be vLLM's letter for letter (engine-measured, section 4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from support.fake_engine.engine import FakeEngine

_COUNTERS = {
    "vllm:nixl_num_failed_transfers_total": "failed_transfers",
    "vllm:nixl_num_failed_notifications_total": "failed_notifications",
    "vllm:nixl_num_kv_expired_reqs_total": "expired",
    "vllm:nixl_num_notifications_after_expiry_total": "notifications_after_expiry",
}
_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
BYTES_PER_BLOCK = 4096
SECONDS_PER_TRANSFER = 0.02


def render(engine: FakeEngine) -> str:
    """The page in Prometheus' text format."""
    connector = engine.connector
    counters = connector.counters
    labels = f'engine="0",model_name="{engine.config.models[0]}"'
    running = sum(record.fate == "running" for record in engine.requests)
    lines = ["# TYPE vllm:prompt_tokens_by_source_total counter"]
    lines += [f'vllm:prompt_tokens_by_source_total{{{labels},source="{key}"}} {counters[key]}.0' for key in _SOURCES]
    for name, key in _COUNTERS.items():
        lines += [f"# TYPE {name} counter", f"{name}{{{labels}}} {counters[key]}.0"]
    for name, total in (
        ("vllm:nixl_xfer_time_seconds", counters["transfers"] * SECONDS_PER_TRANSFER),
        ("vllm:nixl_bytes_transferred", counters["blocks_pulled"] * BYTES_PER_BLOCK),
    ):
        lines += [
            f"# TYPE {name} histogram",
            f'{name}_bucket{{{labels},le="+Inf"}} {counters["transfers"]}.0',
            f"{name}_sum{{{labels}}} {total}",
            f"{name}_count{{{labels}}} {counters['transfers']}.0",
        ]
    usage = 1 - connector.free_blocks() / connector.pool.count
    lines += [
        "# TYPE vllm:kv_cache_usage_perc gauge",
        f"vllm:kv_cache_usage_perc{{{labels}}} {usage}",
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{labels}}} {running}.0",
        "# TYPE vllm:cache_config_info gauge",
        f'vllm:cache_config_info{{block_size="{connector.config.block_tokens}",engine="0"}} 1.0',
    ]
    return "\n".join(lines) + "\n"
