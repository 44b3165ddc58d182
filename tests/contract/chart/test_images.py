"""What the Containerfile puts together, without a container engine: the wheel, the packages of each image, their start
scripts, and the connector's copy. The file itself is read, never run.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest

from pd_operator.core.names import router_name
from pd_operator.core.render_children import render_children
from pd_operator.core.render_context import RenderContext
from pd_operator.core.render_router_objects import ADMIN_PORT, HTTP_PORT, USER
from pd_operator.core.render_volumes import CONNECTOR_PATH
from support.charts import only, render
from support.pddeployments import deployment

ROOT: Final = Path(__file__).parents[3]
IMAGES: Final = ROOT / "images"
PROGRAMS: Final = {"operator": "pd-operator", "router": "pd-router"}
ALL: Final = ("operator", "router", "connector")
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@dataclass
class Stage:
    """One `FROM`: what it is built on, and its instructions as (word, rest)."""

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all_of(self, word: str) -> list[str]:
        return [rest for name, rest in self.steps if name == word]

    def last(self, word: str) -> str:
        return self.all_of(word)[-1]


def read_containerfile() -> tuple[dict[str, str], dict[str, Stage]]:
    """Arguments with their defaults, and the stages by name."""
    text = re.sub(r"^#.*\n", "", (IMAGES / "Containerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for line in text.replace("\\\n", " ").splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "ARG" and not stages:
            name, _, default = rest.partition("=")
            arguments[name] = default
        elif word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name] = Stage(base)
        elif word:
            stages[list(stages)[-1]].steps.append((word, " ".join(rest.split())))
    return arguments, stages


ARGUMENTS, STAGES = read_containerfile()


def whole(target: str) -> Stage:
    """A stage with the steps of the stages that it is built on."""
    stage = STAGES[target]
    below = whole(stage.base).steps if stage.base in STAGES else []
    return Stage(stage.base, [*below, *stage.steps])


def copies(target: str, source: str) -> dict[str, str]:
    """What a target copies out of another stage: from → to."""
    pairs = [shlex.split(rest) for rest in STAGES[target].all_of("COPY")]
    return {words[1]: words[2] for words in pairs if words[0] == f"--from={source}"}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as the first stage makes it: from what that stage copies, with the pinned builder, no network."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "src"
    source.mkdir()
    for rest in STAGES["wheel"].all_of("COPY"):
        *names, target = shlex.split(rest)
        if target.startswith("/"):
            continue
        for name in names:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, source / target)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "wheel")]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    [wheel] = (folder / "wheel").iterdir()
    zipfile.ZipFile(wheel).extractall(folder / "unpacked")
    return folder / "unpacked"


# --- what is in them --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "packages"),
    [
        ("operator", {"pd_operator", "pd_wire"}),
        ("router", {"pd_router", "pd_wire"}),
        ("connector", {"pd_connector", "pd_wire"}),
    ],
)
def test_an_image_holds_its_packages_as_they_are_in_the_repository(
    target: str, packages: set[str], unpacked: Path
) -> None:
    place = "/plugin" if target == "connector" else "/opt/pd/app"
    assert copies(target, "wheel") == {f"/unpacked/{name}": f"{place}/{name}" for name in packages}
    for name in packages:
        folder = {"pd_operator": "operator", "pd_router": "router"}.get(name, "connector")
        assert files(unpacked / name) == files(ROOT / folder / name)


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, but Python's caches."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".so", ".new")
    }


def test_the_routers_image_has_what_is_compiled(unpacked: Path, tmp_path: Path) -> None:
    [step] = [rest for rest in STAGES["wheel"].all_of("RUN") if "pd_router.native" in rest]
    assert "PYTHONPATH=/unpacked python3 -m pd_router.native" in step
    assert any("gcc" in rest for rest in STAGES["wheel"].all_of("RUN"))
    shutil.copytree(unpacked, tmp_path / "unpacked")
    library = tmp_path / "unpacked/pd_router/native/pump.so"
    assert not library.exists(), "the wheel is for every platform"
    made = subprocess.run(
        [sys.executable, "-m", "pd_router.native"],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path / "unpacked")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert made.stdout.strip() == str(library)


def pins(part: str) -> dict[str, str]:
    """Names and versions that a requirements file pins."""
    text = (ROOT / "requirements" / f"{part}.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", text, flags=re.MULTILINE))


@pytest.mark.parametrize("part", ["operator", "router", "build"])
def test_what_ships_is_what_is_tested(part: str) -> None:
    shipped, tested = pins(f"image-{part}"), pins("engine-cpu")
    assert shipped
    assert {name: tested.get(name) for name in shipped} == shipped, "run `make lock`"


def test_requirements_are_those_of_the_project() -> None:
    for part in ("operator", "router", "build"):
        names = {re.split(r"[^A-Za-z0-9-]", one)[0].lower() for one in PROJECT["optional-dependencies"][part]}
        assert names
        assert names <= set(pins(f"image-{part}")), "run `make lock`"


def make_root(part: str, unpacked: Path, root: Path, without: str = "") -> None:
    """The folders of an image from which Python imports: our packages, and links to the pinned libraries."""
    for source in copies(part, "wheel"):
        shutil.copytree(unpacked / Path(source).name, root / Path(source).name)
    for name in set(pins(f"image-{part}")) - {without}:
        for file in metadata.distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (root / top).exists():
                (root / top).symlink_to(
                    file.locate().parents[len(file.parts) - 2] if len(file.parts) > 1 else file.locate()
                )


IMPORT_ALL: Final = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
    importlib.import_module(module.name)
"""


