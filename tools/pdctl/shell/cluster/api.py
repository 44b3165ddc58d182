"""Ask a cluster's API server, with the standard library: what starting and watching a cluster needs, and tests like."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import urllib.parse
from pathlib import Path
from typing import Any, Final

TIMEOUT: Final = 10.0
APPLY: Final = "application/apply-patch+yaml"
MERGE: Final = "application/merge-patch+json"


class ApiError(Exception):
    """An answer with a status of 400 or more; ``status`` is 0 when there was no answer at all."""

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text if status == 0 else f"{status}: {text}")


class Api:
    """One connection per call: the server may have been stopped and started in between."""

    def __init__(self, kubeconfig: Path, *, timeout: float = TIMEOUT) -> None:
        raw = json.loads(kubeconfig.read_text(encoding="ascii"))
        cluster, user = raw["clusters"][0]["cluster"], raw["users"][0]["user"]
        self.server: str = cluster["server"]
        self._address = urllib.parse.urlsplit(self.server)
        self._timeout = timeout
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode("ascii")
        self._tls = ssl.create_default_context(cadata=authority)
        # ssl reads a client's certificate from files only; they lie beside the kubeconfig.
        pki = kubeconfig.parent / "pki"
        self._tls.load_cert_chain(pki / "admin.crt", pki / "admin.key")
        assert user["client-certificate-data"] == base64.b64encode((pki / "admin.crt").read_bytes()).decode("ascii")

    def get(self, path: str) -> Any:
        """The JSON of a path.

        Raises:
            ApiError: no answer, or a bad one.
        """
        return self.request("GET", path)

    def request(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """Send JSON, get JSON (or text, where the answer is none).

        Raises:
            ApiError: no answer, or a bad one.
        """
        kind, text = self._send(method, path, body, content_type)
        return json.loads(text) if kind == "application/json" else text

    def watch(self, path: str) -> list[Any]:
        """The events of a watch, once the server has ended it. ``path`` has its `watch=true` itself.

        Raises:
            ApiError: refused, or not ended within this client's time limit of silence.
        """
        _, text = self._send("GET", path, None, "application/json")
        return [json.loads(line) for line in text.splitlines()]

    def _send(self, method: str, path: str, body: Any, content_type: str) -> tuple[str, str]:
        connection = _Connection(self._address.hostname or "", self._address.port or 443, self._timeout, self._tls)
        payload = None if body is None else json.dumps(body).encode()
        headers = {"Accept": "application/json", **({} if payload is None else {"Content-Type": content_type})}
        try:
            connection.request(method, path, payload, headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise ApiError(0, f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        if answer.status >= 400:
            raise ApiError(answer.status, _message(text))
        return answer.headers.get_content_type(), text


class _Connection(http.client.HTTPConnection):
    """TLS on a socket that is this object's before it is connected.

    The library's own class loses a socket that is reset between connecting and the handshake, which is what happens
    while the API server is down.
    """

    def __init__(self, host: str, port: int, timeout: float, tls: ssl.SSLContext) -> None:
        super().__init__(host, port, timeout)
        self._tls = tls

    def connect(self) -> None:
        """Connect and shake hands; `close` is enough after a failure."""
        self.sock = self._tls.wrap_socket(socket.socket(socket.AF_INET), server_hostname=self.host)
        self.sock.settimeout(self.timeout)
        self.sock.connect((self.host, self.port))


def _message(text: str) -> str:
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text[:500]
