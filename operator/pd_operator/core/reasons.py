"""Every condition type and reason that the operator writes. Programs match on these words: adding is free, renaming
breaks somebody's alert.
"""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """What is judged, in the order in which `status.conditions` lists it."""

    READY = "Ready"
    PREFILL_READY = "PrefillReady"
    DECODE_READY = "DecodeReady"
    ROUTER_READY = "RouterReady"
    PROGRESSING = "Progressing"
    BIDIRECTIONAL_ACTIVE = "BidirectionalActive"
    TRANSFERS_FLOWING = "TransfersFlowing"


class Reason(StrEnum):
    """Why."""

    # The spec
    INVALID_SPEC = "InvalidSpec"
    """The spec breaks a rule; the message lists every problem. What serves is left as it is."""

    # A child can't be brought to what is wanted
    FOREIGN_OBJECT = "ForeignObject"
    """An object with a child's name exists and belongs to somebody else. It is never adopted or overwritten."""
    WAITING_FOR_CLEANUP = "WaitingForCleanup"
    """An object of an earlier PDDeployment of that name is still being garbage-collected."""
    IMMUTABLE_FIELD = "ImmutableField"
    """The wanted change touches a field that can't change in place, and re-creation would orphan running pods."""
    APPLY_REFUSED = "ApplyRefused"
    """The API server refused a child; the message is its own. What runs is left as it is, see `plan_rehearsal`."""
    WAITING_FOR_API = "WaitingForAPI"
    """A part of the API server does not know PDDeployments yet, seconds after their definition was installed."""

    # Pods
    PODS_REFUSED = "PodsRefused"
    """Pods are not even made: Pod Security, a quota or an admission webhook. The message is the server's."""
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CRASH_LOOPING = "CrashLooping"
    """The message ends with the container's last termination message."""
    CONTAINER_NOT_CREATED = "ContainerNotCreated"
    """A Secret, ConfigMap or volume that the container needs is missing or unusable."""
    POD_FAILED = "PodFailed"
    """The node refused or evicted the pod."""
    TERMINATION_STUCK = "TerminationStuck"
    """An engine's grace period is over and the pod is still there, so its successor can't be made: a finalizer, or a
    node that is gone."""

    # Progress
    ALL_READY = "AllReady"
    SERVING = "Serving"
    """Requests are served, by fewer pods than wanted or partly by older ones. `Progressing` says where it stands."""
    SCALED_TO_ZERO = "ScaledToZero"
    """No replica is wanted: requests get a 503."""
    CREATING = "Creating"
    SERVICE_GAP = "ServiceGap"
    """A new generation comes in and no engine could be kept back for it, since a role has only one that is ready.
    Requests get a 503 until the new pair has started."""
    ROLLING_OUT = "RollingOut"
    SCALING = "Scaling"
    STARTING = "Starting"
    """Pods run the newest template and are loading or warming up."""
    NOT_READY = "NotReady"
    """Pods have started and are not ready, or no longer. A router is ready while it sees a ready pair of engines."""
    ROLLOUT_STUCK = "RolloutStuck"
    """A rollout waits for a pod that does not become ready, or somebody has paused it. The message has the way out."""
    COMPLETE = "Complete"

    # The routers' sight
    ROUTER_BLIND = "RouterBlind"
    """A router can't list pods: it goes on with the engines that it knows, and new and replaced ones aren't used."""

    # Reuse
    DISABLED = "Disabled"
    ROUTER_NOT_READY = "RouterNotReady"
    ROUTER_UNREACHABLE = "RouterUnreachable"
    ROUTER_NOT_ASKED = "RouterNotAsked"
    REUSE_OFF = "ReuseOff"
    """The spec says on, a router that still runs says off."""
    NO_PAIR = "NoPair"
    """No prefill and decode engine of one generation are ready together."""
    REUSE_ON = "ReuseOn"
    NO_TURNS_YET = "NoTurnsYet"
    NOTHING_PULLED = "NothingPulled"
    """Handles are attached and prefill pulls nothing: the transfer path is broken while answers look well."""
    BLOCKS_REUSED = "BlocksReused"
    """Handles are attached and decode has given their blocks to others by then: too little memory for the load."""
    TOKENS_PULLED = "TokensPulled"

    # Told as an Event only
    OTHER_OPERATOR = "OtherOperator"
    """Another operator manages the object, so this one does not; see `rivals`."""
