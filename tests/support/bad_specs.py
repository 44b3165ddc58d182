"""PDDeployments that must be refused: one row per reason, with the field that the refusal names.

Shared by the unit tests, which read them, and the cluster tests, which apply them: an API server refuses the same by
schema and CEL, save for those that only the operator can judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from support.pddeployments import REMOVED

Edit = tuple[str, Any]


@dataclass(frozen=True)
class BadSpec:
    """A bad edit of the smallest deployment.

    Attributes:
        name: what is wrong.
        edits: the edits that make it so.
        path: the YAML path of the problem.
        words: what the parser's message says there.
        by_server: an API server refuses it too; otherwise only the operator does.
        server_path: what the server's message names, where it is another spelling of the path.
    """

    name: str
    edits: list[Edit]
    path: str
    words: str
    by_server: bool = True
    server_path: str = ""


def env(name: str, value: str | None = "x", secret: dict[str, str] | None = None) -> list[dict[str, Any]]:
    variable: dict[str, Any] = {"name": name}
    if value is not None:
        variable["value"] = value
    if secret is not None:
        variable["secretKeyRef"] = secret
    return [variable]


VALKEY: dict[str, Any] = {"url": "valkey://cache:6379", "keySecretRef": {"name": "handles", "key": "key"}}


def volume(**changes: Any) -> Edit:
    """A volume of the engines, without a source."""
    return "spec.engine.volumes", [{"name": "more", "mountPath": "/more", **changes}]


def extra(name: str, value: str = "1") -> list[dict[str, str]]:
    return [{"name": name, "value": value}]


SCHEMA: list[tuple[str, list[Edit], str, str]] = [
    *((f"{field} beyond what a router can hold", [(f"spec.router.{field}", most + 1)], f"spec.router.{field}",
       f"to {most}")
      for field, most in (
          ("limits.maxBodyBytes", 1 << 28), ("limits.maxInflight", 100_000), ("limits.maxQueue", 100_000),
          ("limits.responseBytes", 1 << 32), ("handleStore.maxBytes", 1 << 36))),
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
    ("nothing like it", [("spec.router.zzz", 1)], "spec.router.zzz", "known here: replicas, workers, scaling"),
    ("list for an object", [("spec.router", [])], "spec.router", "an object with replicas, workers, scaling"),
    ("text for a list", [("spec.engine.extraArgs", "--a b")], "spec.engine.extraArgs", "a list of at most 128 entries"),
    ("number in a list", [("spec.engine.extraArgs", ["--a", 8])], "spec.engine.extraArgs[1]",
     "printable text on one line"),
    ("line break", [("spec.engine.extraArgs", ["--a\n"])], "spec.engine.extraArgs[0]", "printable text on one line"),
    ("node's folder by a way back", [("spec.model.source.hostPath", {"path": "/mnt/../etc"})],
     "spec.model.source.hostPath.path", "an absolute path without empty folders, . and .."),
    ("mounted by a way back", [("spec.model.source.mountPath", "/models/../proc")], "spec.model.source.mountPath",
     "an absolute path without ':', empty folders, . and .."),
    ("mounted beside a colon", [("spec.model.source.mountPath", "/models:ro")], "spec.model.source.mountPath",
     "an absolute path without ':'"),
    ("mounted by two slashes", [volume(mountPath="//dev/shm", emptyDir={})], "spec.engine.volumes[0].mountPath",
     "empty folders"),
    ("image by a URL", [("spec.engine.image", "https://r.io/x:0.32.0")], "spec.engine.image", "no scheme"),
    ("image's name in capitals", [("spec.engine.image", "R.io/X")], "spec.engine.image", "a lower-case name"),
    ("digest without an image", [("spec.engine.image", "@sha256:abc")], "spec.engine.image", "a whole digest"),
    ("digest cut off", [("spec.kvTransfer.connectorImage", "r.io/x@sha256:abc")], "spec.kvTransfer.connectorImage",
     "a whole digest"),
    ("router's image by a URL", [("spec.router.image", "http://r.io/x")], "spec.router.image", "no scheme"),
    ("prefix longer than an address", [("spec.router.auth",
                                        {"tenantFrom": "Header", "gateway": {"cidrs": ["10.0.0.0/99"]}})],
     "spec.router.auth.gateway.cidrs[0]", "a network such as 10.0.0.0/8"),
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
    (["--por", "1"], "--port (written --por) may not be set here"),
    (["--ho=0.0.0.0"], "--host (written --ho) may not be set here"),
    (["--tensor_par", "4"], "--tensor-parallel-size (written --tensor-par) may not be set here"),
    (["--no-enable-pre"], "(written --no-enable-pre) may not be set here"),
    (["--middleware", "pd_connector.shell.lease_api.LeaseApi"], "loaded as spec.kvTransfer asks"),
    (["--middleware=pd_connector.shell.lease_api.LeaseApi"], "loaded as spec.kvTransfer asks"),
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
    (["--api-key", "x"], "use spec.router.auth.engineKeySecretRef"),
    (["--hf-token", "x"], "use spec.model.source.tokenSecretRef"),
    (["--ssl-keyfile", "x"], "plain HTTP"),
    (["--kv-offloading-size", "10"], "replaces the KV connector"),
    (["--data-parallel-size", "2"], "use tensorParallelSize"),
    (["--pipeline-parallel-size", "2"], "use tensorParallelSize"),
    (["--max-num-batched-tokens 8192"], "write two list entries"),
    (["othermodel"], "'othermodel' is no flag and no flag's value"),
    (["--", "othermodel"], "'--' is no flag"),
    (["--hf-overrides", "hf_abcdefghijklmnopqrstuvwxyz"], "use spec.model.source.tokenSecretRef"),
]
"""Refused in every extraArgs, at the entry that is shown first."""

SHARED_ARGUMENTS: list[list[str]] = [
    ["--speculative-config", '{"method":"ngram","num_speculative_tokens":3}'],
    ["-sc", "{}"],
    ["--speculative-config.method=ngram"],
    ["--speculative-c", "{}"],
    ["--kv-cache-dt=fp8"],
    ["--no-enable-auto"],
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
    (env("VLLM_API_KEY"), "use spec.router.auth.engineKeySecretRef"),
    (env("PATH", "/opt/x/bin"), "it is the image's own; set it in the image"),
    (env("PYTHONHOME", "/opt/x"), "set it in the image"),
    (env("LD_PRELOAD", "/opt/x.so"), "set it in the image"),
    (env("LD_AUDIT", "/opt/x.so"), "set it in the image"),
    (env("VLLM_PLUGINS", ""), "it could leave out the connector's own plugin"),
    (env("PYTHONPATH", None, {"name": "s", "key": "k"}), "must be a plain value"),
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
    *((f"extra value {name} {value}", [("spec.kvTransfer.extraConfig", extra(name, value))],
       "spec.kvTransfer.extraConfig[0].value", words)
      for name, words, values in (
          ("num_threads", "must be a whole number from 1", ("0", "-1", "1.5", '"4"', "true", "[]")),
          ("engine_ttl", "must be seconds above 0", ("0", "-1", "0.0", '"4"', "null", "{}")),
      ) for value in values),
    ("extra key twice", [("spec.kvTransfer.extraConfig", extra("num_threads") * 2)],
     "spec.kvTransfer.extraConfig[1]", "stands twice"),
    ("recompute with the stock connector",
     [("spec.kvTransfer.loadFailurePolicy", "Recompute"), ("spec.kvTransfer.connector", "Stock")],
     "spec.kvTransfer.loadFailurePolicy", "must be Fail with connector Stock"),
    ("unpinned with the stock connector",
     [("spec.kvTransfer.retention", "Unpinned"), ("spec.kvTransfer.connector", "Stock")],
     "spec.kvTransfer.retention", "must be Pinned with connector Stock"),
    ("leased with the stock connector",
     [("spec.kvTransfer.retention", "Leased"), ("spec.kvTransfer.connector", "Stock")],
     "spec.kvTransfer.retention", "must be Pinned with connector Stock"),
    *((f"a lease with {name}", [("spec.kvTransfer.lease", {"seconds": 30}), *edits], "spec.kvTransfer.lease",
       "set spec.kvTransfer.retention to Leased, or leave it out")
      for name, edits in {
          "no retention": [],
          "retention Unpinned": [("spec.kvTransfer.retention", "Unpinned")],
          "retention Pinned": [("spec.kvTransfer.retention", "Pinned")],
          "the stock connector": [("spec.kvTransfer.connector", "Stock")],
      }.items()),
    ("retention that is none", [("spec.kvTransfer.retention", "Kept")], "spec.kvTransfer.retention", "Leased"),
    *((f"lease {name} {value}", [("spec.kvTransfer.retention", "Leased"), ("spec.kvTransfer.lease", {name: value})],
       f"spec.kvTransfer.lease.{name}", words)
      for name, words, values in (
          ("seconds", "an integer from 1 to 3600", (0, 3601, 1.5, "60")),
          ("sharePercent", "an integer from 1 to 95", (0, 96, 0.5)),
          ("toolHoldSeconds", "an integer from 0 to 3600", (-1, 3601)),
      ) for value in values),
    *((f"lease by its key {name}", [("spec.kvTransfer.extraConfig", extra(name, value))],
       "spec.kvTransfer.extraConfig[0].name", f"use spec.kvTransfer.lease.{field}")
      for name, value, field in (("pd_lease_seconds", "60", "seconds"), ("pd_lease_share", "0.5", "sharePercent"))),
    ("retention by its key", [("spec.kvTransfer.extraConfig", extra("pd_retention", '"Pinned"'))],
     "spec.kvTransfer.extraConfig[0].name", "use spec.kvTransfer.retention"),
    ("bypass without decode's prefix cache",
     [("spec.router.placement.bypass.maxNewTokens", 100), ("spec.decode.prefixCaching", False)],
     "spec.router.placement.bypass.maxNewTokens", "must be 0 with spec.decode.prefixCaching false"),
    ("bypass share as a fraction", [("spec.router.placement.bypass.maxNewPercent", 0.1)],
     "spec.router.placement.bypass.maxNewPercent", "an integer from 1 to 100"),
    ("a collector without a scheme", [("spec.router.tracing", {"endpoint": "collector:4317"})],
     "spec.router.tracing.endpoint", "must be a URL such as http://collector.monitoring:4318"),
    ("a collector with a password", [("spec.router.tracing", {"endpoint": "http://u:p@collector:4318"})],
     "spec.router.tracing.endpoint", "without credentials"),
    ("traces that go nowhere", [("spec.router.tracing", {"samplingPercent": 5})],
     "spec.router.tracing.endpoint", "is required"),
    ("more than every turn", [("spec.router.tracing", {"endpoint": "http://c:4318", "samplingPercent": 101})],
     "spec.router.tracing.samplingPercent", "must be"),
    ("a shared store without a server", [("spec.router.handleStore.type", "Valkey")], "spec.router.handleStore.valkey",
     "is required with type Valkey"),
    ("a server that nobody uses", [("spec.router.handleStore.valkey", VALKEY)], "spec.router.handleStore.valkey",
     "may be set with type Valkey only"),
    ("a server without a key",
     [("spec.router.handleStore", {"type": "Valkey", "valkey": {"url": "valkey://cache:6379"}})],
     "spec.router.handleStore.valkey.keySecretRef", "is required"),
    ("a server by another protocol",
     [("spec.router.handleStore", {"type": "Valkey", "valkey": {**VALKEY, "url": "http://cache:6379"}})],
     "spec.router.handleStore.valkey.url", "must be a URL such as valkey://valkey.cache:6379"),
    ("a server's password in its URL",
     [("spec.router.handleStore", {"type": "Valkey", "valkey": {**VALKEY, "url": "valkey://u:p@cache:6379"}})],
     "spec.router.handleStore.valkey.url", "without credentials"),
    ("a user without a password",
     [("spec.router.handleStore", {"type": "Valkey", "valkey": {**VALKEY, "username": "pd"}})],
     "spec.router.handleStore.valkey.passwordSecretRef", "is required with username"),
    ("a user that reads like a flag",
     [("spec.router.handleStore", {"type": "Valkey", "valkey": {**VALKEY, "username": "-x",
                                                                "passwordSecretRef": {"name": "a", "key": "b"}}})],
     "spec.router.handleStore.valkey.username", "letters, digits and . _ : / -"),
    ("authorities that nobody asks",
     [("spec.router.handleStore", {"type": "Valkey", "valkey": {**VALKEY, "caSecretRef": {"name": "a", "key": "b"}}})],
     "spec.router.handleStore.valkey.caSecretRef", "may be set with a valkeys:// or rediss:// url only"),
    ("a store that nobody waits for",
     [("spec.router.handleStore", {"type": "Valkey", "valkey": {**VALKEY, "timeoutMilliseconds": 0}})],
     "spec.router.handleStore.valkey.timeoutMilliseconds", "an integer from 1 to 5000"),
    ("a gateway that proves nothing", [("spec.router.auth.tenantFrom", "Header")], "spec.router.auth.gateway",
     "is required with tenantFrom Header"),
    ("a gateway without a proof", [("spec.router.auth", {"tenantFrom": "Header", "gateway": {}})],
     "spec.router.auth.gateway", "needs secretRef or cidrs"),
    ("a gateway that nobody asks", [("spec.router.auth.gateway", {"cidrs": ["10.0.0.0/8"]})],
     "spec.router.auth.gateway", "may be set with tenantFrom Header only"),
    ("a gateway's network with bits behind its prefix",
     [("spec.router.auth", {"tenantFrom": "Header", "gateway": {"cidrs": ["10.0.0.1/8"]}})],
     "spec.router.auth.gateway.cidrs[0]", "no bits set behind its prefix"),
    ("keys behind a gateway",
     [("spec.router.auth", {"tenantFrom": "Header", "gateway": {"cidrs": ["10.0.0.0/8"]},
                            "apiKeysSecretRef": {"name": "a", "key": "b"}})],
     "spec.router.auth.apiKeysSecretRef", "must be left out with tenantFrom Header"),
    ("keys and requests without one",
     [("spec.router.auth", {"anonymous": "Allowed", "apiKeysSecretRef": {"name": "a", "key": "b"}})],
     "spec.router.auth.anonymous", "must be NoReuse with apiKeysSecretRef"),
    ("a burst of no rate", [("spec.router.tenantLimits.burst", 5)], "spec.router.tenantLimits.burst",
     "needs requestsPerSecond"),
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


PODS: list[tuple[str, list[Edit], str, str]] = [
    ("label of ours", [("spec.decode.pod", {"labels": {"pdserving.dev/role": "x"}})],
     "spec.decode.pod.labels.pdserving.dev/role", "are set for you"),
    ("recommended label", [("spec.router.pod", {"labels": {"app.kubernetes.io/name": "x"}})],
     "spec.router.pod.labels.app.kubernetes.io/name", "are set for you"),
    *((f"label {key}", [("spec.decode.pod", {"labels": {key: "x"}})], f"spec.decode.pod.labels.{key}",
       "are set for you")
      for key in ("pod-template-hash", "controller-revision-hash", "statefulset.kubernetes.io/pod-name",
                  "apps.kubernetes.io/pod-index")),
    ("router's label of its controller", [("spec.router.pod", {"labels": {"pod-template-hash": "x"}})],
     "spec.router.pod.labels.pod-template-hash", "are set for you"),
    ("label key with an empty part", [("spec.prefill.pod", {"labels": {"a..b/c": "x"}})],
     "spec.prefill.pod.labels.a..b/c", "a Kubernetes key"),
    ("label key", [("spec.prefill.pod", {"labels": {"a b": "x"}})], "spec.prefill.pod.labels.a b", "a Kubernetes key"),
    ("label value", [("spec.prefill.pod", {"labels": {"a": "x y"}})], "spec.prefill.pod.labels.a", "letters, digits"),
    ("selector value", [("spec.prefill.pod.nodeSelector", {"a": "-"})], "spec.prefill.pod.nodeSelector.a",
     "letters, digits"),
    ("value of Exists", [("spec.decode.pod.tolerations", [{"key": "a", "operator": "Exists", "value": "b"}])],
     "spec.decode.pod.tolerations[0].value", "must be left out with operator Exists"),
    ("no key", [("spec.decode.pod.tolerations", [{"value": "b"}])], "spec.decode.pod.tolerations[0].key",
     "is required with operator Equal"),
    ("seconds without NoExecute", [("spec.decode.pod.tolerations", [{"key": "a", "tolerationSeconds": 5}])],
     "spec.decode.pod.tolerations[0].tolerationSeconds", "with effect NoExecute only"),
    ("unknown effect", [("spec.decode.pod.tolerations", [{"key": "a", "effect": "Never"}])],
     "spec.decode.pod.tolerations[0].effect", "one of NoSchedule"),
    ("In without values", [("spec.decode.pod.nodeMatchExpressions", [{"key": "a", "operator": "In"}])],
     "spec.decode.pod.nodeMatchExpressions[0].values", "must not be empty"),
    ("Exists with values",
     [("spec.decode.pod.nodeMatchExpressions", [{"key": "a", "operator": "Exists", "values": ["b"]}])],
     "spec.decode.pod.nodeMatchExpressions[0].values", "must be left out"),
    ("Gt with a word", [("spec.decode.pod.nodeMatchExpressions", [{"key": "a", "operator": "Gt", "values": ["b"]}])],
     "spec.decode.pod.nodeMatchExpressions[0].values", "must be one whole number"),
    ("unit that is not one", [("spec.decode.resources", {"limits": {"memory": "64GB"}})],
     "spec.decode.resources.limits.memory", "a Kubernetes quantity"),
    ("negative quantity", [("spec.decode.resources", {"limits": {"cpu": -1}})], "spec.decode.resources.limits.cpu",
     "a Kubernetes quantity"),
    ("resource that is none", [("spec.decode.resources", {"limits": {"foo": 1}})], "spec.decode.resources.limits.foo",
     "cpu, memory, ephemeral-storage, hugepages-2Mi"),
    ("huge pages of no size", [("spec.router.resources", {"requests": {"hugepages-": 1}})],
     "spec.router.resources.requests.hugepages-", "cpu, memory, ephemeral-storage, hugepages-2Mi"),
    ("half a device", [("spec.decode.resources", {"limits": {"nvidia.com/gpu": "500m"}})],
     "spec.decode.resources.limits.nvidia.com/gpu", "must be whole numbers, such as 1 or 640Mi; got 500m"),
    ("half a device as a fraction", [("spec.decode.resources", {"requests": {"vpc.amazonaws.com/efa": "1.5"}})],
     "spec.decode.resources.requests.vpc.amazonaws.com/efa", "must be whole numbers"),
    ("one and a half huge pages", [("spec.decode.resources", {"limits": {"hugepages-2Mi": "3Mi"}})],
     "spec.decode.resources.limits.hugepages-2Mi", "a multiple of the size of its pages; got 3Mi"),
    ("a resource of quotas", [("spec.decode.resources", {"limits": {"requests.example.com/foo": 1}})],
     "spec.decode.resources.limits.requests.example.com/foo", "leave requests. out"),
    ("a resource with a long domain", [("spec.decode.resources", {"limits": {"a" * 245 + "/foo": 1}})],
     "spec.decode.resources.limits", "at most 244 characters"),
    ("a label with a long domain", [("spec.prefill.pod.labels", {"a" * 254 + "/foo": "x"})],
     "spec.prefill.pod.labels", "at most 253 characters"),
    ("an annotation with a long domain", [("spec.router.service.annotations", {"a" * 254 + "/foo": "x"})],
     "spec.router.service.annotations", "at most 253 characters"),
    ("a taint with a long domain",
     [("spec.router.pod.tolerations", [{"key": "a" * 254 + "/foo", "operator": "Exists"}])],
     "spec.router.pod.tolerations[0].key", "at most 253 characters"),
    ("a node's label with a long domain",
     [("spec.router.pod.nodeMatchExpressions", [{"key": "a" * 254 + "/foo", "operator": "Exists"}])],
     "spec.router.pod.nodeMatchExpressions[0].key", "at most 253 characters"),
    *((f"a Secret's key {key}", [("spec.model.source.tokenSecretRef", {"name": "a", "key": key})],
       "spec.model.source.tokenSecretRef.key", "neither . nor beginning with ..") for key in (".", "..", "..a")),
    ("half a huge page", [("spec.decode.resources", {"limits": {"hugepages-2Mi": "500m"}})],
     "spec.decode.resources.limits.hugepages-2Mi", "must be whole numbers"),
    ("thousandths of a byte", [("spec.router.resources", {"limits": {"memory": "512m"}})],
     "spec.router.resources.limits.memory", "must be whole bytes, such as 512Mi"),
    ("part of a byte", [("spec.decode.resources", {"requests": {"ephemeral-storage": "0.5"}})],
     "spec.decode.resources.requests.ephemeral-storage", "must be whole bytes"),
    ("fewer devices than processes",
     [("spec.prefill.tensorParallelSize", 8), ("spec.decode.tensorParallelSize", 8),
      ("spec.decode.resources", {"limits": {"nvidia.com/gpu": 4}})],
     "spec.decode.resources.limits.nvidia.com/gpu",
     "nvidia.com/gpu must be at least tensorParallelSize, or 0 with devices of another name"),
    ("fewer devices requested than processes",
     [("spec.prefill.tensorParallelSize", 2), ("spec.decode.tensorParallelSize", 2),
      ("spec.prefill.resources", {"requests": {"nvidia.com/gpu": "1"}})],
     "spec.prefill.resources.requests.nvidia.com/gpu", "got 1 with tensorParallelSize 2"),
    *((f"shared memory of {size} GiB",
       [("spec.prefill.tensorParallelSize", 8), ("spec.decode.tensorParallelSize", 8),
        ("spec.engine.sharedMemoryGiB", size)],
       "spec.engine.sharedMemoryGiB", "must be less than the memory limit of each role") for size in (400, 401, 4096)),
    ("shared memory above a limit of one's own",
     [("spec.decode.resources", {"limits": {"memory": "20Gi"}}), ("spec.engine.sharedMemoryGiB", 20)],
     "spec.engine.sharedMemoryGiB", "(spec.decode: 20Gi); got 20"),
    ("shared memory above a limit on a CPU",
     [("spec.nodeProfile", "CPU"), ("spec.prefill.resources", {"limits": {"memory": "2Gi"}}),
      ("spec.engine.sharedMemoryGiB", 3)],
     "spec.engine.sharedMemoryGiB", "(spec.prefill: 2Gi); got 3"),
    ("request above the limit", [("spec.router.resources", {"requests": {"cpu": 2}, "limits": {"cpu": "1500m"}})],
     "spec.router.resources.requests.cpu", "at most the limit (1500m)"),
    ("devices requested otherwise",
     [("spec.decode.resources", {"requests": {"nvidia.com/gpu": 1}, "limits": {"nvidia.com/gpu": 2}})],
     "spec.decode.resources.requests.nvidia.com/gpu", "must equal the limit (2)"),
    ("canary by hand", [("spec.decode.updateStrategy", {"type": "OnDelete", "partition": 1})],
     "spec.decode.updateStrategy.partition", "must be left out"),
    ("missing pods by hand", [("spec.decode.updateStrategy", {"type": "OnDelete", "maxUnavailable": 1})],
     "spec.decode.updateStrategy.maxUnavailable", "must be left out"),
    ("weights over shared memory", [("spec.model.source.mountPath", "/dev/shm/models")], "spec.model.source.mountPath",
     "/dev/shm lies there"),
    ("weights over everything", [("spec.model.source.mountPath", "/")], "spec.model.source.mountPath",
     "a folder of its own"),
    ("weights over the folder above", [("spec.model.source.mountPath", "/var/cache")], "spec.model.source.mountPath",
     "a folder of its own"),
    *((f"weights over {path}", [("spec.model.source.mountPath", path)], "spec.model.source.mountPath",
       "anything mounted there hides what the image needs to start")
      for path in ("/proc", "/proc/sys", "/sys", "/usr", "/etc/", "/bin", "/usr/local/lib")),
    ("volume over /dev", [volume(mountPath="/dev", emptyDir={})], "spec.engine.volumes[0].mountPath",
     "must be a folder of its own, such as /models"),
    ("volume over /lib", [volume(mountPath="/lib", emptyDir={})], "spec.engine.volumes[0].mountPath",
     "must be a folder of its own, such as /models"),
    *((f"volume over {path}", [volume(mountPath=path, emptyDir={})], "spec.engine.volumes[0].mountPath",
       "the kubelet puts files of its own there")
      for path in ("/dev/termination-log", "/etc/hosts", "/etc/resolv.conf/", "/etc/hostname", "/etc/hosts/a")),
    ("volume without a source", [volume()], "spec.engine.volumes[0]", "exactly one of configMap"),
    ("volume with two sources", [volume(configMap={"name": "a"}, emptyDir={})], "spec.engine.volumes[0]",
     "exactly one of configMap"),
    ("volume with a name of ours", [volume(name="shm", emptyDir={})], "spec.engine.volumes[0].name",
     "the operator's own"),
    ("volume over the connector", [volume(mountPath="/opt/pd-connector/pd_wire", emptyDir={})],
     "spec.engine.volumes[0].mountPath", "/opt/pd-connector lies there"),
    ("volume over the weights", [("spec.model.source.emptyDir", {}), volume(mountPath="/models", emptyDir={})],
     "spec.engine.volumes[0].mountPath", "spec.model.source is mounted there"),
    ("volume over the weights with a slash",
     [("spec.model.source.emptyDir", {}), volume(mountPath="/models/", emptyDir={})],
     "spec.engine.volumes[0].mountPath", "spec.model.source is mounted there"),
    ("two volumes in one place but for a slash",
     [("spec.engine.volumes", [{"name": name, "mountPath": path, "emptyDir": {}} for name, path in
                               (("a", "/a"), ("b", "/a/"))])],
     "spec.engine.volumes[1].mountPath", "spec.engine.volumes[0] is mounted there"),
    ("two volumes in one place",
     [("spec.engine.volumes", [{"name": name, "mountPath": "/a", "emptyDir": {}} for name in ("a", "b")])],
     "spec.engine.volumes[1].mountPath", "spec.engine.volumes[0] is mounted there"),
    ("volume twice",
     [("spec.engine.volumes", [{"name": "a", "mountPath": place, "emptyDir": {}} for place in ("/a", "/b")])],
     "spec.engine.volumes[1].name", "stands twice"),
    ("claim without a source", [("spec.decode.pod.resourceClaims", [{"name": "nics"}])],
     "spec.decode.pod.resourceClaims[0]", "exactly one of resourceClaimTemplateName"),
    ("claim with two sources",
     [("spec.decode.pod.resourceClaims",
       [{"name": "nics", "resourceClaimTemplateName": "a", "resourceClaimName": "b"}])],
     "spec.decode.pod.resourceClaims[0]", "exactly one of resourceClaimTemplateName"),
    ("claim twice", [("spec.decode.pod.resourceClaims", [{"name": "nics", "resourceClaimName": "b"}] * 2)],
     "spec.decode.pod.resourceClaims[1].name", "stands twice"),
    ("user without Restricted", [("spec.engine.runAsUser", 1000)], "spec.engine.runAsUser", "Restricted only"),
    ("root under Restricted", [("spec.engine.securityProfile", "Restricted"), ("spec.engine.runAsUser", 0)],
     "spec.engine.runAsUser", "an integer from 1"),
    ("image for the stock connector",
     [("spec.kvTransfer.connector", "Stock"), ("spec.kvTransfer.connectorImage", "r.example/c:1")],
     "spec.kvTransfer.connectorImage", "must be left out"),
    ("namespace twice", [("spec.networkPolicy.monitoringNamespaces", ["a", "a"])],
     "spec.networkPolicy.monitoringNamespaces[1]", "stands twice"),
    ("Secret twice", [("spec.imagePullSecrets", [{"name": "a"}, {"name": "a"}])], "spec.imagePullSecrets[1]",
     "stands twice"),
    ("negative replicas", [("spec.decode.replicas", -1)], "spec.decode.replicas", "an integer from 0 to 512"),
    ("too many replicas", [("spec.decode.replicas", 513)], "spec.decode.replicas", "an integer from 0 to 512"),
    ("port out of range", [("spec.router.service.port", 70000)], "spec.router.service.port", "from 1 to 65535"),
    ("too many arguments", [("spec.engine.extraArgs", ["--a"] * 129)], "spec.engine.extraArgs", "at most 128"),
    ("oversize argument", [("spec.engine.extraArgs", ["x" * 4097])], "spec.engine.extraArgs[0]", "at most 4096"),
    ("unknown scaling", [("spec.decode.scaling", "Auto")], "spec.decode.scaling", "one of Fixed, External"),
    ("image with a space", [("spec.engine.image", "a b")], "spec.engine.image", "a container image reference"),
]  # fmt: skip
"""What pods are told."""

NEIGHBOURS: list[tuple[str, list[Edit]]] = [
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
    ("bypass with decode's prefix cache", [("spec.router.placement.bypass.maxNewTokens", 100)]),
    ("pinned with the stock connector",
     [("spec.kvTransfer.retention", "Pinned"), ("spec.kvTransfer.connector", "Stock")]),
    ("a lease", [("spec.kvTransfer.retention", "Leased"), ("spec.kvTransfer.lease", {"toolHoldSeconds": 0})]),
    ("leases without numbers", [("spec.kvTransfer.retention", "Leased")]),
    ("a middleware beside the connector's", [("spec.decode.extraArgs", ["--middleware", "mine.pd_connector.Log"])]),
    ("recompute with our connector", [("spec.kvTransfer.loadFailurePolicy", "Recompute")]),
    ("negative value", [("spec.engine.extraArgs", ["--max-logprobs", "-1"])]),
    ("several values", [("spec.engine.extraArgs", ["--cudagraph-capture-sizes", "1", "2", "4", "--seed", "1"])]),
    ("value with spaces", [("spec.engine.extraArgs", ["--override-generation-config={\"a\": 1}"])]),
    ("flag that begins like a rendered one", [("spec.prefill.extraArgs", ["--model-impl", "auto"])]),
    ("efa spelt out", [("spec.engine.env", env("FI_PROVIDER", "efa"))]),
    ("path that begins like one of ours", [("spec.model.source.mountPath", "/dev/shmodels")]),
    ("folder beside one of ours", [("spec.model.source.mountPath", "/var/cache/weights")]),
    ("integers as amounts", [("spec.decode.resources", {"requests": {"cpu": 4}, "limits": {"nvidia.com/gpu": 1}})]),
    ("request below the limit", [("spec.router.resources", {"requests": {"cpu": "1500m"}, "limits": {"cpu": 2}})]),
    ("a volume where weights would be", [volume(mountPath="/models", emptyDir={})]),
    ("a volume beside ours", [volume(mountPath="/opt/certificates", secret={"name": "a"})]),
    *((f"a volume at {path}", [volume(mountPath=path, emptyDir={})])
      for path in ("/etc/ssl/certs", "/usr/share/fonts", "/etc/hosts.d", "/procs", "/opt/amazon/", "/a/..b", "/tmp")),
    ("node's folder with a colon", [("spec.model.source.hostPath", {"path": "/mnt/pci-0:1"})]),
    ("image with everything",
     [("spec.engine.image", "R.example:5000/a/b.c__d-e:v0.32.0-x_Y@sha256:" + "0f" * 32)]),
    ("image by its name", [("spec.router.image", "pd-router")]),
    ("libraries of one's own", [("spec.engine.env", env("LD_LIBRARY_PATH", "/opt/amazon/efa/lib"))]),
    ("modules of one's own", [("spec.engine.env", env("PYTHONPATH", "/opt/modules"))]),
    ("resources of every kind",
     [("spec.decode.resources", {"limits": {"ephemeral-storage": "1.5Gi", "hugepages-1Gi": "2Gi", "cpu": "1500m",
                                            "amd.com/gpu": 1, "nvidia.com/gpu": 0, "memory": "100G"}})]),
    ("more devices than processes", [("spec.decode.resources", {"limits": {"nvidia.com/gpu": 8}})]),
    ("shared memory below the limit", [("spec.engine.sharedMemoryGiB", 49)]),
    ("shared memory below a larger limit",
     [("spec.engine.sharedMemoryGiB", 99), *((f"spec.{role}.resources", {"limits": {"memory": "100Gi"}})
                                             for role in ("prefill", "decode"))]),
    ("shared memory where a larger request takes the limit out",
     [("spec.engine.sharedMemoryGiB", 50), *((f"spec.{role}.resources", {"requests": {"memory": "51Gi"}})
                                             for role in ("prefill", "decode"))]),
    ("shared memory without a limit",
     [("spec.engine.sharedMemoryGiB", 50), *((f"spec.{role}.resources", {"limits": {"memory": 0}})
                                             for role in ("prefill", "decode"))]),
    ("shared memory of a profile without a limit", [("spec.nodeProfile", "CPU"), ("spec.engine.sharedMemoryGiB", 64)]),
    ("label that begins like a controller's", [("spec.decode.pod.labels", {"pod-template-hash-of": "x"})]),
    ("whole networks", [("spec.router.auth", {"tenantFrom": "Header",
                                              "gateway": {"cidrs": ["10.0.0.0/32", "::/0", "2001:db8::/128"]}})]),
    ("every taint", [("spec.decode.pod.tolerations", [{"operator": "Exists"}])]),
    ("label with a domain", [("spec.decode.pod.labels", {"example.com/team": "x"})]),
    ("label that begins like ours", [("spec.decode.pod.labels", {"pdserving.device": "x"})]),
    *((f"time to live of {value}", [("spec.kvTransfer.extraConfig", extra("engine_ttl", value))])
      for value in ("1", "600", "0.5", "10.25", "1000")),
    ("many threads", [("spec.kvTransfer.extraConfig", extra("num_threads", "128"))]),
    *((f"a Secret's key {key}", [("spec.model.source.tokenSecretRef", {"name": "a", "key": key})])
      for key in (".dockerconfigjson", "a..b", "-", "_.", "token")),
    ("huge pages in a larger unit", [("spec.decode.resources", {"limits": {"hugepages-2Mi": "1Gi"}})]),
    ("no huge pages", [("spec.decode.resources", {"limits": {"hugepages-2Mi": 0}})]),
    ("a label with the longest domain", [("spec.prefill.pod.labels", {"a" * 253 + "/foo": "x"})]),
    ("a resource of a domain like a quota's", [("spec.decode.resources", {"limits": {"requests/foo": 1}})]),
    ("JSON text", [("spec.kvTransfer.extraConfig", extra("num_threads", "4"))]),
    ("a gateway by its secret",
     [("spec.router.auth", {"tenantFrom": "Header", "gateway": {"secretRef": {"name": "a", "key": "b"}}})]),
    ("keys without anonymous requests", [("spec.router.auth", {"apiKeysSecretRef": {"name": "a", "key": "b"}})]),
    ("canary", [("spec.decode.updateStrategy", {"partition": 1, "maxUnavailable": 2})]),
]  # fmt: skip
"""Good edits close to bad ones."""

OPERATOR_ONLY = frozenset({"version and tag differ", "fraction", "a gateway's network with bits behind its prefix"})
"""CEL knows no networks before 1.31; an API server takes 8.0 for 8."""

SERVER_PATHS = {
    "wrong group": "API version in the data (apps/v1)",
    "flag othermodel": "spec.engine.extraArgs",
    "wrong kind": "kind: Invalid value",
    "label of ours": "spec.decode.pod.labels",
    "recommended label": "spec.router.pod.labels",
    **dict.fromkeys(
        (
            f"label {key}"
            for key in (
                "pod-template-hash",
                "controller-revision-hash",
                "statefulset.kubernetes.io/pod-name",
                "apps.kubernetes.io/pod-index",
            )
        ),
        "spec.decode.pod.labels",
    ),
    "router's label of its controller": "spec.router.pod.labels",
    "label key with an empty part": "spec.prefill.pod.labels",
    "resource that is none": "spec.decode.resources.limits",
    "huge pages of no size": "spec.router.resources.requests",
    "half a device": "spec.decode.resources.limits",
    "half a device as a fraction": "spec.decode.resources.requests",
    "half a huge page": "spec.decode.resources.limits",
    "one and a half huge pages": "spec.decode.resources.limits",
    "a resource of quotas": "spec.decode.resources.limits",
    "volume over the weights with a slash": "spec.engine.volumes",
    "two volumes in one place but for a slash": "spec.engine.volumes",
    "thousandths of a byte": "spec.router.resources.limits",
    "part of a byte": "spec.decode.resources.requests",
    "fewer devices than processes": "spec.decode.resources.limits",
    "fewer devices requested than processes": "spec.prefill.resources.requests",
    "label key": "spec.prefill.pod.labels",
    "request above the limit": "spec.router.resources.requests",
    "devices requested otherwise": "spec.decode.resources.requests",
    "volume over the weights": "spec.engine.volumes",
    "two volumes in one place": "spec.engine.volumes",
    "volume twice": "spec.engine.volumes[1]",
    "claim twice": "spec.decode.pod.resourceClaims[1]",
    "variable FI_PROVIDER": "spec.decode.env",
}
"""What a server names instead: the list or map that an entry lies in."""


def refused_entry(arguments: list[str]) -> int:
    """Which entry of `ARGUMENTS` is named: the flag, or the value where that is what may not be."""
    return int(arguments[-1].startswith(("hf_", "pd_connector.")))


def bad_specs() -> Iterator[BadSpec]:
    """All rows, each table's in its order."""
    rows = [*SCHEMA, *RULES, *PODS]
    for arguments, words in ARGUMENTS:
        path = "spec.engine.extraArgs"
        rows.append((f"flag {arguments[0][:30]}", [(path, arguments)], f"{path}[{refused_entry(arguments)}]", words))
    for arguments in SHARED_ARGUMENTS:
        path = "spec.prefill.extraArgs"
        rows.append((f"flag of one role {arguments[0]}", [(path, arguments)], f"{path}[0]", "both roles need the same"))
    for variables, words in VARIABLES:
        rows.append((f"variable {variables[0]['name']}", [("spec.decode.env", variables)], "spec.decode.env[0]", words))
    for name, edits, path, words in rows:
        yield BadSpec(name, edits, path, words, name not in OPERATOR_ONLY, SERVER_PATHS.get(name, path))
