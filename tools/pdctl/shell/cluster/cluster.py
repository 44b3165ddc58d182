"""One embedded cluster: up, down, and what can be asked of it. The command line and the tests use this class.

What ends it is in `removal`, whose it is in `claims`, how signals are taken in `signals`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pdctl.core.cluster.audit import AuditEvent, parse_events
from pdctl.core.cluster.layout import DEFAULT_NAME, PREFIX, node_name
from pdctl.shell.cluster import network
from pdctl.shell.cluster.api import Api
from pdctl.shell.cluster.build import build_programs
from pdctl.shell.cluster.cgroups import clusters_with_cgroups
from pdctl.shell.cluster.claims import Claim, is_busy, one_at_a_time, owners
from pdctl.shell.cluster.images import import_archive, pack_development_images, pack_pause
from pdctl.shell.cluster.machine import require
from pdctl.shell.cluster.orders import order
from pdctl.shell.cluster.places import ClusterError, layout_of, make_state, state_folder
from pdctl.shell.cluster.readiness import Waiter, wait_for_control_plane, wait_for_node, wait_for_runtime
from pdctl.shell.cluster.removal import leftovers, remove_everything
from pdctl.shell.cluster.signals import uninterrupted
from pdctl.shell.cluster.start import Wishes, start


def _silent(_text: str) -> None:
    """Nobody wants to know."""


class EmbeddedCluster:
    """``say`` gets remarks worth a line, ``progress`` what changes often."""

    def __init__(
        self,
        name: str = DEFAULT_NAME,
        wishes: Wishes | None = None,
        *,
        say: Callable[[str], None] = _silent,
        progress: Callable[[str], None] = _silent,
    ) -> None:
        self.layout = layout_of(name)
        self.wishes = wishes or Wishes()
        self._say = say
        self._progress = progress
        self._claim: Claim | None = None

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.layout.name

    @property
    def kubeconfig(self) -> Path:
        """The administrator's; works on the machine and inside the cluster's network."""
        return self.layout.kubeconfig

    @property
    def api(self) -> Api:
        """A client of the API server with the administrator's certificate."""
        return Api(self.kubeconfig)

    # --- up and down ------------------------------------------------------------------------------------------------

    def claim(self) -> None:
        """Keep the name for this process until `down` or its end; `up` does so by itself.

        Raises:
            ClusterError: another living process has it.
        """
        if self._claim is None:
            self._claim = Claim(self.name)

    def up(self, *, replace: bool = False) -> None:
        """Start it and wait until it is usable. A cluster of this name that is up is kept if it is of the same kind,
        unless it is to be replaced.

        Raises:
            ClusterError: it can't be started; nothing is left of it then.
        """
        require(light=self.wishes.light, say=self._say)
        folder = build_programs(self._say)
        with one_at_a_time(self.name, self._say):
            if replace and self.is_up:
                self._say(f"cluster {self.name} is up already and makes room for a new one")
            elif self._keep_running_one():
                return
            self.claim()
            begun = time.monotonic()
            try:
                self._clean()
                self._start(folder)
                self._say(f"cluster {self.name} is up after {time.monotonic() - begun:.1f} s")
            except BaseException as error:
                try:
                    if not isinstance(error, Exception):
                        self._say(f"cleaning up cluster {self.name}; further signals wait until that is done")
                finally:
                    self._clean()
                    self.disclaim()
                if isinstance(error, OSError):
                    where = error.filename or self.layout.state
                    raise ClusterError(f"cluster {self.name}: {where}: {error.strerror or error}") from error
                raise

    def down(self) -> None:
        """End it and remove everything. Nothing happens where there is nothing.

        Raises:
            ClusterError: something can't be removed; the text says what.
        """
        with one_at_a_time(self.name, self._say):
            self._clean()
        self.disclaim()

    def __enter__(self) -> EmbeddedCluster:
        self.up()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.down()

    @property
    def owner(self) -> int | None:
        """The living process that started it for its own use, such as a demo or a test run."""
        return owners().get(self.name)

    @property
    def is_up(self) -> bool:
        """Was it started to the end, and does node 0 still run?"""
        return self.layout.record.exists() and network.init_of(self.layout.netns()) is not None

    def disclaim(self) -> None:
        """Leave the name to others."""
        if self._claim is not None:
            self._claim.release()
            self._claim = None

    def _keep_running_one(self) -> bool:
        if not self.is_up:
            return False
        if self._record()["wishes"] != json.loads(json.dumps(self.wishes.as_json())):
            raise ClusterError(f"a cluster {self.name} with other settings is up; take it down first")
        self._say(f"cluster {self.name} is up already")
        return True

    def _start(self, folder: Path) -> None:
        count = 1 if self.wishes.light else self.wishes.nodes.count
        make_state(self.layout)
        waiter = Waiter(self.layout, count, self._progress)
        port = start(self.layout, self.wishes, folder)
        api = self.api
        if not self.wishes.light:
            archives = (pack_pause(folder / "pause"), pack_development_images(self.wishes.extra_mounts))
            for node in range(count):
                init = wait_for_runtime(waiter, node, self.layout.netns(node))
                for archive in archives:
                    self._import_packed(waiter, init, archive)
        wait_for_control_plane(waiter, api)
        if not self.wishes.light:
            for name in self.wishes.nodes.names:
                wait_for_node(waiter, api, name, self.wishes.nodes.labels, self.wishes.nodes.devices)
        record = {"wishes": self.wishes.as_json(), "programs": str(folder), "api_port": port}
        self.layout.record.write_text(json.dumps(record, indent=1), encoding="utf-8")

    def _import_packed(self, waiter: Waiter, init: int, archive: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self.layout.state, suffix=".tar") as file:
            file.write(archive)
            file.flush()

            def imported() -> bool:
                # containerd's socket is there some time before it answers.
                try:
                    import_archive(init, Path(file.name))
                except ClusterError:
                    if waiter.seconds > 60:
                        raise
                    return False
                return True

            waiter.until("images", imported)

    def _clean(self) -> None:
        with uninterrupted():
            remove_everything(self.layout)

    def leftovers(self) -> list[str]:
        """Everything of this cluster that exists on the machine: namespaces, cgroups, mounts, files."""
        return leftovers(self.layout)

    # --- while it is up -----------------------------------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """For a client process: this cluster's kubeconfig, our programs first on the PATH.

        The discovery cache of kubectl and helm is kept by address, and a later cluster may get the same one.
        """
        return {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "KUBECACHEDIR": str(self.layout.state / "kube-cache"),
            "PATH": f"{self._record()['programs']}:{os.environ.get('PATH', '')}",
        }

    def inside(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs another one in the cluster's network: for pod and Service addresses."""
        return network.enter(self.layout.netns(), list(argv))

    def inside_with_names(self, argv: Sequence[str]) -> list[str]:
        """The same, with the cluster's name server where it has one: `NAME.NAMESPACE.svc` are known, as in a pod."""
        if self._record()["wishes"]["light"]:
            return self.inside(argv)
        return self.inside(network.with_resolver(self.layout.node_resolver, list(argv)))

    def run(self, argv: Sequence[str], *, stdin: str | None = None, check: bool = True) -> str:
        """Run `kubectl …`, `helm …` or anything else as a client. Returns its standard output.

        Raises:
            ClusterError: it failed, and ``check``; the text has what it said.
        """
        done = subprocess.run(
            list(argv),
            env=self.environment(),
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            check=False,
        )
        if check and done.returncode:
            raise ClusterError(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}".strip())
        return done.stdout

    def kubectl(self, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
        """kubectl with the administrator's kubeconfig."""
        return self.run(["kubectl", *arguments], stdin=stdin, check=check)

    def helm(self, *arguments: str, check: bool = True) -> str:
        """helm with the administrator's kubeconfig."""
        return self.run(["helm", *arguments], check=check)

    def load_image(self, archive: Path) -> None:
        """Give an OCI or Docker archive to every node."""
        if self._record()["wishes"]["light"]:
            raise ClusterError(f"cluster {self.name} is light: it has no node that could take images")
        for netns in network.namespaces_of(self.name):
            init = network.init_of(netns)
            if init is None:
                raise ClusterError(f"{netns}: the node is gone")
            import_archive(init, archive)

    def audit_position(self) -> int:
        """Where the audit log ends now, in bytes; `audit_events` reads on from there."""
        with contextlib.suppress(FileNotFoundError):
            return self.layout.audit_log.stat().st_size
        return 0

    def audit_events(self, since: int = 0) -> list[AuditEvent]:
        """Requests that the API server has answered since a position. It logs before it answers, so none is missing."""
        with self.layout.audit_log.open("rb") as file:
            file.seek(since)
            content = file.read()
        return parse_events(content[: content.rfind(b"\n") + 1].splitlines())

    def stop_daemon(self, name: str, node: int = 0) -> None:
        """SIGKILL to a daemon; it stays down until `start_daemon`."""
        order(self.layout.node_folder(node) / "control", "stop", name)

    def start_daemon(self, name: str, node: int = 0) -> None:
        """Start a stopped daemon; running ones are left alone. Returns before it is ready."""
        order(self.layout.node_folder(node) / "control", "start", name)

    def signal_daemon(self, name: str, number: signal.Signals, node: int = 0) -> None:
        """A signal to a running daemon: SIGSTOP stalls it, SIGCONT lets it go on."""
        order(self.layout.node_folder(node) / "control", "signal", name, number)

    def wait_until_ready(self) -> None:
        """After a daemon was started again."""
        wait_for_control_plane(Waiter(self.layout, 0, self._progress), self.api)

    def status(self) -> dict[str, Any]:
        """What there is, for people and programs; `state` is up, busy (starting or ending), broken or absent."""
        if not self.is_up:
            state = ("busy" if is_busy(self.name) else "broken") if self.leftovers() else "absent"
            return {"name": self.name, "state": state}
        record = self._record()
        return {
            "name": self.name,
            "state": "up",
            "mode": "light" if record["wishes"]["light"] else "full",
            "server": self.api.server,
            "kubeconfig": str(self.kubeconfig),
            "audit_log": str(self.layout.audit_log),
            "logs": str(self.layout.logs),
            "network_namespace": str(network.netns_path(self.layout.netns())),
            "programs": record["programs"],
            "ended_daemons": self._ended(),
        }

    def _record(self) -> dict[str, Any]:
        try:
            record: dict[str, Any] = json.loads(self.layout.record.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise ClusterError(f"cluster {self.name} is not up") from error
        return record

    def _ended(self) -> list[str]:
        found = []
        for node in range(len(network.namespaces_of(self.name))):
            with contextlib.suppress(FileNotFoundError):
                text = (self.layout.node_folder(node) / "ended").read_text(encoding="utf-8")
                found += [f"{node_name(node)}: {line}" for line in text.splitlines()]
        return found


def known_clusters() -> list[str]:
    """Names of all clusters of which anything exists."""
    names = network.clusters_with_namespaces() | clusters_with_cgroups(PREFIX)
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        names |= {path.name for path in state_folder().iterdir() if path.is_dir()}
    return sorted(names)
