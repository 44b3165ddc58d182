"""Image archives are deterministic and whole; images for the embedded cluster hold what their pods need."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.core.profiles import CPU_LAUNCHER
from pdctl.core.cluster.images import (
    CONNECTOR_IMAGE,
    ENGINE_IMAGE,
    MOUNT_LIST,
    OPERATOR_IMAGE,
    PLUGIN_FOLDER,
    ROUTER_IMAGE,
    STAND_IN_FOLDER,
    STAND_IN_IMAGE,
    Host,
    development_images,
    outermost,
)
from pdctl.core.cluster.oci import Entry, Image, pack_archive, pack_tar

HOST = Host(("/usr", "/opt/env", "/src/router"), {"bin": "usr/bin", "lib": "usr/lib"}, "/opt/env/bin", "amd64")
IMAGES = {
    image.name: image
    for image in development_images(HOST, b"print('here')\n", {"pd_connector/__init__.py": b"# plugin\n"})
}


def unpack(archive: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}  # type: ignore[union-attr]


def members(archive: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: member for member in tar}


def read_images(archive: bytes) -> dict[str, tuple[dict[str, Any], bytes]]:
    """Follow every digest of an archive, checking it: name → (configuration, layer)."""
    files = unpack(archive)

    def blob(descriptor: dict[str, Any]) -> bytes:
        content = files["blobs/" + descriptor["digest"].replace(":", "/")]
        assert hashlib.sha256(content).hexdigest() == descriptor["digest"].removeprefix("sha256:")
        assert len(content) == descriptor["size"]
        return content

    found = {}
    for descriptor in json.loads(files["index.json"])["manifests"]:
        manifest = json.loads(blob(descriptor))
        config = json.loads(blob(manifest["config"]))
        [layer] = [blob(one) for one in manifest["layers"]]
        assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(layer).hexdigest()]
        found[descriptor["annotations"]["io.containerd.image.name"]] = (config, layer)
    return found


def test_equal_content_gives_equal_bytes_and_every_digest_is_right():
    archive = pack_archive(IMAGES.values(), "amd64")
    assert archive == pack_archive(list(IMAGES.values()), "amd64")
    assert set(read_images(archive)) == set(IMAGES)
    assert {config["architecture"] for config, _ in read_images(archive).values()} == {"amd64"}


def test_a_layer_knows_no_owner_and_no_time_and_has_its_parent_folders():
    found = members(pack_tar([Entry("/a/b/c", 0o644, b"x"), Entry("a/link", target="b/c"), Entry("a", 0o700)]))
    assert list(found) == ["a", "a/b", "a/b/c", "a/link"]
    assert {(one.uid, one.gid, one.mtime, one.uname) for one in found.values()} == {(0, 0, 0, "")}
    assert (found["a/b/c"].mode, found["a/b"].mode, found["a/link"].linkname) == (0o644, 0o755, "b/c")


@given(content=st.binary(max_size=2000), path=st.from_regex(r"[a-z]{1,80}(/[a-z]{1,80}){0,3}", fullmatch=True))
def test_files_come_back_as_they_were(content: bytes, path: str):
    assert unpack(pack_tar([Entry(path, content=content)])) == {path: content}


@pytest.mark.parametrize("name", [OPERATOR_IMAGE, ROUTER_IMAGE, CONNECTOR_IMAGE])
def test_our_programs_are_not_root_by_a_number(name: str):
    # Kubernetes can't tell from a name that a user is not root.
    assert IMAGES[name].user == "65532:65532"


@pytest.mark.parametrize("name", sorted(IMAGES))
def test_every_image_sees_the_machines_python_first_on_the_path(name: str):
    config, layer = read_images(pack_archive([IMAGES[name]], "amd64"))[name]
    environment = dict(pair.split("=", 1) for pair in config["config"]["Env"])
    folders = environment["PATH"].split(":")
    assert folders[: 1 + (name == STAND_IN_IMAGE)][-1] == HOST.python_bin
    assert json.loads(unpack(layer)[MOUNT_LIST]) == list(HOST.mounts)
    found = members(layer)
    assert (found["bin"].linkname, found["tmp"].mode) == ("usr/bin", 0o1777)
    # Nothing of the machine is packed where it will be mounted, and a non-root user can pass every folder.
    assert not [path for path in found if f"/{path}".startswith(HOST.mounts)]
    assert all(one.mode & 0o005 == 0o005 for one in found.values() if one.isdir())


def test_the_stand_in_takes_the_engines_place_on_the_path():
    layer = unpack(read_images(pack_archive([IMAGES[STAND_IN_IMAGE]], "amd64"))[STAND_IN_IMAGE][1])
    program = layer[f"{STAND_IN_FOLDER}/vllm".lstrip("/")]
    assert program == b"#!/opt/env/bin/python\nprint('here')\n"
    # The connector's self-test comes before the engine, in the engine's image.
    assert b"-m pd_connector.selftest" in layer[f"{STAND_IN_FOLDER}/python3".lstrip("/")]
    assert IMAGES[STAND_IN_IMAGE].env["PATH"].startswith(f"{STAND_IN_FOLDER}:")
    assert STAND_IN_FOLDER not in IMAGES[ENGINE_IMAGE].env["PATH"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["vllm", "serve", "m"], "stand-in: serve m"),
        ([*CPU_LAUNCHER, "m", "--port", "1"], "stand-in: -m vllm.entrypoints.openai.api_server --model m --port 1"),
        (["python3", "-m", "pd_connector.selftest", "--backend", "UCX"], "a stand-in has nothing to test"),
        (["python", "-c", "print(2 + 3)"], "5"),
        (["python3", "-c", "print(2 + 3)"], "5"),
    ],
    ids=["GPU profile", "CPU profile", "self-test", "other Python", "other Python 3"],
)
def test_whatever_an_engine_is_started_with_the_stand_in_stands_in(tmp_path: Path, command: list[str], said: str):
    host = Host((), {}, str(Path(sys.executable).parent), "amd64")
    source = b"import sys\nprint('stand-in:', *sys.argv[1:])\n"
    images = {image.name: image for image in development_images(host, source, {})}
    for path, content in unpack(
        read_images(pack_archive([images[STAND_IN_IMAGE]], "amd64"))[STAND_IN_IMAGE][1]
    ).items():
        if f"/{path}".startswith(STAND_IN_FOLDER):
            (tmp_path / Path(path).name).write_bytes(content)
            (tmp_path / Path(path).name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said


def test_the_connector_image_carries_the_plugin_itself():
    layer = unpack(read_images(pack_archive([IMAGES[CONNECTOR_IMAGE]], "amd64"))[CONNECTOR_IMAGE][1])
    assert layer[f"{PLUGIN_FOLDER}/pd_connector/__init__.py".lstrip("/")] == b"# plugin\n"


def test_a_command_and_an_entrypoint_are_kept():
    image = Image("localhost/x:1", (), {}, ("a", "b"), ("c",), user="1:2", workdir="/w")
    config = read_images(pack_archive([image], "arm64"))["localhost/x:1"][0]
    assert config["config"] == {"Env": [], "WorkingDir": "/w", "User": "1:2", "Entrypoint": ["a", "b"], "Cmd": ["c"]}


@pytest.mark.parametrize(
    ("paths", "kept"),
    [
        (["/usr", "/usr/lib", "/opt"], ("/opt", "/usr")),
        (["/a/b", "/a", "/a-b"], ("/a", "/a-b")),
        (["/x/tools", "/x/tools2", "/x/tools"], ("/x/tools", "/x/tools2")),
    ],
    ids=["below", "prefix-of-a-name", "twice"],
)
def test_only_the_outermost_paths_are_mounted(paths: list[str], kept: tuple[str, ...]):
    assert outermost(paths) == kept
