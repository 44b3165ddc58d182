"""Is this form one that every parser reads the same way, and does it say nothing that a client may not say? (IS-01)

Separate from `passed`, which lists the endpoints, because a form is not rewritten here: it holds files that are large,
and the engine opens it with another parser. What the two could understand differently (a parameter or a header given
twice, a second boundary, a line end or an encoding that is rare) could hide a field from one of them, so it is refused.
Honest clients write none of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final
from urllib.parse import unquote_to_bytes

from pd_router.core.errors import ApiError, bad_field
from pd_router.core.fields import CARRIERS, STRIPPED
from pd_wire.names import OWN_PREFIX

FORM: Final = "multipart/form-data"
MAX_PARTS: Final = 256
_MAX_PART_HEAD: Final = 8192
_FILE: Final = "file"
"""The one field of the engines' forms that is a file; its content is the client's own and is not looked at."""
_FREE_TEXT: Final = frozenset({_FILE, "prompt", "hotwords"})
"""Fields whose value is the client's own text."""
_TOKEN: Final = r"[A-Za-z0-9!#$&'*+.^_`|~-]"
_UTF8: Final = r'(?:[ \t]*;[ \t]*charset=(?:utf-?8|"utf-?8"))?'
_CONTENT_TYPE: Final = re.compile(
    rf"""multipart/form-data{_UTF8}[ \t]*;[ \t]*boundary=({_TOKEN}{{1,70}}|"[A-Za-z0-9'()+_,./:=?-]{{1,70}}"){_UTF8}""",
    re.IGNORECASE,
)
_PARAMETER: Final = re.compile(
    rb"""[ \t]*;[ \t]*(name|filename|filename\*)=("[^"\\\x00-\x1f\x7f]*"|[A-Za-z0-9!#$%&'*+.^_`|~-]+)""", re.IGNORECASE
)
_EXTENDED: Final = re.compile(rb"utf-8'[a-z-]*'[A-Za-z0-9!#$%&+.^_`|~-]*", re.IGNORECASE)
_NAME: Final = re.compile(r"[A-Za-z0-9_.\[\]-]{1,128}")
_PLAIN_TEXT: Final = re.compile(rb'[a-z]+/[a-z0-9.+-]+(?:[ \t]*;[ \t]*charset="?(?:utf-?8|us-ascii)"?)?', re.IGNORECASE)
_PART_HEADERS: Final = {
    b"content-type": re.compile(rb"[\x20-\x7e]+"),
    b"content-transfer-encoding": re.compile(rb"7bit|8bit|binary", re.IGNORECASE),
    b"content-length": re.compile(rb"[0-9]+"),
}
"""What a part may have besides its disposition: what clients send, and what changes nothing of how it is read."""
_STEPS: Final = re.compile(r"[\[\].]+")
_OWN: Final = re.compile(rb"""["']\s*""" + OWN_PREFIX.encode(), re.IGNORECASE)
_NOISE: Final = re.compile(rb"[_\-\s\\\"'\[\]]+")
_ESCAPE: Final = re.compile(rb"(?<!\\)\\+(?:u\{?0*([0-9a-f]{2})\}?|x([0-9a-f]{2}))", re.IGNORECASE)
_LAYERS: Final = 8
"""How often a value may be escaped within an escape."""


def check_form(raw: bytes, content_type: str) -> str:
    """Refuse a form that names the params anywhere but in free text or in a file, or that is ambiguous.

    Returns:
        The content type for the engine, written anew.

    Raises:
        ApiError: 400 or 415.
    """
    if content_type.partition(";")[0].strip().lower() != FORM:
        text = f"Content-Type must be {FORM} with a boundary"
        raise ApiError(415, text, "invalid_request_error", "unsupported_media_type", "Content-Type")
    found = _CONTENT_TYPE.fullmatch(content_type.strip())
    if found is None:
        raise bad_field("Content-Type", f"{FORM} with one boundary and no other parameter but charset=utf-8")
    boundary = found[1].strip('"')
    for name, value in _parts(raw, b"--" + boundary.encode("ascii")):
        steps = _STEPS.split(name.lower())
        if _names_params(_plain(name.encode())) or any(step.startswith(OWN_PREFIX) for step in steps):
            raise bad_field("the form", "without fields for transfers, which are not a client's to set")
        if name not in _FREE_TEXT:
            _check_value(steps[0], value)
    return f"{FORM}; boundary={found[1]}"


