"""Rules about volumes of engines: one source each, and a place where nothing is hidden that a pod needs.

An API server would refuse some of these, but only in the pod template; with others the pod is made and never starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from pd_operator.core.model import PDDeployment
from pd_operator.core.problems import Problem
from pd_operator.core.render_volumes import (
    IMAGE_PATHS,
    KERNEL_PATHS,
    OWN_PATHS,
    OWN_VOLUMES,
    RUNTIME_FILES,
    has_model_volume,
)

HIDES_THE_IMAGE = (
    "must be a folder of its own, such as /models: anything mounted there hides what the image needs to start "
    f"({', '.join(KERNEL_PATHS)} with all below, {', '.join(IMAGE_PATHS)})"
)
RUNTIME_PUTS = f"the kubelet puts files of its own there ({', '.join(RUNTIME_FILES)}); choose another folder"
VOLUME_SOURCES = ("configMap", "secret", "persistentVolumeClaim", "emptyDir", "hostPath")


def mount_path(deployment: PDDeployment) -> Iterator[Problem]:
    """The weights do not hide what the engine needs."""
    hidden = _hidden(deployment.spec.model.source.mount_path)
    if hidden:
        yield Problem("spec.model.source.mountPath", hidden)


def volumes(deployment: PDDeployment) -> Iterator[Problem]:
    """A volume has one source, and a name and a place of its own."""
    source = deployment.spec.model.source
    places = {source.mount_path.rstrip("/"): "spec.model.source"} if has_model_volume(source) else {}
    seen: set[str] = set()
    for index, volume in enumerate(deployment.spec.engine.volumes):
        path = f"spec.engine.volumes[{index}]"
        sources = (volume.config_map, volume.secret, volume.persistent_volume_claim, volume.empty_dir, volume.host_path)
        if sum(source is not None for source in sources) != 1:
            yield Problem(path, f"exactly one of {', '.join(VOLUME_SOURCES)} must be set")
        if volume.name in OWN_VOLUMES:
            yield Problem(f"{path}.name", f"{', '.join(OWN_VOLUMES)} are the operator's own; choose another name")
        if volume.name in seen:
            yield Problem(f"{path}.name", f"{volume.name} stands twice in this list; keep one")
        seen.add(volume.name)
        place = volume.mount_path.rstrip("/")
        hidden = _hidden(volume.mount_path)
        if hidden:
            yield Problem(f"{path}.mountPath", hidden)
        elif place in places:
            yield Problem(f"{path}.mountPath", f"{places[place]} is mounted there; choose another folder")
        places.setdefault(place, path)


def _hidden(mounted: str) -> str | None:
    path = mounted.rstrip("/")
    if path.startswith(tuple(f"{own}/" for own in RUNTIME_FILES)) or path in RUNTIME_FILES:
        return f"{RUNTIME_PUTS}; got {mounted}"
    if path.startswith(tuple(f"{own}/" for own in KERNEL_PATHS)) or path in (*KERNEL_PATHS, *IMAGE_PATHS):
        return f"{HIDES_THE_IMAGE}; got {mounted}"
    hidden = [own for own in OWN_PATHS if f"{own}/".startswith(f"{path}/") or path.startswith(f"{own}/")]
    if not hidden:
        return None
    return f"must be a folder of its own, such as /models: {hidden[0]} lies there; got {path or '/'}"


RULES = (mount_path, volumes)
