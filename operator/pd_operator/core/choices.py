"""Every enumeration of the PDDeployment API, with what each word does.

Words are CamelCase as Kubernetes asks; `Dtype` keeps vLLM's own spelling because users copy it from model cards.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from pd_wire import names


class Role(StrEnum):
    """The two kinds of engine in a deployment."""

    PREFILL = names.ROLE_PREFILL
    DECODE = names.ROLE_DECODE


class Switch(StrEnum):
    """On or off, as words, so that a third option can come without breaking the API."""

    ENABLED = "Enabled"
    DISABLED = "Disabled"


class Dtype(StrEnum):
    """Weight and activation type, in vLLM's words."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Download(StrEnum):
    """May an engine fetch weights from the Hugging Face hub when they are not on disk?"""

    ALLOWED = "Allowed"
    FORBIDDEN = "Forbidden"


class NodeProfile(StrEnum):
    """What kind of machine the engines run on."""

    P5EN_EFA = "P5enEFA"
    CPU = "CPU"
    CUSTOM = "Custom"


class Device(StrEnum):
    """Where the KV cache lives."""

    CUDA = "CUDA"
    CPU = "CPU"


class Scaling(StrEnum):
    """Who sets the number of engines of a role."""

    FIXED = "Fixed"
    EXTERNAL = "External"


class ImagePullPolicy(StrEnum):
    """When an image is pulled."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class SecurityProfile(StrEnum):
    """What the engines' containers may do."""

    DEFAULT = "Default"
    PRIVILEGED = "Privileged"
    RESTRICTED = "Restricted"


class TolerationOperator(StrEnum):
    """How a toleration compares."""

    EQUAL = "Equal"
    EXISTS = "Exists"


class TaintEffect(StrEnum):
    """What a taint does."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class NodeOperator(StrEnum):
    """How a node's label is compared."""

    IN = "In"
    NOT_IN = "NotIn"
    EXISTS = "Exists"
    DOES_NOT_EXIST = "DoesNotExist"
    GT = "Gt"
    LT = "Lt"


class UpdateStrategyType(StrEnum):
    """How a StatefulSet replaces pods."""

    ROLLING_UPDATE = "RollingUpdate"
    ON_DELETE = "OnDelete"


class Zone(StrEnum):
    """Do all engines run in one availability zone?"""

    SAME = "Same"
    ANY = "Any"


class Hosts(StrEnum):
    """May prefill and decode share a host?"""

    SEPARATE = "Separate"
    ANY = "Any"


class SessionAffinity(StrEnum):
    """Does a Service keep a client on one pod?"""

    NONE = "None"
    CLIENT_IP = "ClientIP"


class StoreType(StrEnum):
    """Where routers keep handles."""

    MEMORY = "Memory"
    VALKEY = "Valkey"


class TenantFrom(StrEnum):
    """What names the tenant of a request."""

    AUTHORIZATION = "Authorization"
    HEADER = "Header"


class LogLevel(StrEnum):
    """Least level of the router's log that is shown."""

    DEBUG = "Debug"
    INFO = "Info"
    WARNING = "Warning"


class LogFormat(StrEnum):
    """Shape of the router's log."""

    JSON = "JSON"
    TEXT = "Text"


class Anonymous(StrEnum):
    """What a request without a principal gets."""

    ALLOWED = "Allowed"
    NO_REUSE = "NoReuse"


class Untrusted(StrEnum):
    """What a tenant gets that somebody else than the gateway named."""

    REFUSE = "Refuse"
    IGNORE = "Ignore"


class ServiceType(StrEnum):
    """How the router's Service is exposed."""

    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class Backend(StrEnum):
    """NIXL transfer backend, in NIXL's words."""

    LIBFABRIC = "LIBFABRIC"
    UCX = "UCX"


class Connector(StrEnum):
    """Which KV connector the engines load."""

    VERIFIED = "Verified"
    STOCK = "Stock"


class Retention(StrEnum):
    """What becomes of a finished turn's blocks on decode."""

    UNPINNED = names.MODE_UNPINNED
    LEASED = names.MODE_LEASED
    PINNED = names.MODE_PINNED


class LoadFailurePolicy(StrEnum):
    """What an engine does with a request whose KV could not be read."""

    FAIL = "Fail"
    RECOMPUTE = "Recompute"


NOTES: Final[dict[type[StrEnum], str]] = {
    Connector: "Stock is vLLM's NixlConnector; push connectors are not supported, since reuse needs P to read",
    LoadFailurePolicy: "a read that failed is an error, or is computed again",
}
"""What to add when somebody writes a word that an enumeration does not have."""
