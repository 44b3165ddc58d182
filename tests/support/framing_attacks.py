"""Requests whose framing one server reads in one way and another in another, and some that all read alike.

Shared by the tests, which send them to a router, and by the fuzzer, which begins with them.
"""

from __future__ import annotations

import json

BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "x"}]}).encode()
INNER_BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "SMUGGLED"}]}).encode()
LINE = b"POST /v1/chat/completions HTTP/1.1"
HOST = b"Host: router.example"
SIZE = b"%x" % len(BODY)
CHUNKS = SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n"
CHUNKED = b"Transfer-Encoding: chunked"
LENGTH = b"Content-Length: %d" % len(BODY)


def request(*lines: bytes, body: bytes = BODY, start: bytes = LINE, host: bytes = HOST, end: bytes = b"\r\n") -> bytes:
    return end.join((start, host, *lines)) + end + end + body


INNER = request(b"Content-Length: %d" % len(INNER_BODY), body=INNER_BODY)


def chunks(*lines: bytes, body: bytes = CHUNKS, coding: bytes = CHUNKED) -> bytes:
    return request(coding, *lines, body=body)


REFUSED: dict[str, bytes] = {
    # two framings in one
    "length and chunked": chunks(LENGTH),
    "chunked and length": request(b"Content-Length: 4", CHUNKED, body=CHUNKS),
    "chunked and length 0": chunks(b"Content-Length: 0"),
    "the same length twice": request(LENGTH, LENGTH),
    "two lengths": request(LENGTH, b"Content-Length: 5"),
    "a list of lengths": request(b"Content-Length: %d, %d" % (len(BODY), len(BODY))),
    "chunked twice": chunks(CHUNKED),
    "chunked and identity": chunks(b"Transfer-Encoding: identity"),
    "length and chunked behind an offer": chunks(LENGTH, b"Connection: Upgrade", b"Upgrade: h2c"),
    "two lengths behind an offer": request(LENGTH, b"Content-Length: 5", b"Connection: Upgrade", b"Upgrade: h2c"),
    # lengths that some read and some do not
    "plus": request(b"Content-Length: +%d" % len(BODY)),
    "minus": request(b"Content-Length: -%d" % len(BODY)),
    "space inside": request(b"Content-Length: 6 4"),
    "hexadecimal": request(b"Content-Length: 0x40"),
    "fraction": request(b"Content-Length: %d.0" % len(BODY)),
    "empty length": request(b"Content-Length:"),
    "no number": request(b"Content-Length: abc"),
    "wide digits": request("Content-Length: \uff16\uff14".encode()),
    "beyond 64 bits": request(b"Content-Length: %d" % (2**64 + len(BODY))),
    "far beyond": request(b"Content-Length: " + b"9" * 100),
    "space before the colon": request(b"Content-Length : %d" % len(BODY)),
    "underscore": request(b"Content_Length: 5", LENGTH),
    # codings that some read and some do not
    "gzip, chunked": chunks(coding=b"Transfer-Encoding: gzip, chunked"),
    "chunked, gzip": chunks(coding=b"Transfer-Encoding: chunked, gzip"),
    "identity": chunks(coding=b"Transfer-Encoding: identity"),
    "xchunked": chunks(coding=b"Transfer-Encoding: xchunked"),
    "quoted": chunks(coding=b'Transfer-Encoding: "chunked"'),
    "with a parameter": chunks(coding=b"Transfer-Encoding: chunked;q=1"),
    "with a comma": chunks(coding=b"Transfer-Encoding: chunked,"),
    "comma first": chunks(coding=b"Transfer-Encoding: ,chunked"),
    "empty coding": chunks(coding=b"Transfer-Encoding:"),
    "vertical tab": chunks(coding=b"Transfer-Encoding: \x0bchunked"),
    "NUL behind": chunks(coding=b"Transfer-Encoding: chunked\0"),
    "high byte behind": chunks(coding=b"Transfer-Encoding: chunked\xff"),
    "coding with a space before the colon": chunks(coding=b"Transfer-Encoding : chunked"),
    "coding with an underscore": request(b"Transfer_Encoding: chunked", LENGTH),
    "folded coding": chunks(coding=b"Transfer-Encoding:\r\n chunked"),
    "coding in HTTP/1.0": request(CHUNKED, body=CHUNKS, start=LINE.replace(b"1.1", b"1.0")),
    # lines
    "folded": request(b"X-A: 1\r\n folded", LENGTH),
    "folded with a tab": request(b"X-A: 1\r\n\tfolded", LENGTH),
    "folded first line": request(LENGTH, host=b" " + HOST),
    "bare LF everywhere": request(LENGTH, end=b"\n"),
    "bare LF": request(b"X-A: 1\nX-B: 2", LENGTH),
    "bare LF before a coding": request(b"X-A: 1\n" + CHUNKED, LENGTH),
    "bare LF ends the head": b"\r\n".join((LINE, HOST, LENGTH)) + b"\r\n\n" + BODY,
    "bare CR": request(b"X-A: 1\rX-B: 2", LENGTH),
    "bare CR at the end": request(b"X-A: 1\r", LENGTH),
    "CR CR": b"\r\n".join((LINE, HOST, LENGTH)) + b"\r\r\n" + BODY,
    "NUL in a name": request(b"X\0A: 1", LENGTH),
    "NUL in a value": request(b"X-A: 1\0", LENGTH),
    "control character": request(b"X-A: \x01", LENGTH),
    "no colon": request(b"X-A", LENGTH),
    "no name": request(b": x", LENGTH),
    "space in a name": request(b"X A: 1", LENGTH),
    "two hosts": request(HOST, LENGTH),
    "list of hosts": request(LENGTH, host=b"Host: a, b"),
    "host with a path": request(LENGTH, host=b"Host: a/b"),
    "host with a user": request(LENGTH, host=b"Host: a@b"),
    "no host": request(LENGTH, host=b"X: y"),
    "two credentials": request(b"Authorization: Bearer a", b"Authorization: Bearer b", LENGTH),
    # chunks
    "chunk extension with LF": chunks(body=SIZE + b";a\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk extension with CR": chunks(body=SIZE + b";a\rb\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk extension with NUL": chunks(body=SIZE + b";a\0\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk extension with a line in quotes": chunks(body=SIZE + b';a="\r\n"' + BODY + b"\r\n0\r\n\r\n"),
    "chunk extension without a name": chunks(body=SIZE + b";\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk extension that never ends": chunks(body=SIZE + b";" + b"a" * 100_000 + CHUNKS[len(SIZE) :]),
    "chunk extensions that add up": chunks(body=(b"1;" + b"a" * 1000 + b"\r\n \r\n") * 99 + CHUNKS),
    "leading zeros that never end": chunks(body=b"0" * 100_000 + CHUNKS),
    "chunk size with a space": chunks(body=SIZE + b" \r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size behind a space": chunks(body=b" " + CHUNKS),
    "chunk size with 0x": chunks(body=b"0x" + CHUNKS),
    "chunk size with a minus": chunks(body=b"-" + CHUNKS),
    "chunk size with a plus": chunks(body=b"+" + CHUNKS),
    "chunk size with an underscore": chunks(body=b"4_0\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk size beyond 64 bits": chunks(body=b"1" + b"0" * 14 + SIZE + b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "no chunk size": chunks(body=b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "chunk lines with LF": chunks(body=SIZE + b"\n" + BODY + b"\n0\n\n"),
    "chunk data with LF": chunks(body=SIZE + b"\r\n" + BODY + b"\n0\r\n\r\n"),
    "chunk data without an end": chunks(body=SIZE + b"\r\n" + BODY + b"0\r\n\r\n"),
    "chunk data with another end": chunks(body=SIZE + b"\r\n" + BODY + b"XX0\r\n\r\n"),
    "chunk line with CR": chunks(body=SIZE + b"\r" + BODY + b"\r\n0\r\n\r\n"),
    "last chunk with LF": chunks(body=SIZE + b"\r\n" + BODY + b"\r\n0\n\n"),
    "trailer that is a length": chunks(body=CHUNKS[:-2] + LENGTH + b"\r\n\r\n"),
    "trailer that is a coding": chunks(body=CHUNKS[:-2] + CHUNKED + b"\r\n\r\n"),
    "trailer without a colon": chunks(body=CHUNKS[:-2] + b"X\r\n\r\n"),
    "trailer with LF": chunks(body=CHUNKS[:-2] + b"X: y\n\r\n"),
    "folded trailer": chunks(body=CHUNKS[:-2] + b"X: y\r\n z\r\n\r\n"),
    # request lines
    "HTTP/0.9": b"GET /v1/models\r\n",
    "HTTP/0.9 with POST": b"POST /v1/chat/completions\r\n\r\n",
    "HTTP/1.2": request(LENGTH, start=LINE.replace(b"1.1", b"1.2")),
    "HTTP/2.0": request(LENGTH, start=LINE.replace(b"1.1", b"2.0")),
    "HTTP/1.10": request(LENGTH, start=LINE + b"0"),
    "http/1.1": request(LENGTH, start=LINE.replace(b"HTTP", b"http")),
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "another scheme": request(LENGTH, start=b"POST ftp://e/v1/chat/completions HTTP/1.1"),
    "a user in the target": request(LENGTH, start=b"POST http://a@e/v1/chat/completions HTTP/1.1"),
    "an authority": request(LENGTH, start=b"POST evil:80 HTTP/1.1"),
    "a fragment": request(LENGTH, start=b"POST /v1/chat/completions#x HTTP/1.1"),
    "space in the target": request(LENGTH, start=b"POST /v1/chat/completions x HTTP/1.1"),
    "tabs in the line": request(LENGTH, start=b"POST\t/v1/chat/completions\tHTTP/1.1"),
    "NUL in the target": request(LENGTH, start=b"POST /v1/chat\0/completions HTTP/1.1"),
    "high byte in the target": request(LENGTH, start=b"POST /v1/chat\xff/completions HTTP/1.1"),
    "backslash": request(LENGTH, start=b"POST /v1\\chat/completions HTTP/1.1"),
    "unknown method": request(LENGTH, start=b"FOO /v1/chat/completions HTTP/1.1"),
    "small letters": request(LENGTH, start=b"post /v1/chat/completions HTTP/1.1"),
    "a space in front": b" " + request(LENGTH),
}
OTHER_REFUSALS: dict[str, tuple[bytes, int]] = {
    "a tunnel": (request(LENGTH, start=b"CONNECT evil:443 HTTP/1.1"), 405),
    "another expectation": (request(b"Expect: 200-ok", LENGTH), 417),
    "two expectations": (request(b"Expect: 100-continue, x", LENGTH), 417),
    "a compressed body": (request(b"Content-Encoding: gzip", LENGTH), 415),
    "too many headers": (request(*[b"A: b"] * 300, LENGTH), 431),
    "headers too long": (request(b"A: " + b"b" * 70_000, LENGTH), 431),
    "trailers without end": (chunks(body=CHUNKS[:-2] + b"X: y\r\n" * 50_000), 431),
    "target too long": (request(LENGTH, start=b"POST /" + b"a" * 70_000 + b" HTTP/1.1"), 431),
    "body too long": (request(b"Content-Length: 99999999"), 413),
    "chunks too long": (chunks(body=(b"8000\r\n" + b"x" * 0x8000 + b"\r\n") * 40), 413),
}
SERVED: dict[str, tuple[bytes, int]] = {
    "length": (request(LENGTH), 200),
    "leading zeros": (request(b"Content-Length: 00%d" % len(BODY)), 200),
    "space around the length": (request(b"Content-Length:\t%d " % len(BODY)), 200),
    "chunked": (chunks(), 200),
    "ChUnKeD": (chunks(coding=b"transfer-encoding: ChUnKeD"), 200),
    "chunk extension": (chunks(body=SIZE + b";a=b\r\n" + BODY + b"\r\n0\r\n\r\n"), 200),
    "trailers": (chunks(body=CHUNKS[:-2] + b"X-T: 1\r\nAuthorization: Bearer x\r\n\r\n"), 200),
    "an offer": (chunks(b"Connection: Upgrade", b"Upgrade: h2c"), 200),
    "a named framing header": (chunks(b"Connection: Transfer-Encoding, keep-alive"), 200),
    "a whole URL": (request(LENGTH, start=b"POST http://evil/v1/chat/completions HTTP/1.1"), 200),
    "HTTP/1.0, kept": (request(LENGTH, b"Connection: keep-alive", start=LINE.replace(b"1.1", b"1.0")), 200),
    "empty lines in front": (b"\r\n\r\n" + request(LENGTH), 200),
    "two slashes": (request(LENGTH, start=b"POST //evil/v1/chat/completions HTTP/1.1"), 404),
    "dots": (request(LENGTH, start=b"POST /v1/../v1/chat/completions HTTP/1.1"), 404),
    "escaped line end": (request(LENGTH, start=b"POST /v1/chat/completions%0d%0aX:y HTTP/1.1"), 404),
    "a body of a GET": (request(LENGTH, start=b"GET /no HTTP/1.1"), 404),
    "no length at all": (request(body=b""), 400),
}
