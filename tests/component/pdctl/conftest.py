"""A folder in which fake programs run, and a way to see that none of them is left."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

FAKE = Path(__file__).with_name("fake_program.py")
SPEC = """
apiVersion: pdserving.dev/v1alpha1
kind: PDDeployment
metadata: {name: fake}
spec:
  nodeProfile: CPU
  model: {name: ./model, servedName: fake}
"""


@dataclass
class FakeWorld:
    """Where the fakes live."""

    folder: Path

    @property
    def python(self) -> str:
        """Give this as the interpreter of engines and router."""
        return str(self.folder / "python")

    @property
    def env(self) -> dict[str, str]:
        """What a fake needs to find its folder."""
        return {"FAKE_DIR": str(self.folder)}

    @property
    def spec(self) -> Path:
        """A PDDeployment file."""
        return self.folder / "fake.yaml"

    def behave(self, name: str, mode: str) -> None:
        """How the next start of `prefill`, `decode` or `router` behaves."""
        (self.folder / name).write_text(mode)

    def pids(self) -> dict[int, str]:
        """Everything that ever started here."""
        return {int(path.name): path.read_text() for path in (self.folder / "pids").iterdir()}

    def alive(self) -> dict[int, str]:
        """What runs right now; zombies don't."""
        found = {}
        for pid, name in self.pids().items():
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state != "Z":
                found[pid] = name
        return found

    def segments_left(self) -> list[str]:
        """Shared memory that a fake made and nobody removed."""
        made = [path.name for path in (self.folder / "segments").iterdir()]
        assert made
        return [name for name in made if Path("/dev/shm", name.lstrip("/")).exists()]

    def scratch_left(self) -> list[str]:
        """Sockets and temporary files that a fake made, or the folder that they were in, and nobody removed."""
        made = [Path(path.read_text()) for path in (self.folder / "sockets").iterdir()]
        assert made
        return [str(path) for path in made if path.exists() or path.parent.exists()]

    def wait_until_no_scratch(self, seconds: float) -> None:
        """Until none of those is left; fails with the paths of what is."""
        deadline = time.monotonic() + seconds
        while left := self.scratch_left():
            assert time.monotonic() < deadline, f"left: {left}"
            time.sleep(0.02)

    def wait_until_no_segments(self, seconds: float) -> None:
        """Until no shared memory is left; fails with the names of what is."""
        deadline = time.monotonic() + seconds
        while left := self.segments_left():
            assert time.monotonic() < deadline, f"left in shared memory: {left}"
            time.sleep(0.02)

    def wait_for_workers(self, count: int) -> None:
        """Until that many workers have come into being."""
        deadline = time.monotonic() + 20
        while sum(name.endswith("-worker") for name in self.pids().values()) < count:
            assert time.monotonic() < deadline, f"only {self.pids()} came into being"
            time.sleep(0.02)

    def wait_until_empty(self, seconds: float) -> None:
        """Until nothing is left; fails with the names of what is."""
        deadline = time.monotonic() + seconds
        while left := self.alive():
            assert time.monotonic() < deadline, f"still running: {left}"
            time.sleep(0.02)


@pytest.fixture
def world(tmp_path: Path) -> FakeWorld:
    (tmp_path / "pids").mkdir()
    launcher = tmp_path / "python"
    launcher.write_text(f"#!{sys.executable}\nimport runpy\nrunpy.run_path({str(FAKE)!r}, run_name='__main__')\n")
    launcher.chmod(0o755)
    (tmp_path / "fake.yaml").write_text(SPEC)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return FakeWorld(tmp_path)
