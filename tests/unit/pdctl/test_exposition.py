"""Reading Prometheus pages as vLLM writes them."""

import pytest

from pdctl.core.exposition import sum_samples

PAGE = """\
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="a \\"b\\", c",source="local_compute"} 4000.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="a",source="external_kv_transfer"} 1.5e+03
vllm:prompt_tokens_by_source_total{engine="1",model_name="a",source="external_kv_transfer"} 500.0
vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.25
vllm:nixl_xfer_time_seconds_sum_created{engine="0"} 9.0
plain_total 7 1700000000
broken{ 1
"""


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer"}, 2000.0),
        ("vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer", "engine": "1"}, 500.0),
        ("vllm:prompt_tokens_by_source_total", None, 6000.0),
        ("vllm:prompt_tokens_by_source_total", {"model_name": 'a \\"b\\", c'}, 4000.0),
        ("vllm:nixl_xfer_time_seconds_sum", None, 0.25),
        ("plain_total", None, 7.0),
        ("vllm:prompt_tokens_by_source_total", {"source": "disk"}, None),
        ("vllm:prompt_tokens", None, None),
        ("broken", None, None),
    ],
)
def test_sums(name, labels, value):
    assert sum_samples(PAGE, name, labels) == value
