"""Scalar types and the base class of every PDDeployment model: how a value is spelled and bounded.

Separate from the models because a CRD schema is generated from them: each type carries bounds that an API server can
check, and each pattern has the sentence that a person reads when it is missed. No floats and no unions of types, since
a structural schema has neither.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

DNS_LABEL: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
ENV_NAME: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"


def _plain_path(not_allowed: str) -> str:
    """Folders between single slashes, none of them `.` or `..`, so that one place has one spelling."""
    any_, no_dot = rf"[^/\x00-\x1f{not_allowed}]", rf"[^/.\x00-\x1f{not_allowed}]"
    folder = rf"({no_dot}{any_}*|\.{no_dot}{any_}*|\.\.{any_}+)"
    return rf"^/({folder}(/{folder})*/?)?$"


NODE_PATH: Final = _plain_path("")
MOUNT_PATH: Final = _plain_path(":")
MODEL_NAME: Final = r"^[A-Za-z0-9./_][^\x00-\x20\x7f]*$"
SERVED_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._:/-]*$"
REVISION: Final = r"^[A-Za-z0-9][A-Za-z0-9._/-]*$"
_HOST_PART: Final = r"[a-zA-Z0-9]([a-zA-Z0-9-]*[a-zA-Z0-9])?"
_IMAGE_PART: Final = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
IMAGE: Final = (
    rf"^({_HOST_PART}(\.{_HOST_PART})*(:[0-9]{{1,5}})?/)?{_IMAGE_PART}(/{_IMAGE_PART})*"
    r"(:[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64}|@sha512:[0-9a-f]{128})?$"
)
VERSION: Final = r"^v?[0-9]+\.[0-9]+(\.[0-9]+)?[A-Za-z0-9.+-]*$"
PRINTABLE: Final = r"^[^\x00-\x1f\x7f]*$"
SECRET_KEY: Final = r"^(\.?[-_a-zA-Z0-9][-._a-zA-Z0-9]*)$"
_DOMAIN: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_KEY: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
QUALIFIED_NAME: Final = rf"^({_DOMAIN}/)?{_KEY}$"
RESOURCE_NAME: Final = rf"^(cpu|memory|ephemeral-storage|hugepages-[1-9][0-9]*(Ki|Mi|Gi)|{_DOMAIN}/{_KEY})$"
LABEL_VALUE: Final = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
QUANTITY: Final = r"^[0-9]+(\.[0-9]{1,3})?(m|k|Ki|M|Mi|G|Gi|T|Ti)?$"
NAMESPACE: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
WORD: Final = r"^[a-z_][a-z0-9_]*$"
_OCTET: Final = r"(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
CIDR: Final = (
    rf"^(({_OCTET}\.){{3}}{_OCTET}/(3[0-2]|[12]?[0-9])"
    r"|[0-9a-fA-F]{0,4}(:[0-9a-fA-F]{0,4}){2,7}/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$"
)
_PORT: Final = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_LABELS: Final = r"[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*"
COLLECTOR: Final = rf"^https?://{_LABELS}(:{_PORT})?(/[A-Za-z0-9._~/-]*)?$"
CONDITION_WORD: Final = r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
"""A condition's reason, as all of Kubernetes has it."""
CONDITION_TYPE: Final = rf"^({_DOMAIN}/)?([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]$"
"""A condition's type, as all of Kubernetes has it: those of others may carry their domain."""

VALKEY: Final = rf"^(valkey|redis)s?://{_LABELS}(:{_PORT})?(/[0-9]{{1,4}})?$"
VALKEY_LENGTH: Final = 261
"""Of such a URL: the longest host has 253 characters, and the shortest scheme 8."""

PATTERN_SENTENCES: Final = {
    DNS_LABEL: "lower-case letters, digits and '-', beginning with a letter",
    DNS_SUBDOMAIN: "a lower-case Kubernetes object name",
    ENV_NAME: "letters, digits and '_', not beginning with a digit",
    NODE_PATH: "an absolute path without empty folders, . and ..",
    MOUNT_PATH: "an absolute path without ':', empty folders, . and ..",
    MODEL_NAME: "a Hugging Face repository such as Qwen/Qwen3-32B, or a path beginning with / or ./",
    SERVED_NAME: "letters, digits and . _ : / -",
    REVISION: "a branch, tag or commit",
    IMAGE: "a container image reference such as registry/vllm:v0.32.0: no scheme, a lower-case name, a whole digest",
    VERSION: "a version such as 0.32.0",
    PRINTABLE: "printable text on one line",
    SECRET_KEY: "letters, digits and . _ -, neither . nor beginning with ..",
    QUALIFIED_NAME: "a Kubernetes key such as example.com/name",
    LABEL_VALUE: "letters, digits and - _ ., beginning and ending with a letter or digit",
    RESOURCE_NAME: "cpu, memory, ephemeral-storage, hugepages-2Mi, hugepages-1Gi, or a device such as nvidia.com/gpu",
    QUANTITY: "a Kubernetes quantity such as 500m or 64Gi",
    NAMESPACE: "lower-case letters, digits and '-'",
    WORD: "lower-case letters, digits and '_'",
    CIDR: "a network such as 10.0.0.0/8 or fd00::/8",
    COLLECTOR: "a URL such as http://collector.monitoring:4318, without credentials and without a query",
    CONDITION_WORD: "a word in CamelCase",
    CONDITION_TYPE: "a word in CamelCase, with or without a domain, such as example.com/Audited",
    VALKEY: "a URL such as valkey://valkey.cache:6379 or valkeys://valkey.cache:6380, without credentials",
}
"""What each pattern means, for error messages: nobody should have to read a regular expression."""

Text = Annotated[str, Field(min_length=1, max_length=512)]
Port = Annotated[int, Field(strict=True, ge=1, le=65535)]
Replicas = Annotated[int, Field(strict=True, ge=0, le=512)]
Seconds = Annotated[int, Field(strict=True, ge=1, le=86400)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
Argument = Annotated[str, Field(min_length=1, max_length=4096, pattern=PRINTABLE)]
LabelValue = Annotated[str, Field(max_length=63, pattern=LABEL_VALUE)]
LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=QUALIFIED_NAME)]
AnnotationValue = Annotated[str, Field(max_length=4096)]


class SpecModel(BaseModel):
    """Base of all models: immutable, camelCase outside, snake_case inside, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, alias_generator=to_camel, validate_by_name=False)
