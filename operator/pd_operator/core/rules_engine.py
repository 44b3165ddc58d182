"""Rules about the engines: arguments, variables, versions, parallelism, weights."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pd_operator.core import versions
from pd_operator.core.choices import Download, NodeProfile, Switch
from pd_operator.core.model import PDDeployment
from pd_operator.core.problems import Problem, shown
from pd_operator.core.profiles import profile_of
from pd_operator.core.reserved import (
    CONNECTORS_OWN,
    NO_CONNECTOR_MODULES,
    PLAIN_ENV,
    RENDERED_ENV,
    RENDERED_ENV_PREFIXES,
    RENDERED_FLAGS,
    SHARED_ENV,
    TOKEN_ENV,
    flags_in,
    looks_like_token,
    rendered_flag,
    shared_flag,
    words_without_flag,
)
from pd_operator.core.spec_engine import EnvVar, ExtraArgs

ROLES = ("prefill", "decode")


def extra_arguments(deployment: PDDeployment) -> Iterator[Problem]:
    """extraArgs hold no flag that is rendered, a role's none that both roles must share, and no word without a flag."""
    for place, arguments in _argument_lists(deployment):
        for index, argument in enumerate(arguments):
            path = f"{place}[{index}]"
            if looks_like_token(argument):
                yield Problem(path, TOKEN_ENV["HF_TOKEN"])
            if re.search(CONNECTORS_OWN, argument):
                yield Problem(path, NO_CONNECTOR_MODULES)
            if argument.startswith("--") and " " in argument.partition("=")[0]:
                yield Problem(path, "flag and value in one entry; write two list entries, or join them with =")
        for index in words_without_flag(arguments):
            what = f"{shown(arguments[index])} is no flag and no flag's value; the model and the rest have fields"
            yield Problem(f"{place}[{index}]", what)
        for index, flag in flags_in(arguments):
            path = f"{place}[{index}]"
            known = rendered_flag(flag)
            if known is not None:
                yield Problem(path, f"{_named(flag, known)} may not be set here: {RENDERED_FLAGS[known]}")
                continue
            shared = shared_flag(flag)
            if shared is not None and place != "spec.engine.extraArgs":
                reason = "both roles need the same; use spec.engine.extraArgs"
                yield Problem(path, f"{_named(flag, shared)} may not be set for one role: {reason}")


def environment(deployment: PDDeployment) -> Iterator[Problem]:
    """env holds no variable that is rendered, has no effect, carries a secret, or makes the roles differ."""
    for place, variables in _env_lists(deployment):
        seen: set[str] = set()
        for index, variable in enumerate(variables):
            path = f"{place}[{index}]"
            if variable.name in seen:
                yield Problem(path, f"{variable.name} stands twice in this list; keep one")
            seen.add(variable.name)
            if (variable.value is None) == (variable.secret_key_ref is None):
                yield Problem(path, f"{variable.name} needs exactly one of value and secretKeyRef")
            reason = _refused_variable(variable, place, deployment)
            if reason is not None:
                yield Problem(path, f"{variable.name} may not be set here: {reason}")


def _refused_variable(variable: EnvVar, place: str, deployment: PDDeployment) -> str | None:
    name, value = variable.name, variable.value
    if name in RENDERED_ENV:
        return RENDERED_ENV[name]
    for prefix, reason in RENDERED_ENV_PREFIXES.items():
        if name.startswith(prefix):
            return reason
    if value is None and name in PLAIN_ENV:
        return PLAIN_ENV[name]
    if value is not None and (name in TOKEN_ENV or looks_like_token(value)):
        return TOKEN_ENV["HF_TOKEN"]
    if name == "NCCL_SOCKET_IFNAME" and (value is None or not value.startswith("^")):
        return "naming an interface hides EFA; exclude the others instead, for example ^lo,docker,veth"
    if name == "FI_PROVIDER" and deployment.spec.node_profile is NodeProfile.P5EN_EFA and value != "efa":
        return "on P5enEFA it is always efa; another provider is TCP in disguise"
    if name in SHARED_ENV and place != "spec.engine.env":
        return "both roles need the same; use spec.engine.env"
    return None


