"""LocalDeployment with fake programs: starting, dying, restarting, hanging, stopping, and what is left afterwards."""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import pytest

from pd_operator.core.parse import parse_deployment
from pdctl.core.exits import Exit
from pdctl.core.ports import PortError, PortWishes
from pdctl.shell.files import read_document
from pdctl.shell.lifecycle import Started, StartError, Starting
from pdctl.shell.local import LocalDeployment, LocalOptions


class Recorder:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.ready: list[str] = []
        self.waited_for: set[str] = set()

    def line(self, name: str, text: str) -> None:
        self.lines.append((name, text))

    def starting(self, waiting: Sequence[Starting]) -> None:
        self.waited_for |= {one.name for one in waiting}

    def started(self, process: Started) -> None:
        self.ready.append(process.name)


def make(world, recorder: Recorder | None = None, **changes) -> LocalDeployment:
    options = LocalOptions(
        **{
            "log_dir": world.folder / "logs",
            "engine_python": world.python,
            "router_python": world.python,
            "env": world.env,
            "stop_grace": 5.0,
            **changes,
        }
    )
    return LocalDeployment(parse_deployment(read_document(world.spec)), options, recorder)


async def test_everything_starts_answers_and_is_gone_after_stop(world):
    recorder = Recorder()
    local = make(world, recorder)
    started = await local.start()
    world.wait_for_workers(3)
    assert [one.name for one in started] == recorder.ready
    assert recorder.ready[-1] == "router"
    assert set(recorder.ready) == {"prefill-0", "decode-0", "router"}
    async with aiohttp.ClientSession() as session:
        for url in (*local.urls.prefill, *local.urls.decode, local.urls.admin):
            async with session.get(f"{url}/health") as response:
                assert response.status == 200
    stopped = await local.stop()
    assert stopped[0].name == "router"
    assert {str(one.exit) for one in stopped} == {"was ended by SIGTERM"}
    assert world.alive() == {}
    assert world.scratch_left() == []


async def test_output_reaches_listener_and_log_file(world):
    recorder = Recorder()
    async with make(world, recorder) as local:
        log = local.log("prefill", 0)
    lines = [text for name, text in recorder.lines if name == "prefill-0"]
    assert lines[0] == "prefill begins"
    assert sum(len(line) for line in lines if set(line) == {"x"}) == 200_000
    assert log.read_text().startswith("prefill begins\n" + "x" * 200_000 + "\n")


async def test_death_at_start_says_why_and_stops_the_rest(world):
    world.behave("decode", "dies at start")
    local = make(world)
    with pytest.raises(StartError) as caught:
        await local.start()
    assert caught.value.stopped.exit == Exit(code=3)
    first, *rest = str(caught.value).splitlines()
    assert first.startswith("decode-0 exited with code 3 before it was ready")
    assert first.endswith("ValueError: the model is too big")
    assert any("Engine core initialization failed" in line for line in rest)
    assert str(local.log("decode")) in str(caught.value)
    assert world.alive() == {}


async def test_a_program_that_cannot_be_started_is_named(world):
    local = make(world, engine_python=str(world.folder / "absent"))
    with pytest.raises(StartError, match="No such file"):
        await local.start()
    assert world.alive() == {}


async def test_a_late_process_is_killed_and_named(world, monkeypatch):
    monkeypatch.setattr("pdctl.shell.local.ROUTER_START_SECONDS", 0.5)
    recorder = Recorder()
    local = make(world, recorder)
    # The router listens on another port than the one that is asked.
    key = local._key("router", 0)
    command = local._commands[key]
    local._commands[key] = type(command)(
        command.part, 0, command.argv, command.env, command.url, "http://127.0.0.1:9/readyz"
    )
    with pytest.raises(StartError, match=r"router wasn't ready after 0 s"):
        await local.start()
    assert "router" in recorder.waited_for
    assert "router" not in recorder.ready
    assert world.alive() == {}


async def test_unexpected_death_is_reported_and_a_kill_on_purpose_is_not(world):
    async with make(world) as local:
        world.wait_for_workers(3)
        old = local.pid("prefill")
        killed = await local.kill("prefill")
        assert len(world.scratch_left()) == 2
        assert killed.exit == Exit(signal=signal.SIGKILL)
        assert local.pid("prefill") is None
        assert not any(name.startswith("prefill") for name in world.alive().values())
        assert len(world.segments_left()) == 2
        again = await local.restart("prefill")
        assert again.pid not in (old, None)
        assert again.url == local.urls.prefill[0]
        os.kill(local.pid("decode") or 0, signal.SIGKILL)
        dead = await asyncio.wait_for(local.wait_failure(), 20)
        assert dead.name == "decode-0"
        assert "SIGKILL" in dead.report()
        # What the dead process had started is gone as well, before anybody stops anything.
        assert not any(name.startswith("decode") for name in world.alive().values())
    assert world.alive() == {}
    world.wait_until_no_segments(5)


