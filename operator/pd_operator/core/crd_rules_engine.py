"""CEL rules about what an engine runs: arguments, variables, versions, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from pd_operator.core import versions
from pd_operator.core.cel import Rule, compared, rule, text, words
from pd_operator.core.pod_profiles import GPU
from pd_operator.core.render_volumes import IMAGE_PATHS, KERNEL_PATHS, OWN_PATHS, OWN_VOLUMES, RUNTIME_FILES
from pd_operator.core.reserved import (
    CONNECTORS_OWN,
    NO_CONNECTOR_MODULES,
    PLAIN_ENV,
    RENDERED_ENV,
    RENDERED_ENV_PREFIXES,
    RENDERED_FLAGS,
    SHARED_ENV,
    SHARED_FLAGS,
    TOKEN_ENV,
    rendered_flag,
    shared_flag,
    spellings,
)
from pd_operator.core.rules_pod import TOO_FEW_DEVICES
from pd_operator.core.rules_volumes import HIDES_THE_IMAGE, RUNTIME_PUTS, VOLUME_SOURCES

TOKEN: Final = r"(^|[^A-Za-z0-9_])hf_[A-Za-z0-9]{20,}"
NO_TOKEN: Final = "never write a token into the object; use spec.model.source.tokenSecretRef"
VOLUMES: Final = ("persistentVolumeClaim", "emptyDir", "hostPath")
LOCAL: Final = 'self.name.startsWith("/") || self.name.startsWith("./") || self.name.startsWith("../")'


def model_rules() -> list[Rule]:
    """On `spec.model`."""
    return [
        rule(
            f'{LOCAL} || !self.name.matches("/.*/")',
            "is neither a repository (owner/name) nor a path; begin a path with / or ./",
            "name",
        ),
        rule(f"!has(self.revision) || !({LOCAL})", "has no meaning for a folder; leave it out", "revision"),
    ]


def source_rules() -> list[Rule]:
    """On `spec.model.source`."""
    given = ", ".join(f"has(self.{volume})" for volume in VOLUMES)
    return [
        rule(f"[{given}].filter(one, one).size() <= 1", f"at most one of {', '.join(VOLUMES)} may be set"),
        rule(
            '!has(self.emptyDir) || self.download == "Allowed"',
            "must be Allowed with emptyDir: an empty folder never gets the weights",
            "download",
        ),
        *_own_folder_rules(),
    ]


def volume_rules() -> list[Rule]:
    """On each of `spec.engine.volumes`."""
    given = ", ".join(f"has(self.{source})" for source in VOLUME_SOURCES)
    return [
        rule(f"[{given}].filter(one, one).size() == 1", f"exactly one of {', '.join(VOLUME_SOURCES)} must be set"),
        rule(f"!(self.name in {words(OWN_VOLUMES)})", f"{', '.join(OWN_VOLUMES)} are the operator's own", "name"),
        *_own_folder_rules(),
    ]


def _own_folder_rules() -> list[Rule]:
    images = {spelt for path in IMAGE_PATHS for spelt in (path, f"{path}/")} - _above(OWN_PATHS)
    return [
        rule(
            f"!({_within(OWN_PATHS)}) && !(self.mountPath in {words(_above(OWN_PATHS))})",
            f"must be a folder of its own, such as /models; {', '.join(OWN_PATHS)} lie there",
            "mountPath",
        ),
        rule(f"!({_within(RUNTIME_FILES)})", RUNTIME_PUTS, "mountPath"),
        rule(f"!({_within(KERNEL_PATHS)}) && !(self.mountPath in {words(images)})", HIDES_THE_IMAGE, "mountPath"),
    ]


def folder(path: str) -> str:
    """A path without the slash at its end."""
    return f'({path}.endsWith("/") ? {path}.substring(0, {path}.size() - 1) : {path})'


def _within(paths: Iterable[str]) -> str:
    return " || ".join(f'self.mountPath == "{path}" || self.mountPath.startsWith("{path}/")' for path in paths)


def engine_rules() -> list[Rule]:
    """On `spec.engine`."""
    unsupported = f"this vLLM version is not supported; use {versions.SUPPORTED_TEXT}"
    return [
        rule(f"!has(self.vllmVersion) || self.vllmVersion.matches({text(f'^{_supported()}')})", unsupported,
             "vllmVersion"),
        rule(_image_version(), unsupported, "image"),
        rule('!has(self.runAsUser) || self.securityProfile == "Restricted"',
             "may be set with securityProfile Restricted only", "runAsUser"),
        rule(f"!has(self.volumes) || self.volumes.all(one, self.volumes.exists_one(other, {folder('other.mountPath')} "
             f"== {folder('one.mountPath')}))", "each must be mounted in a folder of its own", "volumes"),
        first_argument_rule(),
    ]  # fmt: skip


def role_rules() -> list[Rule]:
    """On `spec.prefill` and `spec.decode`."""
    return [
        rule(
            f"!has(self.env) || !self.env.exists(one, one.name in {words(SHARED_ENV)})",
            f"{', '.join(sorted(SHARED_ENV))} may not be set for one role: both roles need the same; use "
            "spec.engine.env",
            "env",
        ),
        *map(_devices_rule, ("requests", "limits")),
        replicas_rule("the role's StatefulSet"),
        first_argument_rule(),
    ]


def _devices_rule(side: str) -> Rule:
    number = f'quantity(string(self.resources.{side}["{GPU}"]))'
    given = f'has(self.resources.{side}) && "{GPU}" in self.resources.{side}'
    # A number is never made a text, whose length an API server cannot foresee.
    enough = f"{compared(number)} == 0 || {compared(f'{number}.sub(self.tensorParallelSize)')} >= 0"
    return rule(f"!({given}) || {enough}", TOO_FEW_DEVICES, f"resources.{side}")


def replicas_rule(target: str) -> Rule:
    """On a part that an autoscaler may have."""
    return rule(
        'self.scaling != "External" || oldSelf.scaling != "External" || self.replicas == oldSelf.replicas',
        f"is not applied while scaling is External; scale {target}, or set scaling to Fixed",
        "replicas",
    )


def env_rules() -> list[Rule]:
    """On each variable."""
    secret = "!has(self.value)"
    return [
        rule("has(self.value) != has(self.secretKeyRef)", "needs exactly one of value and secretKeyRef"),
        *(
            rule(f"self.name != {text(name)}", f"{name} may not be set here: {reason}")
            for name, reason in RENDERED_ENV.items()
        ),
        *(
            rule(f"!self.name.startsWith({text(prefix)})", f"{prefix}* may not be set here: {reason}")
            for prefix, reason in RENDERED_ENV_PREFIXES.items()
        ),
        *(
            rule(f"self.name != {text(name)} || has(self.value)", f"{name} may not be set here: {reason}")
            for name, reason in PLAIN_ENV.items()
        ),
        rule(f"{secret} || !(self.name in {words(TOKEN_ENV)})", f"a token may not be a plain value: {NO_TOKEN}"),
        rule(f"{secret} || !self.value.matches({text(TOKEN)})", f"this value holds a token: {NO_TOKEN}"),
        rule(
            'self.name != "NCCL_SOCKET_IFNAME" || (has(self.value) && self.value.startsWith("^"))',
            "NCCL_SOCKET_IFNAME must exclude interfaces, for example ^lo,docker,veth: naming one hides EFA",
        ),
    ]


def first_argument_rule() -> Rule:
    """On what has extraArgs. Which later words are values of flags, only the operator knows."""
    return rule(
        '!has(self.extraArgs) || self.extraArgs.size() == 0 || self.extraArgs[0].startsWith("-")',
        "must begin with a flag; the model and the rest have fields",
        "extraArgs",
    )


def argument_rules() -> list[Rule]:
    """On each entry of extraArgs."""
    return [
        rule(
            f"!({_is_flag_of(RENDERED_FLAGS, rendered_flag)})",
            "this flag may not be set here: it is rendered from a field of spec.model, spec.engine, spec.kvTransfer or "
            "the role, or it may never be used",
        ),
        rule(f"!self.matches({text(TOKEN)})", f"this argument holds a token: {NO_TOKEN}"),
        rule(f"!self.matches({text(CONNECTORS_OWN)})", NO_CONNECTOR_MODULES),
        rule('self != "--"', "is no flag; the model and the rest have fields"),
        rule('!self.matches("^--[^= ]* ")', "flag and value in one entry; write two list entries, or join them with ="),
    ]


def shared_argument_rules() -> list[Rule]:
    """On each entry of a role's extraArgs."""
    # A negation is seen as the flag itself, since every spelling of it would double the list.
    shared = _is_flag_of(SHARED_FLAGS, shared_flag, '.replace("--no-", "--")')
    return [
        *argument_rules(),
        rule(
            f"!({shared})",
            "this flag may not be set for one role: both roles need the same; use spec.engine.extraArgs",
        ),
    ]


