"""The clients' share of the descriptors leaves enough for engines and the admin port, and is logged when used up."""

from __future__ import annotations

import logging

import pytest

from pd_router.shell.descriptors import LOG_SECONDS, RESERVE, ClientShare, for_clients, for_pump

OPEN_ANYWAY = 25
"""Listeners, log, event loop and probes of a router with a few engines."""


@pytest.mark.parametrize("limit", [256, 1024, 4096, 65536, 1 << 20])
@pytest.mark.parametrize("max_inflight", [1, 64, 1024, 100_000])
def test_every_turn_of_every_client_finds_its_connections_and_the_pump_its_own(limit: int, max_inflight: int) -> None:
    clients = for_clients(limit, max_inflight)
    turns = min(clients, max_inflight)
    assert clients > limit // 6
    assert clients + 2 * turns + for_pump(limit, max_inflight) + OPEN_ANYWAY <= limit
    assert 0 < for_pump(limit, max_inflight) <= 2 * max_inflight


def test_a_large_limit_is_not_wasted() -> None:
    assert for_clients(1 << 20, 1024) > (1 << 20) - 4 * 1024 - 2 * RESERVE


def test_a_tiny_limit_still_lets_somebody_in() -> None:
    assert for_clients(8, 1024) == 1


def test_a_refusal_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    share = ClientShare(1024, lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            share.refused()
        assert len(caplog.records) == 1
        now = LOG_SECONDS
        share.refused()
        share.refused()
    assert len(caplog.records) == 2
