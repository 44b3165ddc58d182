"""The demo's deployment: valid, and equal in both legs but for one switch."""

import json

import pytest

from pd_operator.core.choices import Role
from pd_operator.core.parse import parse_deployment
from pd_operator.core.render_engine import EngineEndpoint, render_engine
from pdctl.core.demo_spec import check_fits, demo_document
from pdctl.core.tiny_model import MAX_POSITIONS

ENDPOINT = EngineEndpoint("127.0.0.1", 8100, "127.0.0.1", 5600)


def leg(bidirectional: bool):
    return parse_deployment(demo_document("/models/tiny", 8600, 64, bidirectional))


def test_the_legs_differ_in_the_switch_alone():
    for role in Role:
        off, on = (render_engine(leg(value), role, ENDPOINT) for value in (False, True))
        assert off.env == on.env
        different = [(a, b) for a, b in zip(off.argv, on.argv, strict=True) if a != b]
        [(off_text, on_text)] = different
        without, with_reuse = json.loads(off_text), json.loads(on_text)
        less, more = without.pop("kv_connector_extra_config"), with_reuse.pop("kv_connector_extra_config")
        assert without == with_reuse
        assert (less["bidirectional_kv_xfer"], more["bidirectional_kv_xfer"]) == (False, True)
        # The limits of reuse are there with reuse only.
        assert more.keys() - less.keys() == {"kv_recompute_threshold", "decoder_kv_blocks_ttl", "pd_retention"}
        assert all(less[name] == more[name] for name in less if name != "bidirectional_kv_xfer")


def test_prefill_has_no_cache_of_its_own_and_decode_has():
    assert "--no-enable-prefix-caching" in render_engine(leg(True), Role.PREFILL, ENDPOINT).argv
    assert "--no-enable-prefix-caching" not in render_engine(leg(True), Role.DECODE, ENDPOINT).argv


def test_the_longest_prompt_fits():
    spec = parse_deployment(demo_document("/models/tiny", 30000, 64, True)).spec
    assert spec.model.max_model_len is not None
    assert spec.model.max_model_len > 30000 + 64


def test_what_the_model_can_read_is_the_limit():
    most = MAX_POSITIONS - 2 * 64 - 256
    check_fits(most, 64)
    assert parse_deployment(demo_document("/m", most, 64, True)).spec.model.max_model_len == MAX_POSITIONS
    with pytest.raises(ValueError, match=rf"at most {most} fit"):
        check_fits(most + 1, 64)
    with pytest.raises(ValueError, match="at most 0 fit"):
        check_fits(100_000, 50_000)
