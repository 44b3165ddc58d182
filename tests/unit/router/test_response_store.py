"""Items of finished responses: found by their tenant, whole chains or nothing, within a bound."""

from __future__ import annotations

import pytest

from pd_router.core.response_store import MAX_CHAIN, ResponseStore


def item(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_chain_gives_all_items_in_order() -> None:
    store = ResponseStore(10_000)
    assert store.put("t", "r1", None, [item("a"), item("b")])
    assert store.put("t", "r2", "r1", [item("c")])
    assert store.put("t", "r3", "r1", [item("d")])
    assert store.recall("t", "r2") == [item("a"), item("b"), item("c")]
    assert store.recall("t", "r3") == [item("a"), item("b"), item("d")]


def test_tenants_do_not_meet() -> None:
    store = ResponseStore(10_000)
    store.put("t", "r1", None, [item("secret")])
    assert store.recall("u", "r1") is None
    store.put("u", "r1", None, [item("own")])
    assert store.recall("t", "r1") == [item("secret")]
    # Nor does a chain lead from one to another.
    store.put("u", "r2", "r0", [item("x")])
    store.put("t", "r0", None, [item("secret")])
    assert store.recall("u", "r2") is None


def test_the_least_recently_used_go_first_and_a_broken_chain_is_none() -> None:
    store = ResponseStore(2_000)
    store.put("t", "old", None, [item("x" * 200)])
    store.put("t", "new", "old", [item("y" * 200)])
    assert store.recall("t", "new") is not None
    store.put("t", "other", None, [item("z" * 700)])
    assert store.bytes <= 2_000
    assert store.recall("t", "other") is not None
    # Reading the chain touched its beginning last, so the end is what is gone.
    assert store.recall("t", "old") == [item("x" * 200)]
    assert store.recall("t", "new") is None


def test_bounds() -> None:
    store = ResponseStore(1_000)
    assert not store.put("t", "big", None, [item("x" * 2_000)])
    assert not store.put("t", "", None, [item("x")])
    for number in range(50):
        store.put("t", f"r{number}", None, [item("x")])
        assert store.bytes <= 1_000
    assert len(store) > 0
    assert not ResponseStore(0).put("t", "r", None, [])


def test_the_same_id_again_replaces() -> None:
    store = ResponseStore(10_000)
    store.put("t", "r", None, [item("one")])
    held = store.bytes
    store.put("t", "r", None, [item("two")])
    assert store.bytes == held
    assert store.recall("t", "r") == [item("two")]
    assert store.drop("t", "r")
    assert not store.drop("t", "r")
    assert store.bytes == 0


@pytest.mark.parametrize("loop", [["a", "a"], ["a", "b"]])
def test_a_circle_ends(loop: list[str]) -> None:
    store = ResponseStore(100_000)
    store.put("t", loop[0], loop[1], [item("x")])
    store.put("t", loop[1], loop[0], [item("y")])
    assert store.recall("t", loop[0]) is None
    assert MAX_CHAIN < 10_000


def test_large_integers_survive() -> None:
    store = ResponseStore(10_000)
    store.put("t", "r", None, [{"n": 2**70}])
    assert store.recall("t", "r") == [{"n": 2**70}]
