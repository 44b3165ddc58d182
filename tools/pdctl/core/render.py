"""Deployment → the commands of its processes: as text to paste into bash, or as JSON for another program.

Separate from `pdctl up` because nothing is started: ports are the profile's defaults, and on a profile whose roles need
hosts of their own the addresses stay shell variables. The arguments themselves come from the operator's renderers.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pd_operator.core import names
from pd_operator.core.choices import Role
from pd_operator.core.generation import generation
from pd_operator.core.model import PDDeployment
from pd_operator.core.profiles import profile_of
from pd_operator.core.render_engine import EngineEndpoint, render_engine
from pd_operator.core.render_router import render_router
from pdctl.core.ports import ADMIN_PORT, ROUTER_PORT

LOOPBACK: Final = "127.0.0.1"
ANY_ADDRESS: Final = "0.0.0.0"

# A variable that bash fills in travels through the renderers between two characters that no argument can contain.
_MARK: Final = "\x00"
_MARKED: Final = re.compile(f"{_MARK}([A-Z0-9_]+){_MARK}")
_FLAG: Final = re.compile(r"^-(-|[A-Za-z])")


@dataclass(frozen=True, slots=True)
class PrintedCommand:
    """One process. Values may hold marked variables; `render_shell` and `render_json` resolve them."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Engine:
    command: PrintedCommand
    url: str


def render_shell(deployment: PDDeployment) -> str:
    """Commands for bash: variables first, one flag per line, every value quoted."""
    commands = printed_commands(deployment)
    parts = [_header(deployment, commands)]
    parts += [f"# --- {command.name} ---\n{_shell_command(command)}" for command in commands]
    return "\n\n".join(parts) + "\n"


def render_json(deployment: PDDeployment) -> str:
    """The same commands as one JSON object; a host that is not known stands as ${NAME}."""
    commands = printed_commands(deployment)
    value = {
        "name": deployment.metadata.name,
        "generation": generation(deployment),
        "processes": [
            {
                "name": command.name,
                "argv": [_MARKED.sub(r"${\1}", word) for word in command.argv],
                "env": {name: _MARKED.sub(r"${\1}", text) for name, text in command.env.items()},
            }
            for command in commands
        ],
    }
    return json.dumps(value, indent=2) + "\n"


def printed_commands(deployment: PDDeployment) -> list[PrintedCommand]:
    """All engines, prefill first, then one router that knows them."""
    prefill = _engines(deployment, Role.PREFILL, side_channel_from=0)
    decode = _engines(deployment, Role.DECODE, side_channel_from=len(prefill))
    host = LOOPBACK if profile_of(deployment.spec).one_host else ANY_ADDRESS
    process = render_router(
        deployment,
        listen=f"{host}:{ROUTER_PORT}",
        admin=f"{LOOPBACK}:{ADMIN_PORT}",
        prefill_urls=[engine.url for engine in prefill],
        decode_urls=[engine.url for engine in decode],
    )
    router = PrintedCommand(names.router_name(deployment), process.argv, process.env)
    return [*(engine.command for engine in (*prefill, *decode)), router]


def _engines(deployment: PDDeployment, role: Role, side_channel_from: int) -> list[_Engine]:
    profile = profile_of(deployment.spec)
    first_port = profile.ports.prefill_http if role is Role.PREFILL else profile.ports.decode_http
    replicas = deployment.role(role).replicas
    engines = []
    for index in range(replicas):
        if profile.one_host:
            bind, reach = LOOPBACK, LOOPBACK
            port, side_channel = first_port + index, profile.ports.side_channel + side_channel_from + index
        else:
            variable = f"{role.value.upper()}_HOST" + (f"_{index}" if replicas > 1 else "")
            bind, reach = ANY_ADDRESS, f"{_MARK}{variable}{_MARK}"
            port, side_channel = first_port, profile.ports.side_channel
        process = render_engine(deployment, role, EngineEndpoint(bind, port, reach, side_channel))
        command = PrintedCommand(names.engine_name(deployment, role, index), process.argv, process.env)
        engines.append(_Engine(command, f"http://{reach}:{port}"))
    return engines


def _header(deployment: PDDeployment, commands: Sequence[PrintedCommand]) -> str:
    lines = [f"# PDDeployment {deployment.metadata.name}, generation {generation(deployment)}"]
    hosts = sorted({host for command in commands for host in _MARKED.findall("".join(_texts(command)))}, reverse=True)
    if hosts:
        lines += ["# Each engine runs on a host of its own. On every host, set the addresses first:"]
        lines += [f"#   export {host}=..." for host in hosts]
    spec = deployment.spec
    variables = [*spec.engine.env, *spec.prefill.env, *spec.decode.env]
    secrets = sorted({variable.name for variable in variables if variable.secret_key_ref is not None})
    if secrets:
        lines.append(f"# Kept in Secrets, so set here by hand: {', '.join(secrets)}")
    if not (spec.prefill.replicas and spec.decode.replicas):
        lines.append("# A role with 0 replicas has no command here, and the router answers 503 without it.")
    return "\n".join(lines)


def _texts(command: PrintedCommand) -> list[str]:
    return [*command.argv, *command.env.values()]


def _shell_command(command: PrintedCommand) -> str:
    lines = [f"{name}={_quoted(value)}" for name, value in sorted(command.env.items())]
    head, *flags = _lines_of(command.argv)
    lines += [head, *(f"  {flag}" for flag in flags)]
    return " \\\n".join(lines)


def _lines_of(argv: Sequence[str]) -> list[str]:
    """One line for the program with its plain words, then one per flag with its values."""
    start = next((index for index, word in enumerate(argv) if word.startswith("--")), len(argv))
    lines = [[_quoted(word) for word in argv[:start]]]
    for word in argv[start:]:
        if _FLAG.match(word):
            lines.append([_quoted(word)])
        else:
            lines[-1].append(_quoted(word))
    return [" ".join(line) for line in lines]


def _quoted(word: str) -> str:
    """A word for bash. Only marked variables are expanded; everything else is taken literally."""
    if _MARK not in word:
        return shlex.quote(word)
    pieces = _MARKED.split(word)
    literal = [re.sub(r'([\\"$`])', r"\\\1", piece) for piece in pieces[0::2]]
    variables = [f"${{{name}:?is not set}}" for name in pieces[1::2]]
    text = literal[0] + "".join(variable + after for variable, after in zip(variables, literal[1:], strict=True))
    return f'"{text}"'
