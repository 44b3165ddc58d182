"""`pdctl plan`: how many conversations one decode engine keeps readable, and which way of retaining fits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer

from pd_operator.core.model import PDDeployment
from pd_operator.core.problems import SpecError
from pdctl.core.coding_agents import DECODE_TOKENS_PER_S, HUMAN_MEDIAN_S, Crowd
from pdctl.core.kv_shape import KVShape, parse_shape
from pdctl.core.kv_trace import Client
from pdctl.core.memory_plan import GIB, Capacity, GpuMemory, PlanError, advise, fit_trace, simulate_modes
from pdctl.core.plan_report import Plan, Retained, plan_json, plan_text
from pdctl.core.retention_simulation import Engine, unhindered_end, working_set_blocks
from pdctl.core.told_engine import ToldEngine, possible_modes, told_engine
from pdctl.shell.engine_facts import EngineFactsError, ask_engine
from pdctl.shell.files import FileError, check_model_folder, load_deployment
from pdctl.shell.model_facts import ModelFactsError, read_config, weights_bytes
from pdctl.shell.numbers import finite
from pdctl.shell.trace_source import TraceFileError, made_up, read_trace

HOURS: Final = 4.0
SAMPLE: Final = 256
"""Conversations that are simulated at most; of more, as many in a pool that is smaller in proportion."""
OTHER_GIB: Final = 4.0


@dataclass(frozen=True, slots=True)
class _Given:
    """Options about memory; None: to be found out."""

    file: Path
    config: Path | None
    kv_bytes: int | None
    gpu_gib: float | None
    weights_gib: float | None
    other_gib: float
    pool_tokens: int | None
    engine: str | None


@dataclass(frozen=True, slots=True)
class _Load:
    """Options about turns; ``trace`` stands in for the rest."""

    trace: Path | None
    conversations: int | None
    tokens: int | None
    think_time: float
    singles: float
    seed: int


@dataclass(frozen=True, slots=True)
class _Pool:
    blocks: int
    block_tokens: int
    usage: float | None
    sources: tuple[str, ...]
    retained: Retained | None = None


def plan(
    file: Annotated[Path, typer.Option("--file", "-f", help="PDDeployment file (YAML).")],
    conversations: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Open at a time, over all decode engines.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Of an average conversation.")] = None,
    think_time: Annotated[
        float, typer.Option(callback=finite, min=0.01, help="Median seconds before a user's next message.")
    ] = HUMAN_MEDIAN_S,
    singles: Annotated[
        float,
        typer.Option(
            "--singles-per-minute",
            callback=finite,
            min=0,
            max=100_000,
            help="Turns beside these that nobody continues.",
        ),
    ] = 0.0,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="One decode engine's turns (JSONL), instead of the four above.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="The model's config.json, or its folder. Absent: the local model's.")
    ] = None,
    kv_bytes: Annotated[
        int | None, typer.Option("--kv-bytes-per-token", min=1, help="On each GPU, instead of a config.")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu-memory-gib", callback=finite, min=0.1, help="Per GPU. P5enEFA: 139.")
    ] = None,
    weights: Annotated[
        float | None,
        typer.Option("--weights-gib", callback=finite, min=0, help="Of the whole model. Absent: from its folder."),
    ] = None,
    other: Annotated[
        float, typer.Option("--other-gib", callback=finite, min=0, help="Per GPU: activations, CUDA graphs, NCCL.")
    ] = OTHER_GIB,
    pool_tokens: Annotated[
        int | None, typer.Option(min=1, help="The pool, as an engine's log says it, instead of all this.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", help="URL of a running decode engine, to ask for its pool.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the made-up turns.")] = 1,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Say how much KV a deployment's decode engines keep readable, per retention, and recommend one."""
    try:
        deployment = load_deployment(file)
        given = _Given(file, config, kv_bytes, gpu_memory, weights, other, pool_tokens, engine)
        load = _Load(trace, conversations, tokens, think_time, singles, seed)
        made = _plan(deployment, given, load)
    except SpecError as error:
        typer.echo(f"{file}: {error}", err=True)
        raise typer.Exit(2) from None
    except FileError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    except (ValueError, TraceFileError, ModelFactsError) as error:
        typer.echo(f"pdctl plan: {error}", err=True)
        raise typer.Exit(2) from None
    except EngineFactsError as error:
        typer.echo(f"pdctl plan: --engine: {error}", err=True)
        raise typer.Exit(1) from None
    typer.echo(json.dumps(plan_json(made), indent=1) if json_output else plan_text(made))