def python(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """An interpreter that finds Python's own library, what lies in the root, and nothing else."""
    environment = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin", "COLUMNS": "100"}
    argv = [sys.executable, "-S", *arguments]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, cwd=root)


@pytest.mark.parametrize("part", ["operator", "router"])
def test_the_program_runs_with_nothing_but_what_the_image_holds(part: str, unpacked: Path, tmp_path: Path) -> None:
    make_root(part, unpacked, tmp_path)
    done = python(tmp_path, str(IMAGES / PROGRAMS[part]), "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: {PROGRAMS[part]}")
    done = python(tmp_path, "-c", IMPORT_ALL, f"pd_{part}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("part", "library"), [("operator", "kopf"), ("router", "uvloop")])
def test_a_missing_library_is_noticed(part: str, library: str, unpacked: Path, tmp_path: Path) -> None:
    make_root(part, unpacked, tmp_path, without=library)
    done = python(tmp_path, "-c", IMPORT_ALL, f"pd_{part}")
    assert done.returncode
    assert f"No module named '{library}'" in done.stderr


@pytest.mark.parametrize("part", ["operator", "router"])
def test_nothing_is_imported_later_that_the_image_lacks(part: str, unpacked: Path, tmp_path: Path) -> None:
    """Imports inside functions included."""
    make_root(part, unpacked, tmp_path)
    held = {path.name.partition(".")[0] for path in tmp_path.iterdir()} | sys.stdlib_module_names
    for source in copies(part, "wheel"):
        for path in (unpacked / Path(source).name).rglob("*.py"):
            assert imported(path) <= held, path


def imported(path: Path) -> set[str]:
    """Top-level modules of all import statements."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("part", ["operator", "router"])
def test_start_scripts_are_the_projects_own(part: str) -> None:
    script = IMAGES / PROGRAMS[part]
    module, _, function = PROJECT["scripts"][PROGRAMS[part]].partition(":")
    assert f"from {module} import {function}" in script.read_text(encoding="utf-8")
    assert script.read_text(encoding="utf-8").startswith("#!/opt/pd/bin/python3\n")
    target = shlex.split(next(rest for rest in STAGES[part].all_of("COPY") if "images/" in rest))
    assert target == ["--chmod=0755", f"images/{script.name}", f"/opt/pd/bin/{script.name}"]


# --- the plugin -------------------------------------------------------------------------------------------------------


def test_the_connector_needs_nothing_that_an_engine_has_not(unpacked: Path) -> None:
    """Every module but those that face vLLM imports with the standard library alone."""
    names = [
        str(path.relative_to(unpacked).with_suffix("")).replace("/", ".").removesuffix(".__init__")
        for package in ("pd_wire", "pd_connector/core")
        for path in sorted((unpacked / package).rglob("*.py"))
    ]
    code = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"
    subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(unpacked)!r})\n{code}"], check=True
    )


def test_cp_as_the_operator_calls_it_makes_a_plugin(unpacked: Path, tmp_path: Path) -> None:
    root = tmp_path / "image"
    for source, target in copies("connector", "wheel").items():
        shutil.copytree(unpacked / Path(source).name, root / target.lstrip("/"))
    volume = tmp_path / "volume"
    volume.mkdir()
    child = deployment(("spec.engine.image", "x"))
    context = RenderContext("u", "r", "connector:1")
    engine = next(made for made in render_children(child, context) if made["kind"] == "StatefulSet")
    first = engine["spec"]["template"]["spec"]["initContainers"][0]
    assert first["image"] == "connector:1"
    assert first["command"] == ["cp", "-R", "/plugin/.", CONNECTOR_PATH]
    assert STAGES["connector"].last("ENTRYPOINT") == str(first["command"]).replace("'", '"')
    for _restarted in range(2):
        subprocess.run(["cp", "-R", f"{root}/plugin/.", str(volume)], check=True)
    assert {path.name for path in volume.iterdir()} == {"pd_connector", "pd_wire"}
    code = "import pd_connector.selftest, pd_wire.names"
    environment = {"PYTHONPATH": str(volume), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-S", "-c", code], check=True, env=environment)


# --- how they run -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ALL)
def test_it_runs_as_the_user_of_the_manifests(target: str) -> None:
    assert whole(target).last("USER") == f"{USER}:{USER}"
    pod = only(render(), "Deployment")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == USER


@pytest.mark.parametrize("target", ALL)
def test_its_last_stage_has_nothing_to_build_with(target: str) -> None:
    stage = whole(target)
    for rest in stage.all_of("RUN"):
        assert "install" not in rest.replace("uninstall", "")
        assert "apt" not in rest
    if target != "connector":
        assert re.search(r"pip uninstall .*\bpip\b", " ".join(stage.all_of("RUN")))
    else:
        assert not stage.all_of("RUN")


def test_ports_are_those_of_the_manifests() -> None:
    [operator] = only(render(), "Deployment")["spec"]["template"]["spec"]["containers"]
    assert STAGES["operator"].last("EXPOSE").split() == [str(port["containerPort"]) for port in operator["ports"]]
    assert STAGES["router"].last("EXPOSE").split() == [str(HTTP_PORT), str(ADMIN_PORT)]


def test_entry_points_are_the_programs_of_the_manifests() -> None:
    [operator] = only(render(), "Deployment")["spec"]["template"]["spec"]["containers"]
    child = deployment(("spec.engine.image", "x"))
    made = {(one["kind"], one["metadata"]["name"]): one for one in render_children(child, RenderContext("u", "r", "c"))}
    router = made["Deployment", router_name(child)]["spec"]["template"]["spec"]["containers"][0]
    for target, argv in (("operator", operator["command"]), ("router", router["command"])):
        assert STAGES[target].last("ENTRYPOINT") == f'["{argv[0]}"]'
        assert argv[0] == PROGRAMS[target]


def test_bases_are_pinned_and_can_be_replaced() -> None:
    bases = {stage.base for stage in STAGES.values()} - set(STAGES)
    assert bases == {f"${{{name}}}" for name in ARGUMENTS}
    for reference in ARGUMENTS.values():
        assert re.fullmatch(r"docker\.io/library/[a-z]+:\d+\.\d+\.\d+-[a-z-]+", reference)
    minor = ".".join(ARGUMENTS["PYTHON_IMAGE"].partition(":")[2].split(".")[:2])
    assert f"--python-version {minor}" in (ROOT / "Makefile").read_text(encoding="utf-8")
    readme = (IMAGES / "README.md").read_text(encoding="utf-8")
    for name, reference in ARGUMENTS.items():
        assert f"| `{name}` | `{reference}` |" in readme


def test_packages_are_checked_against_hashes_and_never_compiled() -> None:
    installs = [
        rest for stage in STAGES.values() for rest in stage.all_of("RUN") if "pip" in rest and " install " in rest
    ]
    assert len(installs) == 3
    for rest in installs:
        assert "--require-hashes" in rest
        assert "--only-binary :all:" in rest
        assert "--no-deps" in rest


def test_the_builder_is_sent_what_is_copied_and_little_else() -> None:
    sent = {
        line.removeprefix("!")
        for line in (IMAGES / "Containerfile.dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    used = set()
    for stage in STAGES.values():
        for rest in stage.all_of("COPY"):
            words = [word for word in shlex.split(rest) if not word.startswith("--chmod")]
            if not words[0].startswith("--from"):
                used |= set(words[:-1])
    assert {re.sub(r"image-\w+", "image-*", name) for name in used} == sent
