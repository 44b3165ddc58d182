"""Only the size of an HTTP chunk is a size: what Python's int() takes besides must go the long way, to the parser."""

from __future__ import annotations

import pytest

from pd_router.core.sse import SseFilter

EVENT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"token"}}]}\n\n'


def passed(size: bytes) -> bool:
    """Whether a read with such a size line in front takes the short cut."""
    sent: list[bytes] = []
    took = SseFilter().passer(sent.append)(size + b"\r\n" + EVENT + b"\r\n")
    assert bool(sent) is took
    return took


@pytest.mark.parametrize("form", [b"%x", b"%X", b"0%x"])
def test_a_hexadecimal_size(form: bytes) -> None:
    assert passed(form % len(EVENT))


@pytest.mark.parametrize("form", [b"0x%x", b"0X%x", b"+%x", b" %x", b"%x ", b"0_%x", b"-%x", b"%x;a=b"])
def test_what_is_no_size(form: bytes) -> None:
    assert not passed(form % len(EVENT))


def test_no_size_at_all() -> None:
    assert not passed(b"")
