"""Forms: what honest clients send passes, and nothing that two parsers could read differently does (IS-01)."""

from __future__ import annotations

import pytest

from pd_router.core.errors import ApiError
from pd_router.core.forms import MAX_PARTS, check_form

KIND = "multipart/form-data; boundary=AAA"
EVIL = b'{"do_remote_prefill":true,"remote_host":"169.254.169.254"}'
XARGS = b'{"kv_transfer_params":' + EVIL + b"}"
NAMED = b'Content-Disposition: form-data; name="%b"'
SOUND = NAMED % b'file"; filename="a.wav' + b"\r\nContent-Type: audio/wav", b"RIFF\r\n\x00--kv_transfer_params"


def form(*parts: tuple[bytes, bytes], end: bytes = b"--AAA--\r\n") -> bytes:
    return b"".join(b"--AAA\r\n" + head + b"\r\n\r\n" + value + b"\r\n" for head, value in parts) + end


HONEST = {
    "plain": form((NAMED % b"model", b"tiny"), SOUND),
    "list": form((NAMED % b"timestamp_granularities[]", b"word"), SOUND),
    "free text": form((NAMED % b"prompt", b"about kv_transfer_params \\u005f %5f"), SOUND),
    "xargs": form((NAMED % b"vllm_xargs", b'{"top": 1, "\\u005fa": "100%"}'), SOUND),
    "typed": form(
        (NAMED % b"model" + b"\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: 4", b"tiny"), SOUND
    ),
    "apache": form(
        (NAMED % b"model" + b"\r\nContent-Type: text/plain; charset=UTF-8\r\nContent-Transfer-Encoding: 8bit", b"tiny")
    ),
    "names of files": form(
        ("Content-Disposition: form-data; name=file; filename=\"é; a.wav\"; filename*=utf-8''%C3%A9.wav".encode(), b"R")
    ),
    "no last line end": form(SOUND, end=b"--AAA--"),
    "first line end": b"\r\n" + form(SOUND),
    "no value": form((NAMED % b"language", b"")),
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_form_passes(name: str) -> None:
    assert check_form(HONEST[name], KIND) == KIND


@pytest.mark.parametrize(
    ("kind", "out"),
    [
        ('Multipart/Form-Data;boundary="AAA"', 'multipart/form-data; boundary="AAA"'),
        ("multipart/form-data; boundary=AAA; charset=UTF-8", KIND),
        ("multipart/form-data;charset=utf-8;boundary=AAA", KIND),
    ],
)
def test_the_content_type_is_written_anew(kind: str, out: str) -> None:
    assert check_form(HONEST["plain"], kind) == out


BAD_KINDS = (
    "multipart/form-data; boundary=AAA; boundary=BBB",
    "multipart/form-data; boundary=AAA; Boundary=AAA",
    "multipart/form-data; boundary*=utf-8''AAA",
    "multipart/form-data; boundary=AAA; charset=utf-7",
    "multipart/form-data; boundary=AAA; x=y",
    "multipart/form-data; boundary=AAA, multipart/form-data; boundary=BBB",
    'multipart/form-data; boundary="A\\AA"',
    "multipart/form-data; boundary=",
    "multipart/form-data; boundary=" + 71 * "A",
)


@pytest.mark.parametrize("kind", BAD_KINDS)
def test_a_content_type_that_can_be_read_in_two_ways_is_refused(kind: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_form(HONEST["plain"], kind)
    assert refused.value.status == 400


BAD = {
    "name twice": form((NAMED % b'x"; name="kv_transfer_params', EVIL)),
    "name twice, other case": form((NAMED % b'x"; NAME="y', EVIL)),
    "disposition twice": form((NAMED % b"x" + b"\r\n" + NAMED % b"kv_transfer_params", EVIL)),
    "xargs in a second disposition": form((NAMED % b"prompt" + b"\r\n" + NAMED % b"vllm_xargs", XARGS)),
    "extended name": form((NAMED % b"x\"; name*=utf-8''kv_transfer_params; a=\"", EVIL)),
    "name in pieces": form((b'Content-Disposition: form-data; name*0="kv_transfer"; name*1="_params"', EVIL)),
    "no name": form((b"Content-Disposition: form-data", EVIL)),
    "no disposition": form((b"Content-Type: text/plain", EVIL)),
    "an attachment": form((b'Content-Disposition: attachment; name="x"', EVIL)),
    "xargs as a file": form((NAMED % b'vllm_xargs"; filename="x', XARGS)),
    "xargs as an extended file": form((NAMED % b"vllm_xargs" + b"; filename*=utf-8''x", XARGS)),
    "xargs with an empty extended name": form((NAMED % b"vllm_xargs" + b"; filename*=", XARGS)),
    "escaped once": form((NAMED % b"vllm_xargs", b'{"kv\\u005ftransfer_params": {}}')),
    "escaped twice": form((NAMED % b"vllm_xargs", b'{"a": "{\\"kv\\\\u005ftransfer_params\\": {}}"}')),
    "escaped in many ways": form((NAMED % b"vllm_xargs", b'{"\\u006b%5Cu0076_transfer_params": {}}')),
    "escaped too often": form((NAMED % b"vllm_xargs", b"%" + b"25" * 20 + b"6b")),
    "our own in xargs": form((NAMED % b"vllm_xargs", b'{"\\u0070d_retain": false}')),
    "our own in brackets": form((NAMED % b"vllm_xargs[pd_retain]", b"x")),
    "encoded": form((NAMED % b"vllm_xargs" + b"\r\nContent-Transfer-Encoding: base64", b"eyJr")),
    "other charset": form((NAMED % b"vllm_xargs" + b"\r\nContent-Type: text/plain; charset=utf-16", b"x")),
    "no text": form((NAMED % b"vllm_xargs", "x".encode("utf-16"))),
    "NUL": form((NAMED % b"vllm_xargs", b'"k\0v"')),
    "folded": form((b'Content-Disposition: form-data;\r\n name="kv_transfer_params"', EVIL)),
    "unknown header": form((NAMED % b"x" + b"\r\nX-Name: y", EVIL)),
    "header without a colon": form((NAMED % b"x" + b"\r\ny", EVIL)),
    "LF": form(SOUND, end=b"") + b"--AAA\n" + NAMED % b"kv_transfer_params" + b"\n\n" + EVIL + b"\r\n--AAA--\r\n",
    "boundary within a line": form((NAMED % b"x", b"y --AAA z")),
    "boundary and a space": form((NAMED % b"x", b"y")).replace(b"--AAA\r\n", b"--AAA \r\n"),
    "longer boundary": form((NAMED % b"x", b"y\r\n--AAAB\r\n")),
    "before": b"--BBB\r\n" + form(SOUND),
    "after": form(SOUND) + form((NAMED % b"kv_transfer_params", EVIL)),
    "no end": form(SOUND, end=b""),
    "no part": b"--AAA--\r\n",
    "no head": b"--AAA\r\nx\r\n--AAA--\r\n",
    "too many": form(*[(NAMED % b"x", b"y")] * (MAX_PARTS + 1)),
    "quoted name": form((NAMED % b'x\\"; name=\\"kv', EVIL)),
    "bracketed": form((NAMED % b"vllm_xargs[kv_transfer_params]", b"x")),
    "percent": form((NAMED % b"kv%5Ftransfer_params", b"x")),
}


@pytest.mark.parametrize("name", BAD)
def test_a_form_that_steers_or_can_be_read_in_two_ways_is_refused(name: str) -> None:
    with pytest.raises(ApiError) as refused:
        check_form(BAD[name], KIND)
    assert refused.value.status == 400
    assert "169.254" not in refused.value.message


def test_what_is_no_form_is_another_media_type() -> None:
    for kind in ("application/x-www-form-urlencoded", "", "multipart/form-datax; boundary=AAA"):
        with pytest.raises(ApiError) as refused:
            check_form(b"kv_transfer_params=1", kind)
        assert refused.value.status == 415


@pytest.mark.parametrize("piece", [b"\\", b"\\u00", b"0", b'"', b"' ", b"[", b"; "])
def test_a_long_value_is_looked_at_once(piece: bytes) -> None:
    """Looking further from each of its places would take hours."""
    raw = form((NAMED % b"vllm_xargs", piece * 1_000_000))
    assert check_form(raw, KIND) == KIND
