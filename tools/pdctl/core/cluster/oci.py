"""Pack OCI images without a container engine: files in memory → one archive with any number of images.

Deterministic: equal content gives equal bytes, with no time, owner or order of the machine in it. One uncompressed
layer per image, because the images for the embedded cluster hold next to nothing.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

MEDIA: Final = "application/vnd.oci.image."


@dataclass(frozen=True, slots=True)
class Entry:
    """One path of a layer: a folder, a file (``content``), or a symbolic link (``target``)."""

    path: str
    mode: int = 0o755
    content: bytes | None = None
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Image:
    """``name`` has registry, repository and tag; ``user`` is `UID:GID`, empty for root."""

    name: str
    entries: tuple[Entry, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    user: str = ""
    workdir: str = "/"


def pack_archive(images: Iterable[Image], architecture: str) -> bytes:
    """An OCI image layout as a tar file, for `ctr images import`. ``architecture`` is Go's name: amd64, arm64."""
    blobs: dict[str, bytes] = {}
    manifests = [_add_image(blobs, image, architecture) for image in images]
    index = _json({"schemaVersion": 2, "mediaType": f"{MEDIA}index.v1+json", "manifests": manifests})
    files = {"oci-layout": _json({"imageLayoutVersion": "1.0.0"}), "index.json": index}
    files |= {f"blobs/sha256/{digest}": blobs[digest] for digest in sorted(blobs)}
    return pack_tar(Entry(path, 0o644, content) for path, content in files.items())


def pack_tar(entries: Iterable[Entry]) -> bytes:
    """A tar file of the entries in their order, all owned by root, at time 0. Missing parent folders are added."""
    buffer = io.BytesIO()
    seen: set[str] = set()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for entry in entries:
            path = entry.path.strip("/")
            parents = path.split("/")[:-1]
            for depth in range(1, len(parents) + 1):
                _add(tar, seen, Entry("/".join(parents[:depth])))
            _add(tar, seen, entry)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, seen: set[str], entry: Entry) -> None:
    path = entry.path.strip("/")
    if path in seen and entry.content is None and entry.target is None:
        return
    seen.add(path)
    info = tarfile.TarInfo(path)
    info.mode = entry.mode
    if entry.target is not None:
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.target, 0o777
    elif entry.content is None:
        info.type = tarfile.DIRTYPE
    else:
        info.size = len(entry.content)
    tar.addfile(info, io.BytesIO(entry.content or b""))


def _add_image(blobs: dict[str, bytes], image: Image, architecture: str) -> dict[str, Any]:
    layer = pack_tar(image.entries)
    settings: dict[str, Any] = {"Env": [f"{name}={value}" for name, value in image.env.items()]}
    settings |= {"WorkingDir": image.workdir, "User": image.user}
    if image.entrypoint:
        settings["Entrypoint"] = list(image.entrypoint)
    if image.command:
        settings["Cmd"] = list(image.command)
    config = _json(
        {
            "architecture": architecture,
            "os": "linux",
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{MEDIA}manifest.v1+json",
            "config": _describe(blobs, "config.v1+json", config),
            "layers": [_describe(blobs, "layer.v1.tar", layer)],
        }
    )
    names = {"io.containerd.image.name": image.name, "org.opencontainers.image.ref.name": image.name.rpartition(":")[2]}
    return {**_describe(blobs, "manifest.v1+json", manifest), "annotations": names}


def _describe(blobs: dict[str, bytes], kind: str, content: bytes) -> dict[str, Any]:
    digest = _digest(content)
    blobs[digest.removeprefix("sha256:")] = content
    return {"mediaType": f"{MEDIA}{kind}", "digest": digest, "size": len(content)}


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True).encode()
