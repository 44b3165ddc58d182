"""Stands in for an engine where only the pod matters: answers health checks on the port of vLLM's command line.

It takes any arguments, uses no library, and ends at once on SIGTERM. Generation is refused with 501, so that nobody
takes it for an engine.
"""

from __future__ import annotations

import http.server
import json
import signal
import sys


class Server(http.server.ThreadingHTTPServer):
    """``model`` is the name that it says it serves."""

    model = ""


class Handler(http.server.BaseHTTPRequestHandler):
    """GET: health, an empty metrics page, the served model. Anything else: 501."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in ("/health", "/ping", "/load"):
            self.answer(200, "text/plain", b"")
        elif path == "/metrics":
            self.answer(200, "text/plain; version=0.0.4", b"")
        elif path == "/v1/models":
            models = {"object": "list", "data": [{"id": self.server.model, "object": "model"}]}
            self.answer(200, "application/json", json.dumps(models).encode())
        else:
            self.answer(404, "text/plain", b"not here\n")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.answer(501, "text/plain", b"this is a stand-in, not an engine\n")

    def answer(self, status: int, kind: str, body: bytes) -> None:
        """One whole answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Probes come every second; they are not worth a line."""


def option(arguments: list[str], names: tuple[str, ...], default: str) -> str:
    """The value of `--name VALUE` or `--name=VALUE`, the last one."""
    found = default
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            found = value if equals else arguments[i + 1]
    return found


def main(arguments: list[str]) -> None:
    """Serve until told to stop."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    host = option(arguments, ("--host",), "")
    port = int(option(arguments, ("--port",), "8000"))
    server = Server((host, port), Handler)
    server.model = option(arguments, ("--served-model-name",), option(arguments, ("--model",), "stand-in"))
    print(f"stand-in listens on {host or '*'}:{port}; called with {arguments}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
