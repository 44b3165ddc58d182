"""vLLM arguments and environment variables that a user may not set, each with the field to use instead.

Two kinds of refusal: what we render ourselves, since a second copy would win in silence; and what both roles must
share, since a copy on one role makes P and D disagree. Data and the spelling rules of vLLM's parser, nothing else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

_ONE_NODE: Final = "an engine is one process group on one node; use tensorParallelSize"
_PLAIN_HTTP: Final = "the router speaks plain HTTP to the engines; end TLS in front of the router"
_LISTEN: Final = "addresses and ports are set for each engine"
_OFFLOAD: Final = "it replaces the KV connector in silence"
_COUNTED: Final = "it is always on, since the router counts reuse with it"

RENDERED_FLAGS: Final[dict[str, str]] = {
    "--kv-transfer-config": "it is rendered for both roles; use spec.kvTransfer",
    "--model": "use spec.model.name",
    "--served-model-name": "use spec.model.servedName",
    "--revision": "use spec.model.revision",
    "--dtype": "use spec.model.dtype",
    "--max-model-len": "use spec.model.maxModelLen",
    "--max-num-seqs": "use spec.engine.maxNumSeqs, or maxNumSeqs of the role",
    "--block-size": "use spec.engine.blockSize",
    "--gpu-memory-utilization": "use spec.engine.gpuMemoryUtilizationPercent",
    "--device-memory-utilization": "use spec.engine.gpuMemoryUtilizationPercent",
    "--shutdown-timeout": "use spec.engine.shutdownTimeoutSeconds",
    "--tensor-parallel-size": "use tensorParallelSize of the role",
    "-tp": "use tensorParallelSize of the role",
    "--enable-prefix-caching": "use prefixCaching of the role",
    "--no-enable-prefix-caching": "use prefixCaching of the role",
    "--enable-prompt-tokens-details": _COUNTED,
    "--no-enable-prompt-tokens-details": _COUNTED,
    "--host": _LISTEN,
    "--port": _LISTEN,
    "--uds": _LISTEN,
    "--root-path": _LISTEN,
    "--grpc": _LISTEN,
    "--grpc-port": _LISTEN,
    "--headless": _LISTEN,
    "--config": "a file can set what is rendered here; write its keys as fields or as extraArgs",
    "--api-key": "use spec.router.auth.engineKeySecretRef, so that routers send the same key",
    "--hf-token": "use spec.model.source.tokenSecretRef",
    "--ssl-keyfile": _PLAIN_HTTP,
    "--ssl-certfile": _PLAIN_HTTP,
    "--ssl-ca-certs": _PLAIN_HTTP,
    "--ssl-cert-reqs": _PLAIN_HTTP,
    "--kv-offloading-size": _OFFLOAD,
    "--kv-offloading-backend": _OFFLOAD,
    "--pipeline-parallel-size": _ONE_NODE,
    "-pp": _ONE_NODE,
    "--prefill-context-parallel-size": _ONE_NODE,
    "-pcp": _ONE_NODE,
    "--data-parallel-size": _ONE_NODE,
    "-dp": _ONE_NODE,
    "--data-parallel-size-local": _ONE_NODE,
    "-dpl": _ONE_NODE,
    "--data-parallel-rank": _ONE_NODE,
    "-dpn": _ONE_NODE,
    "--data-parallel-start-rank": _ONE_NODE,
    "-dpr": _ONE_NODE,
    "--data-parallel-address": _ONE_NODE,
    "-dpa": _ONE_NODE,
    "--data-parallel-rpc-port": _ONE_NODE,
    "-dpp": _ONE_NODE,
    "--data-parallel-backend": _ONE_NODE,
    "-dpb": _ONE_NODE,
    "--data-parallel-hybrid-lb": _ONE_NODE,
    "-dph": _ONE_NODE,
    "--data-parallel-external-lb": _ONE_NODE,
    "-dpe": _ONE_NODE,
    "--data-parallel-multi-port-external-lb": _ONE_NODE,
    "-dpm": _ONE_NODE,
    "--nnodes": _ONE_NODE,
    "-n": _ONE_NODE,
    "--node-rank": _ONE_NODE,
    "-r": _ONE_NODE,
    "--master-addr": _ONE_NODE,
    "--master-port": _ONE_NODE,
}
"""Refused in every extraArgs."""

SHARED_FLAGS: Final = frozenset(
    {
        # Drafts move with the KV only when both roles draft alike.
        "--speculative-config",
        "-sc",
        "--spec-method",
        "--spec-model",
        "--spec-tokens",
        # Weights and the layout of the KV.
        "--quantization",
        "-q",
        "--quantization-config",
        "--load-format",
        "--hf-overrides",
        "--hf-config-path",
        "--config-format",
        "--code-revision",
        "--trust-remote-code",
        "--enable-lora",
        "--lora-modules",
        "--lora-dtype",
        "--kv-cache-dtype",
        "--kv-cache-dtype-skip-layers",
        "--attention-backend",
        "--attention-config",
        "-ac",
        "--disable-sliding-window",
        "--disable-hybrid-kv-cache-manager",
        "--decode-context-parallel-size",
        "-dcp",
        "--prefix-caching-hash-algo",
        "--mamba-block-size",
        "--mamba-cache-dtype",
        "--mamba-cache-mode",
        "--mamba-ssm-cache-dtype",
        "--language-model-only",
        # The prompt's tokens, and which requests are accepted: P and D each read the client's request.
        "--tokenizer",
        "--tokenizer-mode",
        "--tokenizer-revision",
        "--chat-template",
        "--chat-template-content-format",
        "--default-chat-template-kwargs",
        "--trust-request-chat-template",
        "--exclude-tools-when-tool-choice-none",
        "--enable-auto-tool-choice",
        "--tool-call-parser",
        "--tool-parser-plugin",
        "--reasoning-parser",
        "--reasoning-parser-plugin",
        "--reasoning-config",
        "--limit-mm-per-prompt",
        "--mm-processor-kwargs",
        "--runner",
        "--convert",
    }
)
"""Refused in a role's extraArgs: in `spec.engine.extraArgs` both roles get them."""