def vllm_version(deployment: PDDeployment) -> Iterator[Problem]:
    """The vLLM version, where it can be seen, is one that the connector knows; field and tag agree."""
    engine = deployment.spec.engine
    stated = versions.version_of(engine.vllm_version) if engine.vllm_version is not None else None
    tagged = versions.version_in_image(engine.image) if engine.image is not None else None
    for path, version in (("spec.engine.vllmVersion", stated), ("spec.engine.image", tagged)):
        if version is not None and not versions.is_supported(version):
            text = versions.version_text(version)
            yield Problem(path, f"vLLM {text} is not supported; use {versions.SUPPORTED_TEXT}")
    both_known = stated is not None and tagged is not None and versions.is_supported(stated)
    if both_known and tagged is not None and stated != tagged:
        yield Problem(
            "spec.engine.vllmVersion",
            f"must be the version in the image's tag, {versions.version_text(tagged)}, or be left out; "
            f"got {engine.vllm_version}",
        )


def tensor_parallelism(deployment: PDDeployment) -> Iterator[Problem]:
    """An engine fits on a node, and with reuse both roles are equally wide."""
    spec = deployment.spec
    if spec.node_profile is NodeProfile.CUSTOM and spec.custom_profile is None:
        return
    most = profile_of(spec).accelerators_per_node
    for role in ROLES:
        size = getattr(spec, role).tensor_parallel_size
        if size > most:
            what = f"must be at most {most}, what one {spec.node_profile.value} node has; got {size}"
            yield Problem(f"spec.{role}.tensorParallelSize", what)
    prefill, decode = spec.prefill.tensor_parallel_size, spec.decode.tensor_parallel_size
    if prefill != decode and spec.kv_transfer.bidirectional is Switch.ENABLED:
        yield Problem(
            "spec.decode.tensorParallelSize",
            f"must equal spec.prefill.tensorParallelSize ({prefill}) while kvTransfer.bidirectional is Enabled, since "
            f"each role then reads the other's memory; got {decode}",
        )


def weights(deployment: PDDeployment) -> Iterator[Problem]:
    """The model's name can be read one way only, and its source can supply it."""
    model = deployment.spec.model
    source = model.source
    if not model.is_local and model.name.count("/") > 1:
        what = "is neither a repository (owner/name) nor a path; begin a path with / or ./"
        yield Problem("spec.model.name", f"{model.name!r} {what}")
    if model.is_local and model.revision is not None:
        yield Problem("spec.model.revision", "has no meaning for a folder; leave it out")
    volumes = {
        "persistentVolumeClaim": source.persistent_volume_claim,
        "emptyDir": source.empty_dir,
        "hostPath": source.host_path,
    }
    chosen = [name for name, volume in volumes.items() if volume is not None]
    if len(chosen) > 1:
        yield Problem("spec.model.source", f"at most one of {', '.join(volumes)} may be set; got {', '.join(chosen)}")
    if chosen == ["emptyDir"] and source.download is Download.FORBIDDEN:
        yield Problem(
            "spec.model.source.download", "must be Allowed with emptyDir: an empty folder never gets the weights"
        )


def custom_profile(deployment: PDDeployment) -> Iterator[Problem]:
    """customProfile goes with nodeProfile Custom, and only with it."""
    spec = deployment.spec
    if spec.node_profile is NodeProfile.CUSTOM and spec.custom_profile is None:
        yield Problem("spec.customProfile", "is required with nodeProfile Custom")
    if spec.node_profile is not NodeProfile.CUSTOM and spec.custom_profile is not None:
        yield Problem(
            "spec.customProfile",
            f"may be set with nodeProfile Custom only; with {spec.node_profile.value} leave it out",
        )


def _argument_lists(deployment: PDDeployment) -> Iterator[tuple[str, ExtraArgs]]:
    spec = deployment.spec
    yield "spec.engine.extraArgs", spec.engine.extra_args
    yield "spec.prefill.extraArgs", spec.prefill.extra_args
    yield "spec.decode.extraArgs", spec.decode.extra_args


def _env_lists(deployment: PDDeployment) -> Iterator[tuple[str, tuple[EnvVar, ...]]]:
    spec = deployment.spec
    yield "spec.engine.env", spec.engine.env
    yield "spec.prefill.env", spec.prefill.env
    yield "spec.decode.env", spec.decode.env


def _named(written: str, known: str) -> str:
    return known if written == known else f"{known} (written {written})"


RULES = (extra_arguments, environment, vllm_version, tensor_parallelism, weights, custom_profile)