async def test_a_hanging_process_can_be_stopped(world):
    local = make(world, stop_grace=0.3)
    await local.start()
    local.send_signal("prefill", 0, signal.SIGSTOP)
    stopped = {one.name: one.exit for one in await local.stop()}
    assert stopped["prefill-0"] == Exit(signal=signal.SIGKILL)
    assert world.alive() == {}
    world.wait_until_no_segments(5)


async def test_a_process_deaf_to_sigterm_is_killed_after_the_grace(world):
    world.behave("decode", "deaf")
    local = make(world, stop_grace=0.3)
    await local.start()
    stopped = {one.name: one.exit for one in await local.stop()}
    assert stopped["decode-0"] == Exit(signal=signal.SIGKILL)
    assert stopped["prefill-0"] == Exit(signal=signal.SIGTERM)
    assert world.alive() == {}
    world.wait_until_no_segments(5)


async def test_a_stop_that_is_cancelled_still_leaves_nothing(world):
    world.behave("router", "deaf")
    local = make(world, stop_grace=600.0)
    await local.start()
    world.wait_for_workers(3)
    stopping = asyncio.create_task(local.stop())
    await asyncio.sleep(0.2)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert world.alive() == {}


async def test_a_start_that_is_cancelled_halfway_leaves_nothing(world, monkeypatch):
    halfway = asyncio.Event()
    spawned = []
    real = asyncio.create_subprocess_exec

    async def slow(*arguments, **options):
        spawned.append(await real(*arguments, **options))
        if len(spawned) == 2:
            halfway.set()
            await asyncio.sleep(0.2)
        return spawned[-1]

    monkeypatch.setattr("pdctl.shell.processes.asyncio.create_subprocess_exec", slow)
    starting = asyncio.create_task(make(world).start())
    await halfway.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert [process.returncode for process in spawned] == [0, 0]
    assert world.alive() == {}


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


async def test_a_killed_guard_takes_its_process_along(world):
    local = make(world)
    await local.start()
    world.wait_for_workers(3)
    pid = local.pid("decode") or 0
    os.kill(parent_of(pid), signal.SIGKILL)
    dead = await asyncio.wait_for(local.wait_failure(), 20)
    assert dead.name == "decode-0"
    await local.stop()
    world.wait_until_empty(5)
    world.wait_until_no_segments(5)
    assert world.scratch_left() == []


async def test_sockets_have_room_however_long_the_temporary_folder_is(world, monkeypatch):
    long = world.folder / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    async with make(world):
        assert len(world.scratch_left()) == 4
    assert world.scratch_left() == []


async def test_a_folder_for_sockets_that_the_caller_chose_stays_his(world):
    chosen = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        async with make(world, env={**world.env, "VLLM_RPC_BASE_PATH": str(chosen)}):
            pass
        assert len(os.listdir(chosen)) == 2
    finally:
        shutil.rmtree(chosen)


def environ_of(pid):
    raw = Path(f"/proc/{pid}/environ").read_text()
    return dict(entry.split("=", 1) for entry in raw.split("\0") if entry)


async def test_what_engines_compile_is_kept_and_no_header_is_compiled_in_each(world):
    async with make(world) as local:
        environ = environ_of(local.pid("decode"))
    assert environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] == "0"
    assert not Path(environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(environ["TMPDIR"])


def test_planning_makes_no_folder_for_logs(world, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(world.folder / "model"))
    local = make(world, log_dir=None)
    assert [path.name for path in (world.folder / "model").iterdir()] == ["config.json"]
    assert local.log("prefill").parent.parent == world.folder / "model"
    local._claims.release()


async def test_two_runs_never_share_a_port(world):
    first, second = make(world), make(world)
    ports = [
        url.rpartition(":")[2]
        for urls in (first.urls, second.urls)
        for url in (*urls.prefill, *urls.decode, urls.router, urls.admin)
    ]
    assert len(set(ports)) == len(ports) == 8
    wish = PortWishes(router=int(first.urls.router.rpartition(":")[2]))
    with pytest.raises(PortError, match="for the router is taken"):
        make(world, ports=wish)
    await first.stop()
    third = make(world, ports=wish)
    assert third.urls.router == first.urls.router
    await third.stop()
    await second.stop()


async def test_roles_that_do_not_exist_are_refused(world):
    local = make(world)
    with pytest.raises(ValueError, match="no decode 1"):
        local.pid("decode", 1)
    with pytest.raises(ValueError):
        local.pid("drafter")
    with pytest.raises(ValueError, match="was not started"):
        await local.kill("decode")
    await local.stop()