def _is_flag_of(flags: Iterable[str], resolve: Callable[[str], str | None], shortened: str = "") -> str:
    """Is `self` one of the flags in any spelling: its beginning, underscores, `=value`, `.key`?

    A list of all beginnings, since a regular expression over all flags, or asking each flag how it begins, would cost
    many times as much, beyond what an API server allows.
    """
    return f'self.split("=", 2)[0].split(".", 2)[0].replace("_", "-"){shortened} in {words(spellings(flags, resolve))}'


def _supported() -> str:
    (major, oldest), (_, newest) = versions.OLDEST, versions.NEWEST
    minors = "|".join(str(minor) for minor in range(oldest, newest + 1))
    return f"v?{major}[.]({minors})($|[^0-9])"


def _image_version() -> str:
    """As `versions.version_in_image`: a tag that names vLLM's version, else the tag of an image that is called so."""
    named, called, some = ":[^/@]*vllm[-_.]?", "vllm[^/:@]*:", "v?[0-9]+[.][0-9]+($|[^0-9])"

    def found(pattern: str) -> str:
        return f"self.image.matches({text(pattern)})"

    by_name = f"(!{found(called + some)} || {found(called + _supported())})"
    return f"!has(self.image) || ({found(named + some)} ? {found(named + _supported())} : {by_name})"


def _above(paths: Iterable[str]) -> set[str]:
    """Every folder that one of the paths lies in, in both spellings."""
    folders = {"/"}
    for path in paths:
        parts = path.split("/")
        for count in range(2, len(parts)):
            folder = "/".join(parts[:count])
            folders |= {folder, f"{folder}/"}
    return folders