MANY_VALUES: Final = frozenset(
    {
        "--allowed-media-domains",
        "--collect-detailed-traces",
        "--cpu-offload-params",
        "--cudagraph-capture-sizes",
        "--ignore-patterns",
        "--kv-cache-dtype-skip-layers",
        "--logits-processors",
        "--lora-modules",
        "--lora-target-modules",
        "--numa-bind-cpus",
        "--numa-bind-nodes",
        "--offload-params",
        "--sleep-preserve-parameter-names",
    }
)
"""Flags that take more than one word; after any other flag a second word is read as a model's name, or as nothing."""

_FOREIGN_BACKEND: Final = "vLLM does not read it; use spec.kvTransfer.backend"
_HF_TOKEN: Final = "never write a token into the object; use spec.model.source.tokenSecretRef"

_OF_THE_IMAGE: Final = "it is the image's own; set it in the image"

CONNECTORS_OWN: Final = r"(^|=)pd_connector[.]"
"""An argument that names a module of the connector, as `--middleware` would."""
NO_CONNECTOR_MODULES: Final = "modules of the connector are loaded as spec.kvTransfer asks; leave this out"

RENDERED_ENV: Final[dict[str, str]] = {
    "NIXL_BACKEND": _FOREIGN_BACKEND,
    "VLLM_NIXL_BACKEND": _FOREIGN_BACKEND,
    "VLLM_ENGINE_READY_TIMEOUT_S": "use spec.engine.startupTimeoutSeconds",
    "HF_HUB_OFFLINE": "use spec.model.source.download",
    "POD_IP": "it is the pod's own address",
    "PATH": f"{_OF_THE_IMAGE}, and the engine's programs are found by it",
    "PYTHONHOME": _OF_THE_IMAGE,
    "LD_PRELOAD": _OF_THE_IMAGE,
    "LD_AUDIT": _OF_THE_IMAGE,
    "VLLM_PLUGINS": "it could leave out the connector's own plugin",
    "VLLM_API_KEY": "use spec.router.auth.engineKeySecretRef, so that routers send the same key",
}
"""Refused in every env."""

