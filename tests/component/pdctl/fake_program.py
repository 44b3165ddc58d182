"""Stands in for the engine's and the router's interpreter: listens where the arguments say and answers 200.

The mode is read from files in FAKE_DIR named like the process (`prefill`, `decode`, `router`), so that a test can
change how the next start behaves. Every process that comes into being notes its pid there.
"""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from multiprocessing import shared_memory
from pathlib import Path

FOLDER = Path(os.environ["FAKE_DIR"])


def main() -> None:
    if sys.argv[1] == "-c":
        # A question to the interpreter, not an engine: the real one answers it.
        os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
    name, port = _identity(sys.argv[1:])
    note_pid(name)
    mode = (FOLDER / name).read_text() if (FOLDER / name).exists() else ""
    print(f"{name} begins", flush=True)
    if mode == "dies at start":
        print("Traceback (most recent call last):\nValueError: the model is too big\n", file=sys.stderr)
        print("RuntimeError: Engine core initialization failed. See root cause above.", file=sys.stderr)
        sys.exit(3)
    if mode == "slow":
        time.sleep(600)
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # A worker in a session of its own that nobody would find by process group.
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import fake_program as f; f.worker({name!r})"
    )
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    # Shared memory, which outlives a killed process unless somebody removes it.
    segment = shared_memory.SharedMemory(create=True, size=64)
    (FOLDER / "segments").mkdir(exist_ok=True)
    (FOLDER / "segments" / segment.name).touch()
    if name != "router":
        leave_socket()
    print("x" * 200_000, flush=True)
    http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer).serve_forever()


def worker(name: str) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    note_pid(f"{name}-worker")
    time.sleep(600)


def leave_socket() -> None:
    """As vLLM does: a socket named by a UUID, and a file where its processes meet; it removes neither."""
    path = f"{os.environ.get('VLLM_RPC_BASE_PATH', tempfile.gettempdir())}/{uuid.uuid4()}"
    socket.socket(socket.AF_UNIX).bind(path)
    (FOLDER / "sockets").mkdir(exist_ok=True)
    meeting = tempfile.mkstemp(prefix="vllm_dist_")[1]
    (FOLDER / "sockets" / f"{os.getpid()}-meeting").write_text(meeting)
    (FOLDER / "sockets" / str(os.getpid())).write_text(path)


def note_pid(name: str) -> None:
    (FOLDER / "pids" / str(os.getpid())).write_text(name)


def _identity(arguments: list[str]) -> tuple[str, int]:
    if "pd_router" in arguments:
        return "router", int(arguments[arguments.index("--admin") + 1].rpartition(":")[2])
    config = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    role = {"kv_producer": "prefill", "kv_consumer": "decode"}[config["kv_role"]]
    return role, int(arguments[arguments.index("--port") + 1])


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: object) -> None:
        pass


if __name__ == "__main__":
    main()