def _plan(deployment: PDDeployment, given: _Given, load: _Load) -> Plan:
    told = told_engine(deployment)
    pool = _pool(deployment, told, given)
    engines = max(1, told.replicas)
    played: Sequence[Client]
    part = 1.0
    if load.trace is not None:
        played = read_trace(load.trace)
        machine = Engine(unhindered_end(played, DECODE_TOKENS_PER_S), pool.block_tokens)
        tokens = round(working_set_blocks(played, machine) / len(played) * pool.block_tokens) or 1
        clients = len(played)
    elif load.conversations is not None and load.tokens is not None:
        tokens, clients = load.tokens, -(-load.conversations // engines)
        sample = min(clients, SAMPLE)
        part = sample / clients
        singles = load.singles / engines * part
        crowd = Crowd(sample, HOURS * 3600, human_wait_s=load.think_time, singles_per_min=singles)
        machine = Engine(crowd.seconds, pool.block_tokens)
        played, machine = fit_trace(made_up(crowd, load.seed), sample, tokens, machine)
    else:
        raise PlanError("give --conversations and --tokens, or --trace")
    modes = tuple(possible_modes(deployment))
    outcomes = tuple(simulate_modes(played, modes, int(pool.blocks * part), machine))
    return Plan(
        name=deployment.metadata.name,
        capacity=Capacity(pool.blocks, pool.block_tokens, tokens),
        clients=clients,
        engines=engines,
        kv_usage=pool.usage,
        retained=pool.retained,
        sources=pool.sources,
        modes=modes,
        outcomes=outcomes,
        advice=advise(outcomes, working_set_blocks(played, machine)),
    )


def _pool(deployment: PDDeployment, told: ToldEngine, given: _Given) -> _Pool:
    """The nearest to the truth that there is: a running engine, its log, its arguments, or arithmetic."""
    block = told.block_tokens
    if given.engine is not None:
        facts = asyncio.run(ask_engine(given.engine))
        source = f"pool as {given.engine} says it"
        return _Pool(facts.blocks, facts.block_tokens, facts.usage, (source,), facts.retained)
    if given.pool_tokens is not None:
        return _Pool(given.pool_tokens // block, block, None, ("pool as given with --pool-tokens",))
    if told.blocks is not None:
        return _Pool(told.blocks, block, None, ("pool as set by --num-gpu-blocks-override",))
    folder = given.config
    if folder is None and deployment.spec.model.is_local:
        check_model_folder(deployment, given.file)
        folder = Path(deployment.spec.model.name)
    token_bytes, shape = _token_bytes(told, given, folder)
    sources = [f"KV per token: {token_bytes:,} bytes on each GPU" + ("" if shape is None else f" ({_words(shape)})")]
    if told.cpu_gib is not None:
        sources.append(f"{told.cpu_gib:g} GiB of main memory for KV")
        return _Pool(int(told.cpu_gib * GIB / token_bytes) // block, block, None, tuple(sources))
    if told.kv_bytes is not None:
        sources.append(f"{told.kv_bytes / GIB:.1f} GiB of each GPU for KV (--kv-cache-memory-bytes)")
        return _Pool(int(told.kv_bytes / token_bytes) // block, block, None, tuple(sources))
    memory = _gpu_memory(told, given, folder)
    sources.append(
        f"{memory.tensor_parallel} GPU(s) of {memory.gpu_gib:g} GiB, {100 * memory.utilization:g} % of it for vLLM; "
        f"weights {memory.weights_gib:.1f} GiB in all, {memory.other_gib:g} GiB per GPU for the rest (estimate)"
    )
    return _Pool(int(memory.pool_bytes_per_gpu() / token_bytes) // block, block, None, tuple(sources))


def _token_bytes(told: ToldEngine, given: _Given, folder: Path | None) -> tuple[int, KVShape | None]:
    if given.kv_bytes is not None:
        return given.kv_bytes, None
    if folder is None:
        raise PlanError("the model is not on this machine: give --config, --kv-bytes-per-token or --pool-tokens")
    shape = parse_shape(read_config(folder), told.dtype, told.kv_cache_dtype)
    return shape.token_bytes_per_gpu(told.tensor_parallel), shape


def _gpu_memory(told: ToldEngine, given: _Given, folder: Path | None) -> GpuMemory:
    gpu = given.gpu_gib if given.gpu_gib is not None else told.gpu_gib
    if gpu is None:
        raise PlanError("the machine's GPUs are unknown: give --gpu-memory-gib or --pool-tokens")
    weights = given.weights_gib
    if weights is None:
        found = weights_bytes(folder) if folder is not None else None
        if found is None:
            raise PlanError("the size of the weights is unknown: give --weights-gib or --pool-tokens")
        weights = found / GIB
    return GpuMemory(gpu, told.utilization, weights, given.other_gib, told.tensor_parallel)


def _words(shape: KVShape) -> str:
    if shape.heads is None:
        return f"{shape.layers} layers, one vector of {shape.width}, {shape.value_bytes} bytes each, whole on every GPU"
    return f"{shape.layers} layers, {shape.heads} KV heads of 2 × {shape.width // 2}, {shape.value_bytes} bytes each"
