"""The image whose `vllm` is the fake engine, for the nodes of an embedded cluster.

Like the development images it holds next to nothing and names what of the machine its containers see, here with the
tests' own folder. Two tags with the same content, so that a test can change an image.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Final

from pdctl.core.cluster.images import Host, base_entries
from pdctl.core.cluster.oci import Entry, Image, pack_archive
from pdctl.shell.cluster.cluster import EmbeddedCluster
from pdctl.shell.cluster.images import host_architecture, observe_host

FAKE_IMAGE: Final = "localhost/fake-engine:dev"
OTHER_IMAGE: Final = "localhost/fake-engine:other"
TESTS: Final = Path(__file__).resolve().parents[1]
_FOLDER: Final = "/opt/fake-engine/bin"


def load_fake_engine(cluster: EmbeddedCluster) -> None:
    """Give it to every node."""
    with NamedTemporaryFile(suffix=".tar") as file:
        file.write(pack_archive(_images(observe_host((str(TESTS),))), host_architecture()))
        file.flush()
        cluster.load_image(Path(file.name))


def _images(host: Host) -> list[Image]:
    programs = {"vllm": _engine(host), "python": _python(host), "python3": _python(host)}
    entries = (
        *base_entries(host),
        *(Entry(f"{_FOLDER}/{name}", 0o755, "\n".join(lines).encode() + b"\n") for name, lines in programs.items()),
    )
    env = {
        "PATH": f"{_FOLDER}:{host.python_bin}:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return [Image(name, entries, env, ("vllm",)) for name in (FAKE_IMAGE, OTHER_IMAGE)]


def _engine(host: Host) -> tuple[str, ...]:
    # The pod's PYTHONPATH first: the connector must be the one that was brought into the pod.
    run = f"exec {host.python_bin}/python -m support.cluster_serving_engine"
    return ("#!/bin/sh", f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{TESTS}"', f'{run} "$@"')


def _python(host: Host) -> tuple[str, ...]:
    """CPU engines are started as a module; the self-test has no NIXL here that it could try."""
    return (
        "#!/bin/sh",
        'case "$*" in',
        f'"-m vllm.entrypoints.openai.api_server "*) shift 2; exec {_FOLDER}/vllm serve "$@" ;;',
        '"-m pd_connector.selftest "*) exit 0 ;;',
        f'"-m support."*) export PYTHONPATH="{TESTS}" ;;',
        "esac",
        f'exec {host.python_bin}/python3 "$@"',
    )
