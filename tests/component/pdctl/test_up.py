"""`pdctl up` as a user meets it: a program at a terminal that is stopped, killed, or loses a process."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from pdctl.shell.app import app


@pytest.fixture
def up(world) -> Iterator["Up"]:
    program = Up(world)
    yield program
    program.close()


class Up:
    """One `pdctl up` with fake programs."""

    def __init__(self, world) -> None:
        self.world = world
        self.process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str, stdout: int = subprocess.PIPE) -> "Up":
        # The fakes stand in for the router's interpreter too, which `up` takes from the interpreter it runs in.
        code = (
            "import sys; from pdctl.shell import local; real = local.find_programs;"
            "local.find_programs = lambda engine, router: real(engine, engine);"
            "from pdctl.__main__ import main; main()"
        )
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-c", code, "up", "-f", str(self.world.spec), "--engine-python", self.world.python),
                *("--log-dir", str(self.world.folder / "logs"), "--stop-grace", "5", *arguments),
            ],
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **self.world.env},
        )
        return self

    def read_until(self, text: str) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:
            seen += line
            if text in line:
                return seen
        raise AssertionError(f"{text!r} never came:\n{seen[-3000:]}")

    def finish(self) -> tuple[int, str]:
        assert self.process is not None
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_everything(up, world, number):
    seen = up.start().read_until("stop with Ctrl-C")
    assert "prefill-0 | prefill begins" in seen
    assert "router    | router begins" in seen
    world.wait_for_workers(3)
    assert up.process is not None
    up.process.send_signal(number)
    code, output = up.finish()
    assert code == 0
    assert f"{number.name}: stopping" in output
    assert output.endswith("everything is stopped\n")
    assert world.alive() == {}


def test_a_signal_during_start_stops_everything_and_fails(up, world):
    world.behave("prefill", "slow")
    up.start().read_until("prefill begins")
    assert up.process is not None
    up.process.send_signal(signal.SIGINT)
    code, output = up.finish()
    assert code == 128 + signal.SIGINT, output[-3000:]
    assert world.alive() == {}


def test_sigkill_of_pdctl_leaves_no_orphan(up, world):
    up.start().read_until("stop with Ctrl-C")
    world.wait_for_workers(3)
    assert len(world.alive()) == 6
    assert up.process is not None
    up.process.kill()
    assert len(world.scratch_left()) == 4
    world.wait_until_empty(10)
    world.wait_until_no_segments(5)
    world.wait_until_no_scratch(5)


def test_a_death_stops_everything_and_says_which_and_why(up, world):
    up.start().read_until("stop with Ctrl-C")
    world.wait_for_workers(3)
    victim = next(pid for pid, name in world.alive().items() if name == "decode")
    os.kill(victim, signal.SIGKILL)
    code, output = up.finish()
    assert code == 1
    assert "pdctl     | decode-0 was ended by SIGKILL" in output
    assert world.alive() == {}


def test_a_death_at_start_gives_the_reason(up, world):
    world.behave("prefill", "dies at start")
    code, output = up.start("--quiet").finish()
    assert code == 1
    assert "prefill-0 exited with code 3 before it was ready" in output
    assert "ValueError: the model is too big" in output
    assert world.alive() == {}


def test_a_taken_port_is_refused_by_name(up, world):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, output = up.start("--router-port", str(port)).finish()
    assert code == 2
    assert output == f"port {port} for the router is taken; give another one, or none to have one chosen\n"
    assert world.pids() == {}


def test_a_refused_start_leaves_no_folder(world, monkeypatch):
    temporary = world.folder / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    arguments = ["up", "-f", str(world.spec), "--engine-python"]
    for interpreter in ("/nowhere/python", shutil.which("true")):
        result = CliRunner().invoke(app, [*arguments, interpreter])
        assert result.exit_code == 2, result.output
    assert list(temporary.iterdir()) == []


def test_logs_that_cannot_be_written_are_refused(up, world):
    code, output = up.start("--log-dir", "/proc/x").finish()
    assert code == 2
    assert "/proc/x: cannot be written to: " in output
    assert world.pids() == {}


def test_a_model_that_is_not_there_is_refused_with_what_makes_it(up, world):
    shutil.rmtree(world.folder / "model")
    code, output = up.start().finish()
    model = world.folder / "model"
    assert code == 2
    advice = f"`pdctl model make {model}` makes the tiny model there"
    assert output == f"{world.spec}: spec.model.name: {model} does not exist; {advice}\n"


@pytest.mark.parametrize(("content", "what"), [("folder", "holds no config.json"), ("file", "is not a folder")])
def test_a_model_that_is_none_is_refused(up, world, content, what):
    model = world.folder / "model"
    shutil.rmtree(model)
    model.mkdir() if content == "folder" else model.touch()
    code, output = up.start().finish()
    assert code == 2
    assert f"{model} {what}" in output


def test_a_reader_that_leaves_stops_everything(up, world):
    up.start().read_until("stop with Ctrl-C")
    world.wait_for_workers(3)
    assert up.process is not None
    assert up.process.stdout is not None
    up.process.stdout.close()
    # The next line that is printed finds the pipe closed.
    victim = next(pid for pid, name in world.alive().items() if name == "router")
    os.kill(victim, signal.SIGKILL)
    assert up.process.wait(60) in (0, 1)
    assert world.alive() == {}


def test_settings_reach_the_deployment(up, world):
    seen = up.start("--set", "spec.decode.replicas=2", "--set", "spec.model.servedName=other").read_until("Ctrl-C")
    assert "decode-1 is ready" in seen
    assert "serving other at http://127.0.0.1:" in seen


def test_wrong_settings_are_named(up):
    code, output = up.start("--set", "spec.decode.replica=2").finish()
    assert code == 2
    assert "spec.decode.replica" in output
    assert "did you mean replicas?" in output
