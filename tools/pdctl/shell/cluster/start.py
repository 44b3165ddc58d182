"""Prepare a cluster's files and namespaces and start its process 1s. What to write is decided in `core.cluster`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pdctl.core.cluster import config, daemons, init_plan, nodes
from pdctl.core.cluster.layout import Layout, node_name
from pdctl.shell.cluster import init, network, pki
from pdctl.shell.cluster.cgroups import make_cgroups
from pdctl.shell.cluster.machine import SYSTEM_PATH
from pdctl.shell.cluster.places import ClusterError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Wishes:
    """What kind of cluster. ``extra_mounts``: more of the machine's paths that the development images see."""

    light: bool = False
    nodes: nodes.Nodes = field(default_factory=nodes.Nodes)
    watch_seconds: int | None = None
    extra_mounts: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For the record of a running cluster."""
        return asdict(self)


def start(layout: Layout, wishes: Wishes, folder: Path) -> int:
    """Start everything; ready is somebody else's question. ``folder`` holds the programs. Returns the API's port."""
    programs = _programs(folder, light=wishes.light)
    with socket.socket() as listener:
        # Made here, in the machine's network; node 0's forwarder inherits it. The number is also the API server's.
        listener.bind((LOOPBACK, 0))
        listener.listen(256)
        port: int = listener.getsockname()[1]
        _write_shared_files(layout)
        count = 0 if wishes.light else wishes.nodes.count
        pki.make_certificates(layout, count, f"https://{LOOPBACK}:{port}")
        if wishes.light:
            network.make_light_network(layout, port)
        else:
            network.make_network(layout, count, port)
            make_cgroups(layout.cgroup, [node_name(node) for node in range(count)])
        settings = daemons.ControlPlane(port, wishes.watch_seconds)
        control = (
            *daemons.control_plane(layout, programs, settings),
            daemons.forwarder(programs, listener.fileno(), port),
        )
        if not wishes.light:
            control = (*control, daemons.name_server(layout, programs, port))
        for node in range(max(count, 1)):
            parts = control if node == 0 else ()
            if not wishes.light:
                _write_node_files(layout, programs, wishes.nodes.size, node)
                parts += daemons.worker(layout, programs, node, wishes.nodes.devices)
            _start_node(layout, wishes, node, parts, listener.fileno())
    return port


def _write_shared_files(layout: Layout) -> None:
    layout.logs.mkdir(parents=True, exist_ok=True)
    _write(layout.audit_policy, config.audit_policy())
    # A pod with dnsPolicy Default gets this: no resolver.
    _write(layout.state / "resolv.conf", "")
    _write(layout.node_resolver, config.node_resolv_conf())


def _write_node_files(layout: Layout, programs: daemons.Programs, size: nodes.Size, node: int) -> None:
    folder = layout.node_folder(node)
    _write(folder / "cni" / "10-pods.conflist", config.cni_network(node))
    _write(folder / "containerd.toml", config.containerd_toml(layout, programs, node, _containerd_major(programs)))
    _write(folder / "kubelet.json", config.kubelet(layout, node))
    _write(folder / "kube-proxy.json", config.kube_proxy(layout, node))
    for name, value in init_plan.KUBELET_SYSCTLS.items():
        _write(init_plan.sysctl_file(layout, node, name), f"{value}\n")
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    for path, content in nodes.render_size(size, meminfo).items():
        _write(folder / path, content)


def _start_node(layout: Layout, wishes: Wishes, node: int, parts: tuple[daemons.Daemon, ...], listener: int) -> None:
    folder = layout.node_folder(node)
    (folder / "pod-logs").mkdir(parents=True, exist_ok=True)
    steps = init_plan.private_mounts(layout, node, os.path.realpath("/etc/resolv.conf"), wishes.nodes.size.disk)
    if not wishes.light:
        steps += init_plan.kubelet_mounts(layout, node, wishes.nodes.size)
    plan = folder / "plan.json"
    _write(plan, json.dumps(init_plan.render_plan(layout, node, steps, parts), indent=1))
    unshare = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--propagation", "slave")
    python = (sys.executable, "-I", "-S", init.__file__, str(plan))
    with (layout.logs / f"init.{node_name(node)}.log").open("ab") as log:
        # Forked away at once: a cluster outlives the command that started it.
        done = subprocess.run(
            ["setsid", "--fork", *network.enter(layout.netns(node), [*unshare, *python])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(layout.name),
            pass_fds=[listener] if node == 0 else [],
            check=False,
        )
    if done.returncode:
        raise ClusterError(f"setsid ended with {done.returncode}")


def _programs(folder: Path, *, light: bool) -> daemons.Programs:
    if light:
        return daemons.Programs(folder)
    found = {
        name: shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}") for name in ("containerd", "runc")
    }
    return daemons.Programs(folder, **{name: Path(path) for name, path in found.items() if path})


def mark_of(name: str) -> str:
    """In the environment of a cluster's processes, by which they are found before they are in its namespaces, too."""
    return f"PD_CLUSTER={name}"


def _environment(name: str) -> Mapping[str, str]:
    """Daemons get a plain environment: a proxy setting, say, would send their loopback traffic out."""
    key, _, value = mark_of(name).partition("=")
    return {"PATH": SYSTEM_PATH, "HOME": "/root", "LANG": "C.UTF-8", key: value}


def _containerd_major(programs: daemons.Programs) -> int:
    done = subprocess.run([str(programs.containerd), "--version"], capture_output=True, text=True, check=False)
    words = done.stdout.split()
    version = words[2].lstrip("v") if len(words) > 2 else ""
    if not version[:1].isdigit():
        raise ClusterError(f"{programs.containerd} doesn't say its version: {done.stdout}{done.stderr}")
    return int(version.partition(".")[0])


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