def _check_value(field: str, value: bytes) -> None:
    """Raises ApiError 400."""
    try:
        value.decode()
    except UnicodeDecodeError as error:
        raise bad_field("the form", f"of UTF-8 text in all parts but `{_FILE}`") from error
    if b"\0" in value or _names_params(_plain(value)) or (field in CARRIERS and _OWN.search(_unescaped(value))):
        raise bad_field("the form", "without params for transfers, which are not a client's to set")


def _parts(raw: bytes, delimiter: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and value of each part. Raises ApiError 400."""
    pieces = raw.split(delimiter, MAX_PARTS + 2)
    if not 3 <= len(pieces) <= MAX_PARTS + 2:
        raise bad_field("the body", f"a form of 1 to {MAX_PARTS} parts, divided and ended by the boundary")
    # What stands before each delimiter and after it tells whether all parsers take it for one.
    fits = pieces[0] in (b"", b"\r\n") and pieces[-1] in (b"--", b"--\r\n")
    if not fits or not all(piece.startswith(b"\r\n") and piece.endswith(b"\r\n") for piece in pieces[1:-1]):
        raise bad_field("the body", "a form with each boundary on a line of its own, ended by CRLF, and nothing around")
    for piece in pieces[1:-1]:
        head, found, value = piece[2:].partition(b"\r\n\r\n")
        if not found or len(head) > _MAX_PART_HEAD:
            raise bad_field("the body", "a form whose parts each have a head of their own")
        name = _name_of(head)
        yield name, value[:-2]


def _name_of(head: bytes) -> str:
    """The field that a part is. Raises ApiError 400."""
    seen: dict[bytes, bytes] = {}
    for line in head.split(b"\r\n"):
        key, colon, value = line.partition(b":")
        key, value = key.lower(), value.strip(b" \t")
        allowed = _PART_HEADERS.get(key)
        known = key == b"content-disposition" or (allowed is not None and allowed.fullmatch(value) is not None)
        if not colon or key in seen or not known:
            raise bad_field(
                "the form",
                "of parts that have one Content-Disposition each and at most one Content-Type, Content-Length and "
                "Content-Transfer-Encoding (7bit, 8bit or binary)",
            )
        seen[key] = value
    name = _disposed(seen.get(b"content-disposition", b""))
    if name != _FILE and not _PLAIN_TEXT.fullmatch(seen.get(b"content-type", b"text/plain")):
        raise bad_field("the form", f"of UTF-8 text in all parts but `{_FILE}`")
    return name


def _disposed(disposition: bytes) -> str:
    """The name in a Content-Disposition. Raises ApiError 400."""
    kind, _, _ = disposition.partition(b";")
    found: dict[bytes, bytes] = {}
    at = len(kind)
    while at < len(disposition):
        parameter = _PARAMETER.match(disposition, at)
        if parameter is None or (key := parameter[1].lower()) in found:
            break
        if key == b"filename*" and not _EXTENDED.fullmatch(parameter[2]):
            break
        found[key] = parameter[2].strip(b'"')
        at = parameter.end()
    name = found.get(b"name", b"").decode("latin-1")
    if kind.strip().lower() != b"form-data" or at < len(disposition) or not _NAME.fullmatch(name):
        raise bad_field(
            "the form",
            'of parts with Content-Disposition: form-data; name="..." and filename at most, each once, without escapes',
        )
    return name


def _plain(text: bytes) -> bytes:
    """The letters that a reader may find in it, whatever escapes it undoes. Raises ApiError 400."""
    return _NOISE.sub(b"", _unescaped(text)).lower()


def _unescaped(text: bytes) -> bytes:
    """Raises ApiError 400."""
    for _ in range(_LAYERS):
        bare = _ESCAPE.sub(lambda found: bytes.fromhex((found[1] or found[2]).decode()), unquote_to_bytes(text))
        if bare == text:
            return text
        text = bare
    raise bad_field("the form", f"of values that are escaped at most {_LAYERS} times")


def _names_params(plain: bytes) -> bool:
    return any(name.encode() in plain for name in STRIPPED)
