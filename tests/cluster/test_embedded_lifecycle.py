"""A cluster's beginning and end, orderly and not: whatever happens in between, `down` leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdctl.core.cluster.nodes import Nodes
from pdctl.shell.cluster import cgroups, network
from pdctl.shell.cluster.api import ApiError
from pdctl.shell.cluster.cluster import EmbeddedCluster, known_clusters
from pdctl.shell.cluster.places import ClusterError
from pdctl.shell.cluster.start import Wishes
from support.clusters import cluster_for_tests, eventually, exists

PDCTL = (sys.executable, "-c", "from pdctl.shell.cluster.command import app; app(prog_name='pdctl cluster')")
NAMESPACES = "/api/v1/namespaces"


@pytest.fixture
def cluster() -> Iterator[EmbeddedCluster]:
    """A light one that is not up yet. Whatever a test leaves of it must go without an error."""
    one = cluster_for_tests("life", Wishes(light=True))
    yield one
    one.down()
    assert one.leftovers() == []


def pdctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PDCTL, *arguments], capture_output=True, text=True, check=False)


def pdctl_with(arguments: tuple[str, ...], change: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(changed(arguments, change), capture_output=True, text=True, check=False)


def changed(arguments: tuple[str, ...], change: str) -> list[str]:
    """A command line whose program makes a change to itself first."""
    code = f"from pdctl.shell.cluster import command, demo_command; {change}; command.app(prog_name='pdctl cluster')"
    return [sys.executable, "-c", code, *arguments]


@contextlib.contextmanager
def interruptible(arguments: tuple[str, ...], change: str = "pass") -> Iterator[subprocess.Popen[str]]:
    """A program in a process group of its own."""
    argv = changed(arguments, change)
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        yield process


def test_the_command_line_from_up_to_down(cluster: EmbeddedCluster):
    name = ("--name", cluster.name)
    assert "is up after" in pdctl("up", "--light", *name).stdout
    status = json.loads(pdctl("status", "--json", *name).stdout)
    assert (status["state"], status["mode"], status["ended_daemons"]) == ("up", "light", [])
    assert f"{cluster.name:<20} up       light" in pdctl("list").stdout.splitlines()
    assert pdctl("kubectl", *name, "get", "--raw", "/readyz").stdout == "ok"
    assert pdctl("exec", *name, "sh", "-c", "kubectl get --raw /readyz; exit 7").returncode == 7
    assert pdctl("helm", *name, "list").stdout.startswith("NAME")
    again = pdctl("up", "--light", *name)
    assert (again.returncode, "is up already" in again.stdout) == (0, True)
    other = pdctl("up", "--light", "--watch-seconds", "9", *name)
    assert (other.returncode, "with other settings is up" in other.stderr) == (1, True)
    image = pdctl("load-image", *name, os.devnull)
    assert image.returncode
    assert "nothing is left" in pdctl("down", *name).stdout
    assert pdctl("down", *name).returncode == 0
    assert pdctl("status", *name).returncode == 1
    assert "no cluster" in pdctl("kubectl", *name, "get", "ns").stderr
    assert cluster.name not in known_clusters()


def test_nothing_is_left_after_down(cluster: EmbeddedCluster):
    cluster.up()
    api = cluster.api
    init = network.init_of(cluster.layout.netns())
    inside = network.processes_in(cluster.layout.netns())
    assert init in inside
    assert len(inside) >= 5
    cluster.down()
    # Killed, and taken note of by the machine's process 1, which does so in its own time.
    eventually("processes gone", lambda: not [pid for pid in inside if os.path.exists(f"/proc/{pid}")])
    assert cluster.leftovers() == []
    with pytest.raises(ApiError, match="refused"):
        api.get("/readyz")
    assert cluster.status() == {"name": cluster.name, "state": "absent"}


def test_a_killed_up_can_be_cleaned_and_repeated(cluster: EmbeddedCluster):
    starting = subprocess.Popen([*PDCTL, "up", "--light", "--name", cluster.name], stdout=subprocess.DEVNULL)
    with starting:
        eventually("its process 1", lambda: network.init_of(cluster.layout.netns()))
        assert cluster.status()["state"] == "busy"
        starting.kill()
    assert cluster.status()["state"] == "broken"
    cluster.up()
    assert cluster.status()["state"] == "up"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("moment", ["network", "process-1", "apiserver"])
def test_a_signal_while_it_starts_leaves_nothing(cluster: EmbeddedCluster, moment: str, number: signal.Signals):
    reached: dict[str, Callable[[], object]] = {
        "network": lambda: network.namespaces_of(cluster.name),
        "process-1": lambda: network.init_of(cluster.layout.netns()),
        "apiserver": lambda: (cluster.layout.logs / "apiserver.log").exists(),
    }
    with interruptible(("up", "--light", "--name", cluster.name)) as starting:
        eventually(moment, reached[moment])
        # To the whole group and more than once, as `make` and an impatient user do.
        os.killpg(starting.pid, number)
        eventually("cleaning up", lambda: starting.poll() is not None or os.killpg(starting.pid, number) is None)
        output, _ = starting.communicate()
    assert starting.returncode == 128 + number
    assert f"cleaning up cluster {cluster.name}" in output
    assert f"ended by {number.name}" in output
    assert cluster.leftovers() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_a_node_starts_leaves_nothing(number: signal.Signals):
    cluster = cluster_for_tests("node")
    with interruptible(("up", "--name", cluster.name)) as starting:
        eventually("kubelet", lambda: (cluster.layout.logs / "kubelet.log").exists())
        os.killpg(starting.pid, number)
        assert starting.stdout is not None
        assert any("cleaning up" in line for line in starting.stdout)
        os.killpg(starting.pid, signal.SIGINT)
        starting.communicate()
    assert starting.returncode == 128 + number
    assert cluster.leftovers() == []


def test_a_demo_that_is_ended_while_its_cluster_starts_leaves_nothing(tmp_path: Path):
    cluster = cluster_for_tests("demo")
    arguments = ("demo", "--out", str(tmp_path))
    with interruptible(arguments, f"demo_command.NAME = {cluster.name!r}") as playing:
        eventually("kubelet", lambda: (cluster.layout.logs / "kubelet.log").exists())
        assert cluster.owner == playing.pid
        second = pdctl_with(arguments, f"demo_command.NAME = {cluster.name!r}")
        assert second.returncode == 2
        assert f"{cluster.name} is in use by process {playing.pid} " in second.stderr
        assert playing.poll() is None
        os.killpg(playing.pid, signal.SIGHUP)
        output, _ = playing.communicate()
    assert playing.returncode == 128 + signal.SIGHUP
    assert "nothing is left" in output
    assert cluster.leftovers() == []


def test_what_was_not_in_its_namespaces_yet_is_found_by_its_mark(cluster: EmbeddedCluster):
    waiting = subprocess.Popen(["sleep", "120"], env={"PD_CLUSTER": cluster.name}, start_new_session=True)
    with waiting:
        cluster.down()
        assert waiting.wait(60) == -signal.SIGKILL


def test_what_a_killed_look_at_the_machine_has_left_goes_with_the_next():
    gone = "pdprobe-4999999"
    cgroups.make_cgroups(gone, [])
    assert cgroups.leftover_cgroups(gone)
    assert cgroups.try_cgroup() == ""
    assert cgroups.leftover_cgroups(gone) == []


def test_a_full_state_folder_is_told_before_anything_is_started(cluster: EmbeddedCluster, tmp_path: Path):
    # The file system is this process's alone.
    code = f'mount -t tmpfs -o size=1m tmpfs {tmp_path} && XDG_STATE_HOME={tmp_path} exec "$@"'
    argv = ["unshare", "--mount", "sh", "-c", code, "sh", *PDCTL, "up", "--light", "--name", cluster.name]
    refused = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "1 MB of free space, and 200 MB are needed" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_state_folder_that_becomes_full_fails_the_start_in_words(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
):
    def full(_text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cluster, "_progress", full)
    with pytest.raises(ClusterError, match=rf"{cluster.layout.state}: No space left on device"):
        cluster.up()
    assert cluster.leftovers() == []
    assert cluster.owner is None


def test_a_cluster_belongs_to_the_process_that_started_it(cluster: EmbeddedCluster):
    cluster.up()
    refused = pdctl("down", "--name", cluster.name)
    assert refused.returncode == 1
    assert f"{cluster.name} by process {os.getpid()} (" in refused.stderr
    assert cluster.is_up
    assert f"used by process {os.getpid()}" in pdctl("list").stdout
    assert pdctl("down", "--yes", "--name", cluster.name).returncode == 0
    assert cluster.leftovers() == []


def test_a_cluster_whose_process_1_was_killed_is_broken_and_can_be_removed(cluster: EmbeddedCluster):
    cluster.up()
    init = network.init_of(cluster.layout.netns())
    assert init is not None
    os.kill(init, signal.SIGKILL)
    eventually("all gone", lambda: not network.processes_in(cluster.layout.netns()))
    assert cluster.status()["state"] == "broken"
    assert cluster.name in known_clusters()


def test_a_daemon_that_is_killed_comes_back(cluster: EmbeddedCluster):
    cluster.up()
    cluster.api.request("POST", NAMESPACES, {"metadata": {"name": "kept"}})
    cluster.signal_daemon("apiserver", signal.SIGKILL)
    eventually("noted", lambda: cluster.status()["ended_daemons"] == ["node-0: apiserver ended with -9"])
    cluster.wait_until_ready()
    assert exists(cluster.api, f"{NAMESPACES}/kept")


def test_a_stopped_daemon_stays_down_until_it_is_started(cluster: EmbeddedCluster):
    cluster.up()
    cluster.stop_daemon("apiserver")
    with pytest.raises(ApiError) as failed:
        cluster.api.get("/readyz")
    assert failed.value.status == 0
    with pytest.raises(ClusterError, match="apiserver does not run"):
        cluster.signal_daemon("apiserver", signal.SIGCONT)
    cluster.start_daemon("apiserver")
    cluster.wait_until_ready()
    with pytest.raises(ClusterError, match="nobody"):
        cluster.stop_daemon("nobody")


def test_a_failed_start_says_why_and_leaves_nothing(cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pdctl.core.cluster.daemons.SERVICE_CIDR", "not a network")
    with pytest.raises(ClusterError, match=r"(?s)apiserver ended with 1.*service-cluster-ip-range"):
        cluster.up()
    assert cluster.leftovers() == []


def test_without_the_right_to_make_namespaces_it_refuses(cluster: EmbeddedCluster):
    argv = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", *PDCTL, "up", "--name", cluster.name]
    refused = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "namespaces can't be made here: unshare" in refused.stderr
    assert cluster.leftovers() == []


def test_down_refuses_to_end_itself(cluster: EmbeddedCluster):
    cluster.up()
    refused = subprocess.run(
        cluster.inside([*PDCTL, "down", "--name", cluster.name]), capture_output=True, text=True, check=False
    )
    assert "run it outside" in refused.stderr
    assert cluster.is_up


def test_wishes_that_differ_are_told_apart():
    assert Wishes(nodes=Nodes(count=2)).as_json() != Wishes().as_json()
