"""What a client says in headers about what comes after a turn."""

from __future__ import annotations

import pytest

from pd_router.core.errors import ApiError
from pd_router.core.wishes import NO_WISH, Wish, read_wish


@pytest.mark.parametrize(
    ("headers", "wish"),
    [
        ({}, NO_WISH),
        ({"x-conversation-id": "c"}, NO_WISH),
        ({"x-conversation-end": "true"}, Wish(end=True)),
        ({"x-conversation-end": " TRUE "}, Wish(end=True)),
        ({"x-conversation-end": "False"}, Wish()),
        ({"x-conversation-hold": "0"}, Wish(hold=0)),
        ({"x-conversation-hold": " 3600 "}, Wish(hold=3600)),
        ({"x-conversation-hold": "0060"}, Wish(hold=60)),
        ({"x-conversation-end": "true", "x-conversation-hold": "5"}, Wish(end=True, hold=5)),
    ],
)
def test_what_is_read(headers: dict[str, str], wish: Wish) -> None:
    assert read_wish(headers) == wish


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("X-Conversation-End", ("", "1", "yes", "true, true", "truе")),
        ("X-Conversation-Hold", ("", "-1", "+1", "1.0", "1e3", "3601", "00001", "١", "60 s", "0x10")),
    ],
)
def test_what_is_refused(name: str, values: tuple[str, ...]) -> None:
    for value in values:
        with pytest.raises(ApiError, match=f"^{name} must be ") as caught:
            read_wish({name.lower(): value})
        assert (caught.value.status, caught.value.param) == (400, name)
