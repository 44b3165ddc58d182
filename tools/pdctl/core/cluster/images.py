"""The images of the embedded cluster. Their roots are all but empty: the machine's own Python is mounted into them.

An image says in the file `/.host-mounts` which paths of the machine its containers see, read-only; the node's runc
wrapper (`cluster_assets/go/node/hostmounts`) reads it. Pod specs stay what they are in production, without a hostPath.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pdctl.core.cluster.config import PAUSE_IMAGE
from pdctl.core.cluster.oci import Entry, Image

MOUNT_LIST: Final = ".host-mounts"
NON_ROOT: Final = "65532:65532"
ENGINE_IMAGE: Final = "localhost/pd-engine-cpu:dev"
ROUTER_IMAGE: Final = "localhost/pd-router:dev"
OPERATOR_IMAGE: Final = "localhost/pd-operator:dev"
CONNECTOR_IMAGE: Final = "localhost/pd-connector:dev"
STAND_IN_IMAGE: Final = "localhost/stand-in:dev"
STAND_IN_FOLDER: Final = "/opt/stand-in/bin"
PLUGIN_FOLDER: Final = "/plugin"
TINY_MODEL: Final = "models/tiny-model"
"""Where `examples/cpu-tiny.yaml` looks for its model inside a pod."""
_SYSTEM_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PASSWD: Final = (
    "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534::/:/bin/false\nnonroot:x:65532:65532::/tmp:/bin/false\n"
)
_GROUP: Final = "root:x:0:\nnogroup:x:65534:\nnonroot:x:65532:\n"


@dataclass(frozen=True, slots=True)
class Host:
    """What of the machine the containers see.

    ``mounts``: absolute paths, outermost first; ``links``: the root's own links, such as bin → usr/bin; ``python_bin``:
    the folder with `python`, `vllm` and our programs; ``architecture``: Go's name; ``tiny_model``: the model that the
    CPU example names, None where it can't be made.
    """

    mounts: tuple[str, ...]
    links: Mapping[str, str]
    python_bin: str
    architecture: str
    tiny_model: str | None = None


def pause_image(program: bytes) -> Image:
    """What containerd starts for each pod."""
    return Image(PAUSE_IMAGE, (Entry("pause", 0o755, program),), entrypoint=("/pause",), user="65535:65535")


def development_images(host: Host, stand_in: bytes, plugin: Mapping[str, bytes]) -> tuple[Image, ...]:
    """Operator, router, connector, CPU engine and the stand-in for an engine.

    ``stand_in`` is its Python source; ``plugin`` maps paths such as `pd_connector/…` to the connector's files.
    """
    base = base_entries(host)
    env = {
        "PATH": f"{host.python_bin}:{_SYSTEM_PATH}",
        "HOME": "/tmp",
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    script = f"#!{host.python_bin}/python\n".encode() + stand_in
    contents = {"vllm": script, "stand-in": script} | {name: _no_engine(host, name) for name in ("python", "python3")}
    programs = tuple(Entry(f"{STAND_IN_FOLDER}/{name}", 0o755, content) for name, content in contents.items())
    model = () if host.tiny_model is None else (Entry(TINY_MODEL, target=host.tiny_model),)
    files = tuple(Entry(f"{PLUGIN_FOLDER}/{path}", 0o644, plugin[path]) for path in sorted(plugin))
    return (
        Image(OPERATOR_IMAGE, base, env, ("pd-operator",), ("run",), user=NON_ROOT),
        Image(ROUTER_IMAGE, base, env, ("pd-router",), user=NON_ROOT),
        Image(CONNECTOR_IMAGE, (*base, *files), env, user=NON_ROOT),
        Image(ENGINE_IMAGE, (*base, *model), env, ("vllm",)),
        Image(STAND_IN_IMAGE, (*base, *programs), env | {"PATH": f"{STAND_IN_FOLDER}:{env['PATH']}"}, ("stand-in",)),
    )


def _no_engine(host: Host, name: str) -> bytes:
    """`python` and `python3` of the stand-in: there is no engine that could be started by its module's name, as the CPU
    profile does it, and no accelerator that the connector's self-test could try."""
    lines = (
        "#!/bin/sh",
        'case "$*" in',
        '"-m pd_connector.selftest"*) echo "a stand-in has nothing to test"; exit 0 ;;',
        '"-m vllm.entrypoints.openai.api_server "*) exec stand-in "$@" ;;',
        "esac",
        f'exec {host.python_bin}/{name} "$@"',
    )
    return ("\n".join(lines) + "\n").encode()


def base_entries(host: Host) -> tuple[Entry, ...]:
    """An empty root with the places that a pod's mounts need, and the list of the machine's paths."""
    return (
        *(Entry(folder) for folder in ("dev", "etc", "proc", "run", "sys", "var/tmp")),
        Entry("tmp", 0o1777),
        # Open to all: the interpreter may lie below it.
        Entry("root"),
        Entry("etc/passwd", 0o644, _PASSWD.encode()),
        Entry("etc/group", 0o644, _GROUP.encode()),
        Entry("etc/nsswitch.conf", 0o644, b"passwd: files\ngroup: files\nhosts: files dns\n"),
        *(Entry(name, target=target) for name, target in sorted(host.links.items())),
        Entry(MOUNT_LIST, 0o644, json.dumps(list(host.mounts)).encode()),
    )


def outermost(paths: Sequence[str]) -> tuple[str, ...]:
    """The paths without those that lie below another one, sorted."""
    kept: list[str] = []
    for path in sorted(set(paths)):
        if not any(path.startswith(f"{other}/") for other in kept):
            kept.append(path)
    return tuple(kept)
