"""One row per rule: a bad edit of the smallest deployment → the YAML path, and words that say what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from pd_operator.core import rules
from pd_operator.core.parse import parse_deployment
from pd_operator.core.problems import SpecError
from support.pddeployments import REMOVED, deployment, edited, smallest

Edit = tuple[str, Any]


def env(name: str, value: str | None = "x", secret: dict[str, str] | None = None) -> list[dict[str, Any]]:
    variable: dict[str, Any] = {"name": name}
    if value is not None:
        variable["value"] = value
    if secret is not None:
        variable["secretKeyRef"] = secret
    return [variable]


def extra(name: str, value: str = "1") -> list[dict[str, str]]:
    return [{"name": name, "value": value}]


SCHEMA: list[tuple[str, list[Edit], str, str]] = [
    ("wrong group", [("apiVersion", "apps/v1")], "apiVersion", "must be pdserving.dev/v1alpha1"),
    ("wrong kind", [("kind", "Deployment")], "kind", "must be PDDeployment"),
    ("no model", [("spec.model", REMOVED)], "spec.model", "is required"),
    ("no model name", [("spec.model", {})], "spec.model.name", "is required: a Hugging Face repository"),
    ("name too long", [("metadata.name", "a" * 41)], "metadata.name", "at most 40 characters"),
    ("name not a label", [("metadata.name", "Qwen")], "metadata.name", "lower-case letters, digits and '-'"),
    ("name begins with a digit", [("metadata.name", "3q")], "metadata.name", "beginning with a letter"),
    ("zero TTL", [("spec.kvTransfer.decoderBlocksTTLSeconds", 0)], "spec.kvTransfer.decoderBlocksTTLSeconds", "20 to"),
    ("text for a number", [("spec.engine.maxNumSeqs", "8")], "spec.engine.maxNumSeqs", "an integer from 1 to 65536"),
    ("fraction", [("spec.engine.maxNumSeqs", 8.0)], "spec.engine.maxNumSeqs", "an integer from 1 to 65536"),
    ("bool for a number", [("spec.prefill.replicas", True)], "spec.prefill.replicas", "an integer from 0 to 512"),
    ("share as fraction", [("spec.engine.gpuMemoryUtilizationPercent", 0.9)], "spec.engine.gpuMemoryUtilizationPercent",
     "an integer from 1 to 100"),
    ("word for a bool", [("spec.prefill.prefixCaching", "no")], "spec.prefill.prefixCaching", "true or false"),
    ("number for a bool", [("spec.prefill.prefixCaching", 0)], "spec.prefill.prefixCaching", "true or false"),
    ("enum", [("spec.nodeProfile", "p5en")], "spec.nodeProfile", "one of P5enEFA, CPU, Custom"),
    ("bool for a switch", [("spec.kvTransfer.bidirectional", True)], "spec.kvTransfer.bidirectional",
     "one of Enabled, Disabled"),
    ("push connector by name", [("spec.kvTransfer.connector", "NixlPushConnector")], "spec.kvTransfer.connector",
     "one of Verified, Stock (Stock is vLLM's NixlConnector; push connectors are not supported"),
    ("list of backends", [("spec.kvTransfer.backend", ["UCX", "LIBFABRIC"])], "spec.kvTransfer.backend",
     "one of LIBFABRIC, UCX"),
    ("misspelt field", [("spec.kvTransfer.decoderBlockTTLSeconds", 480)], "spec.kvTransfer.decoderBlockTTLSeconds",
     "did you mean decoderBlocksTTLSeconds?"),
    ("snake case", [("spec.kv_transfer", {})], "spec.kv_transfer", "did you mean kvTransfer?"),
    ("backend per role", [("spec.decode.backend", "UCX")], "spec.decode.backend",
     "did you mean spec.kvTransfer.backend?"),
    ("switch on one role", [("spec.decode.bidirectional", "Disabled")], "spec.decode.bidirectional",
     "did you mean spec.kvTransfer.bidirectional?"),
    ("block size on one role", [("spec.decode.blockSize", 64)], "spec.decode.blockSize",
     "did you mean spec.engine.blockSize?"),
    ("nothing like it", [("spec.router.zzz", 1)], "spec.router.zzz", "known here: replicas, handleStore"),
    ("list for an object", [("spec.router", [])], "spec.router", "an object with replicas, handleStore"),
    ("text for a list", [("spec.engine.extraArgs", "--a b")], "spec.engine.extraArgs", "a list of at most 128 entries"),
    ("number in a list", [("spec.engine.extraArgs", ["--a", 8])], "spec.engine.extraArgs[1]",
     "printable text on one line"),
    ("line break", [("spec.engine.extraArgs", ["--a\n"])], "spec.engine.extraArgs[0]", "printable text on one line"),
    ("relative volume", [("spec.model.source.hostPath", {"path": "models"})], "spec.model.source.hostPath.path",
     "an absolute path"),
    ("bad variable name", [("spec.engine.env", env("A B"))], "spec.engine.env[0].name", "letters, digits and '_'"),
    ("number in env", [("spec.engine.env", [{"name": "A", "value": 1}])], "spec.engine.env[0].value",
     "got 1; put it in quotes"),
    ("annotation not text", [("spec.router.service.annotations", {"a": 1})], "spec.router.service.annotations.a",
     "must be text"),
]  # fmt: skip

ARGUMENTS: list[tuple[list[str], str]] = [
    (["--kv-transfer-config", "{}"], "use spec.kvTransfer"),
    (['--kv-transfer-config={"kv_connector":"NixlPushConnector"}'], "use spec.kvTransfer"),
    (["--kv-transfer-config.kv_connector", "NixlPushConnector"], "use spec.kvTransfer"),
    (["--kv_transfer_config.engine_id=p-1"], "use spec.kvTransfer"),
    (["--kv-tr", "{}"], "--kv-transfer-config (written --kv-tr) may not be set here"),
    (["--port", "9000"], "addresses and ports are set for each engine"),
    (["--host=0.0.0.0"], "addresses and ports are set for each engine"),
    (["--tensor-parallel-size", "4"], "use tensorParallelSize of the role"),
    (["-tp", "4"], "use tensorParallelSize of the role"),
    (["--tensor_parallel_size=4"], "use tensorParallelSize of the role"),
    (["--served-model-name", "x"], "use spec.model.servedName"),
    (["--model", "x"], "use spec.model.name"),
    (["--revision", "x"], "use spec.model.revision"),
    (["--dtype", "half"], "use spec.model.dtype"),
    (["--max-model-len", "1"], "use spec.model.maxModelLen"),
    (["--max-num-seqs", "1"], "use spec.engine.maxNumSeqs"),
    (["--block-size", "16"], "use spec.engine.blockSize"),
    (["--gpu-memory-utilization", "0.9"], "use spec.engine.gpuMemoryUtilizationPercent"),
    (["--no-enable-prefix-caching"], "use prefixCaching of the role"),
    (["--shutdown-timeout", "1"], "use spec.engine.shutdownTimeoutSeconds"),
    (["--config", "engine.yaml"], "a file can set what is rendered here"),
    (["--api-key", "x"], "the router sends engines no key"),
    (["--hf-token", "x"], "use spec.model.source.tokenSecretRef"),
    (["--ssl-keyfile", "x"], "plain HTTP"),
    (["--kv-offloading-size", "10"], "replaces the KV connector"),
    (["--data-parallel-size", "2"], "use tensorParallelSize"),
    (["--pipeline-parallel-size", "2"], "use tensorParallelSize"),
    (["--max-num-batched-tokens 8192"], "write two list entries"),
    (["--hf-overrides", "hf_abcdefghijklmnopqrstuvwxyz"], "use spec.model.source.tokenSecretRef"),
]
"""Refused in every extraArgs, at the entry that is shown first."""

SHARED_ARGUMENTS: list[list[str]] = [
    ["--speculative-config", '{"method":"ngram","num_speculative_tokens":3}'],
    ["-sc", "{}"],
    ["--speculative-config.method=ngram"],
    ["--spec-method", "ngram"],
    ["--kv-cache-dtype", "fp8"],
    ["--quantization", "fp8"],
    ["-q", "fp8"],
    ["--chat-template", "x.jinja"],
    ["--tool-call-parser", "hermes"],
    ["--no-enable-auto-tool-choice"],
    ["--attention-backend", "FLASHINFER"],
]

VARIABLES: list[tuple[list[dict[str, Any]], str]] = [
    (env("NIXL_BACKEND", "LIBFABRIC"), "vLLM does not read it; use spec.kvTransfer.backend"),
    (env("VLLM_NIXL_BACKEND", "LIBFABRIC"), "vLLM does not read it; use spec.kvTransfer.backend"),
    (env("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1"), "set from each engine's own address"),
    (env("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600"), "set from each engine's own address"),
    (env("NCCL_SOCKET_IFNAME", "eth0"), "exclude the others instead, for example ^lo,docker,veth"),
    (env("HF_TOKEN"), "use spec.model.source.tokenSecretRef"),
    (env("MY_SECRET", "hf_abcdefghijklmnopqrstuvwxyz"), "use spec.model.source.tokenSecretRef"),
    (env("HF_HUB_OFFLINE", "1"), "use spec.model.source.download"),
    (env("VLLM_ENGINE_READY_TIMEOUT_S", "1"), "use spec.engine.startupTimeoutSeconds"),
    (env("VLLM_API_KEY"), "the router sends engines no key"),
    (env("FI_PROVIDER", "tcp"), "on P5enEFA it is always efa"),
    (env("A", "x", {"name": "s", "key": "k"}), "exactly one of value and secretKeyRef"),
    (env("A", None), "exactly one of value and secretKeyRef"),
]

RULES: list[tuple[str, list[Edit], str, str]] = [
    ("UCX on EFA", [("spec.kvTransfer.backend", "UCX")], "spec.kvTransfer.backend",
     "must be LIBFABRIC with nodeProfile P5enEFA"),
    ("LIBFABRIC on CPU", [("spec.nodeProfile", "CPU"), ("spec.kvTransfer.backend", "LIBFABRIC")],
     "spec.kvTransfer.backend", "must be UCX with nodeProfile CPU"),
    ("router TTL equal", [("spec.kvTransfer.routerTTLSeconds", 480)], "spec.kvTransfer.routerTTLSeconds",
     "must be at most 470"),
    ("router TTL too close", [("spec.kvTransfer.routerTTLSeconds", 471)], "spec.kvTransfer.routerTTLSeconds",
     "must be at most 470"),
    ("router TTL against a set TTL",
     [("spec.kvTransfer.decoderBlocksTTLSeconds", 60), ("spec.kvTransfer.routerTTLSeconds", 90)],
     "spec.kvTransfer.routerTTLSeconds", "must be at most 50"),
    ("old version in the tag", [("spec.engine.image", "vllm/vllm-openai:v0.28.1")], "spec.engine.image",
     "vLLM 0.28 is not supported; use 0.29 to 0.33"),
    ("new version in the tag", [("spec.engine.image", "r.example/x/engine:7-vllm0.34.0")], "spec.engine.image",
     "vLLM 0.34 is not supported"),
    ("old version stated", [("spec.engine.vllmVersion", "0.21.0")], "spec.engine.vllmVersion",
     "vLLM 0.21 is not supported; use 0.29 to 0.33"),
    ("version and tag differ",
     [("spec.engine.vllmVersion", "0.32.0"), ("spec.engine.image", "vllm/vllm-openai:v0.31.0")],
     "spec.engine.vllmVersion", "must be the version in the image's tag, 0.31"),
    ("more accelerators than a node has",
     [("spec.prefill.tensorParallelSize", 16), ("spec.decode.tensorParallelSize", 16)],
     "spec.prefill.tensorParallelSize", "must be at most 8, what one P5enEFA node has; got 16"),
    ("the same on decode", [("spec.prefill.tensorParallelSize", 16), ("spec.decode.tensorParallelSize", 16)],
     "spec.decode.tensorParallelSize", "must be at most 8"),
    ("two on CPU", [("spec.nodeProfile", "CPU"), ("spec.prefill.tensorParallelSize", 2)],
     "spec.prefill.tensorParallelSize", "must be at most 1"),
    ("unequal widths with reuse", [("spec.prefill.tensorParallelSize", 4), ("spec.decode.tensorParallelSize", 8)],
     "spec.decode.tensorParallelSize", "must equal spec.prefill.tensorParallelSize (4)"),
    ("misspelt extra key, a field's", [("spec.kvTransfer.extraConfig", extra("decoder_kv_block_ttl"))],
     "spec.kvTransfer.extraConfig[0].name", "use spec.kvTransfer.decoderBlocksTTLSeconds"),
    ("misspelt extra key, a free one", [("spec.kvTransfer.extraConfig", extra("num_thread"))],
     "spec.kvTransfer.extraConfig[0].name", "did you mean num_threads?"),
    ("unknown extra key", [("spec.kvTransfer.extraConfig", extra("zzz"))],
     "spec.kvTransfer.extraConfig[0].name", "Allowed: engine_ttl, num_threads"),
    ("extra key with a field", [("spec.kvTransfer.extraConfig", extra("backends", '["UCX"]'))],
     "spec.kvTransfer.extraConfig[0].name", "use spec.kvTransfer.backend"),
    ("flag by the back door", [("spec.kvTransfer.extraConfig", extra("bidirectional_kv_xfer", "false"))],
     "spec.kvTransfer.extraConfig[0].name", "use spec.kvTransfer.bidirectional"),
    ("fixed engine id", [("spec.kvTransfer.extraConfig", extra("engine_id", '"p-1"'))],
     "spec.kvTransfer.extraConfig[0].name", "it is never fixed"),
    ("no handshake check", [("spec.kvTransfer.extraConfig", extra("enforce_handshake_compat", "false"))],
     "spec.kvTransfer.extraConfig[0].name", "would read wrong memory"),
    ("extra value not JSON", [("spec.kvTransfer.extraConfig", extra("num_threads", "four"))],
     "spec.kvTransfer.extraConfig[0].value", "must be JSON"),
    ("extra key twice", [("spec.kvTransfer.extraConfig", extra("num_threads") * 2)],
     "spec.kvTransfer.extraConfig[1]", "stands twice"),
    ("recompute with the stock connector",
     [("spec.kvTransfer.loadFailurePolicy", "Recompute"), ("spec.kvTransfer.connector", "Stock")],
     "spec.kvTransfer.loadFailurePolicy", "must be Fail with connector Stock"),
    ("store that is not there", [("spec.router.handleStore.type", "Valkey")], "spec.router.handleStore.type",
     "must be Memory"),
    ("custom without settings", [("spec.nodeProfile", "Custom")], "spec.customProfile", "is required"),
    ("settings without custom", [("spec.customProfile", {})], "spec.customProfile", "with P5enEFA leave it out"),
    ("neither repository nor path", [("spec.model.name", "models/qwen/v1")], "spec.model.name",
     "begin a path with / or ./"),
    ("revision of a folder", [("spec.model.name", "/m"), ("spec.model.revision", "main")], "spec.model.revision",
     "no meaning for a folder"),
    ("two volumes",
     [("spec.model.source", {"emptyDir": {}, "hostPath": {"path": "/m"}})], "spec.model.source",
     "at most one of persistentVolumeClaim, emptyDir, hostPath may be set; got emptyDir, hostPath"),
    ("weights that never come", [("spec.model.source", {"emptyDir": {}, "download": "Forbidden"})],
     "spec.model.source.download", "must be Allowed with emptyDir"),
    ("variable twice", [("spec.engine.env", env("A") * 2)], "spec.engine.env[1]", "stands twice"),
]  # fmt: skip


def refusal(edits: list[Edit]) -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse_deployment(edited(smallest(), *edits))
    return caught.value


def assert_refused(edits: list[Edit], path: str, words: str) -> None:
    error = refusal(edits)
    messages = [problem.message for problem in error.problems if problem.path == path]
    assert messages, f"no problem at {path}: {error}"
    assert any(words in message for message in messages), str(error)


@pytest.mark.parametrize(("edits", "path", "words"), [row[1:] for row in SCHEMA], ids=[row[0] for row in SCHEMA])
def test_field_alone(edits: list[Edit], path: str, words: str) -> None:
    assert_refused(edits, path, words)


@pytest.mark.parametrize(("edits", "path", "words"), [row[1:] for row in RULES], ids=[row[0] for row in RULES])
def test_fields_together(edits: list[Edit], path: str, words: str) -> None:
    assert_refused(edits, path, words)


@pytest.mark.parametrize("place", ["engine", "prefill", "decode"])
@pytest.mark.parametrize(("arguments", "words"), ARGUMENTS, ids=[row[0][0][:40] for row in ARGUMENTS])
def test_argument_that_is_rendered(place: str, arguments: list[str], words: str) -> None:
    index = 1 if arguments[-1].startswith("hf_") else 0
    assert_refused([(f"spec.{place}.extraArgs", arguments)], f"spec.{place}.extraArgs[{index}]", words)


@pytest.mark.parametrize("place", ["prefill", "decode"])
@pytest.mark.parametrize("arguments", SHARED_ARGUMENTS, ids=lambda arguments: arguments[0])
def test_argument_that_both_roles_need(place: str, arguments: list[str]) -> None:
    path = f"spec.{place}.extraArgs"
    assert_refused([(path, arguments)], f"{path}[0]", "both roles need the same; use spec.engine.extraArgs")
    assert arguments[0] in deployment(("spec.engine.extraArgs", arguments)).spec.engine.extra_args


@pytest.mark.parametrize("place", ["engine", "prefill", "decode"])
@pytest.mark.parametrize(("variables", "words"), VARIABLES, ids=[f"{row[0][0]['name']}" for row in VARIABLES])
def test_variable(place: str, variables: list[dict[str, Any]], words: str) -> None:
    assert_refused([(f"spec.{place}.env", variables)], f"spec.{place}.env[0]", words)


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "VLLM_KV_CACHE_LAYOUT"])
def test_variable_that_both_roles_need(name: str) -> None:
    assert_refused([("spec.decode.env", env(name))], "spec.decode.env[0]", "use spec.engine.env")
    assert deployment(("spec.engine.env", env(name))).spec.engine.env[0].name == name


ACCEPTED: list[tuple[str, list[Edit]]] = [
    ("token from a Secret", [("spec.engine.env", env("HF_TOKEN", None, {"name": "hub", "key": "token"}))]),
    ("interfaces excluded", [("spec.engine.env", env("NCCL_SOCKET_IFNAME", "^lo,docker"))]),
    ("router TTL at the limit", [("spec.kvTransfer.routerTTLSeconds", 470)]),
    ("oldest version", [("spec.engine.vllmVersion", "0.29.0")]),
    ("newest version", [("spec.engine.image", "vllm/vllm-openai:v0.33.2")]),
    ("another product's version", [("spec.engine.image", "r.example/team/engine:1.4.0")]),
    ("tag that says nothing", [("spec.engine.image", "vllm/vllm-openai:nightly")]),
    ("digest", [("spec.engine.image", "vllm/vllm-openai@sha256:" + "0" * 64)]),
    ("unequal widths without reuse",
     [("spec.prefill.tensorParallelSize", 4), ("spec.decode.tensorParallelSize", 8),
      ("spec.kvTransfer.bidirectional", "Disabled")]),
    ("recompute with our connector", [("spec.kvTransfer.loadFailurePolicy", "Recompute")]),
    ("negative value", [("spec.engine.extraArgs", ["--max-logprobs", "-1"])]),
    ("value with spaces", [("spec.engine.extraArgs", ["--override-generation-config={\"a\": 1}"])]),
    ("flag that begins like a rendered one", [("spec.prefill.extraArgs", ["--model-impl", "auto"])]),
    ("efa spelt out", [("spec.engine.env", env("FI_PROVIDER", "efa"))]),
]  # fmt: skip


@pytest.mark.parametrize("edits", [row[1] for row in ACCEPTED], ids=[row[0] for row in ACCEPTED])
def test_neighbours_of_refused_values_are_accepted(edits: list[Edit]) -> None:
    assert deployment(*edits).spec.model.name == "Qwen/Qwen3-32B"


def test_every_rule_has_a_row_that_it_refuses() -> None:
    rows = [edits for _, edits, _, _ in RULES]
    rows += [[("spec.engine.extraArgs", arguments)] for arguments, _ in ARGUMENTS]
    rows += [[("spec.engine.env", variables)] for variables, _ in VARIABLES]
    parsed = [_without_rules(edits) for edits in rows]
    silent = [rule.__name__ for rule in rules.RULES if not any(list(rule(value)) for value in parsed)]
    assert silent == []


def _without_rules(edits: list[Edit]) -> Any:
    from pd_operator.core.model import PDDeployment

    return PDDeployment.model_validate(edited(smallest(), *edits))