RENDERED_ENV_PREFIXES: Final[dict[str, str]] = {
    "VLLM_NIXL_SIDE_CHANNEL_": "host and port are set from each engine's own address",
}

PLAIN_ENV: Final[dict[str, str]] = {
    "PYTHONPATH": "must be a plain value, since the connector's folder is put in front of it",
}
"""Refused with a secretKeyRef, whose value nothing can be put in front of."""

TOKEN_ENV: Final = dict.fromkeys(("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"), _HF_TOKEN)
"""Refused with a plain value; allowed with a secretKeyRef."""

SHARED_ENV: Final = frozenset(
    {"PYTHONHASHSEED", "VLLM_KV_CACHE_LAYOUT", "VLLM_ATTENTION_BACKEND", "VLLM_MLA_DISABLE", "VLLM_USE_V2_MODEL_RUNNER"}
)
"""Refused in a role's env: in `spec.engine.env` both roles get them."""

_WHOLE_FLAGS: Final = frozenset({"-dc"})
"""Flags in their own right that begin like one of ours."""

_HF_TOKEN_VALUE: Final = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
_NUMBER: Final = re.compile(r"^-\d+(\.\d*)?$")


def looks_like_token(value: str) -> bool:
    """Does a text hold a Hugging Face token?"""
    return _HF_TOKEN_VALUE.search(value) is not None


def flags_in(arguments: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Position and canonical name of each flag.

    vLLM's parser takes underscores for dashes, a value after `=`, and a key of a JSON value after a dot
    (`--kv-transfer-config.kv_role`), so all of these are cut off here.
    """
    for index, argument in enumerate(arguments):
        if _is_flag(argument):
            yield index, _flag_name(argument)


def words_without_flag(arguments: Sequence[str]) -> Iterator[int]:
    """Position of each word that is certainly no flag's value, and of each bare `--`, after which all words are none.

    Which flags are switches depends on vLLM's version, so one word after a flag is taken for its value.
    """
    room = 0.0
    for index, argument in enumerate(arguments):
        if argument == "--":
            yield index
        if _is_flag(argument):
            name = _flag_name(argument)
            complete = argument == "--" or "=" in argument or name.startswith("--no-")
            many = any(flag.startswith(name) for flag in MANY_VALUES)
            room = 0 if complete else math.inf if many else 1
        elif room:
            room -= 1
        else:
            yield index


def _is_flag(argument: str) -> bool:
    return argument.startswith("-") and argument != "-" and not _NUMBER.match(argument)


def _flag_name(argument: str) -> str:
    return re.split(r"[=.\s]", argument, maxsplit=1)[0].replace("_", "-")


def rendered_flag(name: str) -> str | None:
    """The flag of `RENDERED_FLAGS` that vLLM's parser would take ``name`` for, or None."""
    return _resolve(name, tuple(RENDERED_FLAGS))


def shared_flag(name: str) -> str | None:
    """The flag of `SHARED_FLAGS` that vLLM's parser would take ``name`` for, or None."""
    return _resolve(name, tuple(SHARED_FLAGS)) or _resolve(name, tuple(negated(flag) for flag in SHARED_FLAGS))


def spellings(flags: Iterable[str], resolve: Callable[[str], str | None]) -> set[str]:
    """The flags and every beginning of one that ``resolve`` (`rendered_flag` or `shared_flag`) knows."""
    beginnings = {flag[:length] for flag in flags for length in range(2, len(flag) + 1)}
    return {name for name in beginnings if resolve(name) is not None}


def negated(flag: str) -> str:
    """`--enable-lora` → `--no-enable-lora`; short flags have no negation."""
    return f"--no-{flag.removeprefix('--')}" if flag.startswith("--") else flag


def _resolve(name: str, flags: tuple[str, ...]) -> str | None:
    if name in flags:
        return name
    if name in RENDERED_FLAGS or name in SHARED_FLAGS or name in _WHOLE_FLAGS or len(name) < 2:
        return None
    # The parser accepts the beginning of a flag for the whole flag.
    matches = sorted(flag for flag in flags if flag.startswith(name) and name != "--")
    return matches[0] if matches else None
