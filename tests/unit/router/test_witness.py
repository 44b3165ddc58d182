"""Whose process another router's handle is of: every way to be wrong ends in a refusal."""

from __future__ import annotations

import pytest

from pd_router.core.witness import Witness

PEER = "10.0.0.7"


def static(connected: float | None = 10.0, peer: str = PEER) -> Witness:
    witness = Witness()
    if connected is not None:
        witness.connected(peer, connected)
    return witness


def pod(uid: str = "u1", process: str = "p1", connected: float | None = 10.0) -> Witness:
    witness = Witness.of_pod(uid, process)
    if connected is not None:
        witness.connected(PEER, connected)
    return witness


@pytest.mark.parametrize(
    ("name", "witness", "identity", "sent", "known"),
    [
        ("an address, sent since the connection stands", static(), PEER, 10.0, True),
        ("an address, sent before", static(), PEER, 9.9, False),
        ("another address", static(), "10.0.0.8", 11.0, False),
        ("never connected", static(None), "", 11.0, False),
        ("never connected, with its address", static(None), PEER, 11.0, False),
        ("no identity", static(), "", 11.0, False),
        ("a pod's process, sent before the connection", pod(), "u1/p1", 1.0, True),
        ("a pod's process, before any connection", pod(connected=None), "u1/p1", 1.0, False),
        ("another process of the pod", pod(), "u1/p2", 11.0, False),
        ("another pod of the name", pod(), "u2/p1", 11.0, False),
        ("a pod whose process nobody names, sent since", pod(process=""), "u1/", 10.0, True),
        ("a pod whose process nobody names, sent before", pod(process=""), "u1/", 9.9, False),
        ("a pod by its address", pod(), PEER, 11.0, False),
    ],
)
def test_what_is_known(name: str, witness: Witness, identity: str, sent: float, known: bool) -> None:
    assert witness.knows(identity, sent) is known, name


@pytest.mark.parametrize("witness", [static(), pod(), pod(process="")], ids=["address", "pod", "nameless"])
def test_after_a_break_only_what_was_sent_over_the_new_connection_counts(witness: Witness) -> None:
    identity = witness.identity
    witness.broken()
    assert not witness.knows(identity, 1e9)
    witness.connected(PEER, 30.0)
    assert witness.knows(identity, 30.0)
    assert not witness.knows(identity, 29.9)


def test_a_connection_that_is_made_anew_without_a_break_is_no_continuity() -> None:
    """An engine that closes after each answer: nobody would notice its restart."""
    witness = pod()
    witness.connected(PEER, 20.0)
    assert not witness.knows("u1/p1", 19.9)
    assert witness.knows("u1/p1", 20.0)


def test_a_restart_that_the_kubelet_reports_before_the_connection_breaks() -> None:
    witness = pod()
    witness.broken()
    witness.identify("u1", "p2")
    assert not witness.knows("u1/p1", 1e9)
    witness.connected(PEER, 30.0)
    assert witness.knows("u1/p2", 31.0)
    assert not witness.knows("u1/p1", 31.0)
    assert not witness.knows("u1/p2", 29.0)


def test_a_restart_before_the_first_connection_leaves_nothing_vouched_for() -> None:
    witness = pod(connected=None)
    witness.broken()
    witness.identify("u1", "p2")
    witness.connected(PEER, 30.0)
    assert not witness.knows("u1/p2", 29.0)


def test_an_address_may_change_with_a_connection() -> None:
    witness = static()
    witness.broken()
    witness.connected("10.0.0.9", 30.0)
    assert not witness.knows(PEER, 31.0)
    assert witness.knows("10.0.0.9", 31.0)
