"""`pdctl cluster demo`: the cluster is always taken down, and without one the local demo is played."""

import signal
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pdctl.shell.app import app
from pdctl.shell.cluster import demo_command
from pdctl.shell.cluster.places import ClusterError
from pdctl.shell.cluster.signals import Interrupted
from pdctl.shell.demo_report import DemoOrder


@pytest.fixture
def world(monkeypatch, tmp_path):
    """Runs the command with a stand-in for the cluster, whose inner process is a piece of Python."""
    done: list[str] = []

    def run(
        inner: str = "", up_fails: BaseException | None = None, *more: str, taken: str = ""
    ) -> tuple[int, str, list[str]]:
        class Cluster:
            is_up = False

            def __init__(self, name: str, **_listeners: object) -> None:
                done.append(f"cluster {name}")

            def claim(self) -> None:
                if taken:
                    raise ClusterError(taken)
                done.append("claim")

            def disclaim(self) -> None:
                done.append("disclaim")

            def down(self) -> None:
                done.append("down")

            def up(self, *, replace: bool) -> None:
                assert replace
                if up_fails is not None:
                    raise up_fails
                done.append("up")
                self.is_up = True

            def inside(self, argv: list[str]) -> list[str]:
                done.append(" ".join(argv[2:5]))
                return [sys.executable, "-c", inner]

            def environment(self) -> dict[str, str]:
                return {}

        async def local(order: DemoOrder) -> int:
            done.append(f"local demo of {order.plan.turns} turns")
            return 0

        monkeypatch.setattr(demo_command, "EmbeddedCluster", Cluster)
        monkeypatch.setattr(demo_command, "cached_tiny_model", lambda _say: tmp_path)
        monkeypatch.setattr(demo_command, "run_local_demo", local)
        files = Path(__file__).parents[3]
        arguments = ["--chart", str(files / "charts/pd-operator"), "--example", str(files / "examples/cpu-tiny.yaml")]
        result = CliRunner().invoke(app, ["cluster", "demo", *arguments, "--out", str(tmp_path / "out"), *more])
        return result.exit_code, result.output, done

    return run


@pytest.mark.parametrize("code", [0, 1, 7])
def test_the_inner_part_decides_the_exit_code_and_the_cluster_goes_down(world, code):
    found, output, done = world(f"import sys; sys.exit({code})")
    assert found == code
    assert done == ["cluster demo", "claim", "up", "pdctl cluster demo-inside", "down"]
    assert "nothing is left" in output


def test_a_signal_ends_the_inner_part_and_the_cluster(world):
    inner = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    code, output, done = world(inner)
    assert code == 128 + 15
    assert done[-1] == "down"
    assert "SIGTERM: stopping" in output


def test_a_signal_while_the_cluster_starts_takes_it_down(world):
    code, output, done = world(up_fails=Interrupted(signal.SIGHUP))
    assert code == 128 + 1
    assert done == ["cluster demo", "claim", "down"]
    assert "ended by SIGHUP" in output


def test_a_terminal_that_has_gone_away_is_no_reason_to_leave_the_cluster(world, monkeypatch):
    settled = []

    def settle(_self: object) -> None:
        settled.append(1)
        if len(settled) > 1:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(demo_command.Console, "settle", settle)
    code, _, done = world("")
    assert code == 1
    assert done[-1] == "down"


def test_a_cluster_is_kept_only_if_it_is_up(world):
    assert world("", None, "--keep")[2][-1] == "pdctl cluster demo-inside"
    assert world("", Interrupted(signal.SIGTERM), "--keep")[2][-1] == "down"


def test_it_tells_that_somebody_killed_the_inner_part(world):
    code, output, done = world("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 1
    assert "FAILED: the part that runs in the cluster was ended by SIGKILL" in output
    assert done[-1] == "down"


def test_a_second_demo_is_refused_and_leaves_the_first_alone(world):
    code, output, done = world(taken="cluster demo is in use by process 7")
    assert code == 2
    assert "in use by process 7" in output
    assert done == ["cluster demo"]


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (ClusterError("this machine allows no namespaces"), "this machine allows no namespaces"),
        (OSError(28, "No space left on device", "/cache"), "/cache: No space left on device"),
    ],
)
def test_without_a_cluster_the_reason_is_told_and_the_local_demo_is_played(world, failure, words):
    code, output, done = world(up_fails=failure)
    assert code == 0
    assert f"no cluster can be started here: {words}" in output
    assert done == ["cluster demo", "claim", "disclaim", "local demo of 7 turns"]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--longest", "17000"), "spec.model.maxModelLen, 16384"),
        (("--out", "/proc/x"), "/proc/x: cannot be written to"),
        (("--example", "README.md"), "README.md"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_started(world, more, words):
    code, output, done = world("", None, *more)
    assert code == 2
    assert words in output
    assert done == []
