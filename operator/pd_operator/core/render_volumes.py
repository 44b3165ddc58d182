"""Volumes of an engine's pod: the connector, shared memory, caches and the weights, with where they are mounted."""

from __future__ import annotations

import posixpath
from typing import Any, Final

from pd_operator.core.choices import Download, Role
from pd_operator.core.model import PDDeployment
from pd_operator.core.render_resources import shared_memory_gib
from pd_operator.core.spec_engine import ModelSource
from pd_operator.core.spec_volumes import EmptyDirSource, EngineVolume, HostPathSource

CONNECTOR_PATH: Final = "/opt/pd-connector"
SHARED_MEMORY_PATH: Final = "/dev/shm"
CACHE_PATH: Final = "/var/cache/pd-engine"
OWN_PATHS: Final = (CONNECTOR_PATH, SHARED_MEMORY_PATH, CACHE_PATH)
KERNEL_PATHS: Final = ("/proc", "/sys")
"""A runtime mounts nothing there, or below."""
RUNTIME_FILES: Final = ("/dev/termination-log", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf")
"""Files that a kubelet mounts into every container."""
IMAGE_PATHS: Final = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/opt", "/run", "/sbin", "/usr", "/var"),
    *("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/local", "/usr/local/bin", "/usr/local/lib"),
    *("/usr/sbin", "/usr/share", "/var/lib", "/var/run"),
)
"""With something else mounted there no program starts. A folder below may be meant, such as /etc/ssl/certs."""

CONNECTOR_VOLUME: Final = "connector"
SHARED_MEMORY_VOLUME: Final = "shm"
CACHE_VOLUME: Final = "cache"
MODEL_VOLUME: Final = "model"
OWN_VOLUMES: Final = (CONNECTOR_VOLUME, SHARED_MEMORY_VOLUME, CACHE_VOLUME, MODEL_VOLUME)

CACHE_ENV: Final = {
    # Compiled kernels outlive a crash of the container, so the next start is shorter.
    "VLLM_CACHE_ROOT": f"{CACHE_PATH}/vllm",
    "XDG_CACHE_HOME": CACHE_PATH,
    "TRITON_CACHE_DIR": f"{CACHE_PATH}/triton",
    "FLASHINFER_WORKSPACE_BASE": CACHE_PATH,
}


def engine_volumes(deployment: PDDeployment, role: Role, with_connector: bool) -> list[dict[str, Any]]:
    """All volumes of one role's pod."""
    size = f"{shared_memory_gib(deployment, role)}Gi"
    volumes: list[dict[str, Any]] = [
        {"name": SHARED_MEMORY_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": size}},
        {"name": CACHE_VOLUME, "emptyDir": {}},
    ]
    if with_connector:
        volumes.append({"name": CONNECTOR_VOLUME, "emptyDir": {}})
    model = _model_volume(deployment.spec.model.source)
    if model:
        volumes.append({"name": MODEL_VOLUME, **model})
    return [*volumes, *({"name": one.name, **_source(one)} for one in deployment.spec.engine.volumes)]


def engine_mounts(deployment: PDDeployment, with_connector: bool) -> list[dict[str, Any]]:
    """Where the engine's container sees them."""
    source = deployment.spec.model.source
    mounts: list[dict[str, Any]] = [
        {"name": SHARED_MEMORY_VOLUME, "mountPath": SHARED_MEMORY_PATH},
        {"name": CACHE_VOLUME, "mountPath": CACHE_PATH},
    ]
    if with_connector:
        mounts.append(connector_mount(read_only=True))
    if _model_volume(source):
        mount = {"name": MODEL_VOLUME, "mountPath": source.mount_path}
        mounts.append({**mount, "readOnly": True} if _is_read_only(deployment) else mount)
    return [*mounts, *map(_mount, deployment.spec.engine.volumes)]


def connector_mount(*, read_only: bool) -> dict[str, Any]:
    """Where the connector's plugin is written and read."""
    mount: dict[str, Any] = {"name": CONNECTOR_VOLUME, "mountPath": CONNECTOR_PATH}
    return {**mount, "readOnly": True} if read_only else mount


def volume_env(deployment: PDDeployment) -> dict[str, str]:
    """Variables that depend on where volumes are mounted."""
    model = deployment.spec.model
    if _model_volume(model.source) and not model.is_local:
        # Code that comes with a model is written even when the hub's cache is read-only.
        return {**CACHE_ENV, "HF_HOME": model.source.mount_path, "HF_MODULES_CACHE": f"{CACHE_PATH}/modules"}
    return dict(CACHE_ENV)


def model_in_pod(deployment: PDDeployment) -> PDDeployment:
    """The deployment as a pod sees it: a relative model folder is the one of that name below `source.mountPath`."""
    model = deployment.spec.model
    if not model.is_local or model.name.startswith("/"):
        return deployment
    folder = posixpath.basename(model.name.rstrip("/"))
    return deployment.with_model_name(posixpath.join(model.source.mount_path, folder))


def has_model_volume(source: ModelSource) -> bool:
    """Is something mounted at `spec.model.source.mountPath`?"""
    return bool(_model_volume(source))


def _model_volume(source: ModelSource) -> dict[str, Any]:
    if source.persistent_volume_claim is not None:
        claim = source.persistent_volume_claim
        fields: dict[str, Any] = {"claimName": claim.claim_name}
        return {"persistentVolumeClaim": {**fields, "readOnly": True} if claim.read_only else fields}
    return _on_the_node(source.empty_dir, source.host_path)


def _source(volume: EngineVolume) -> dict[str, Any]:
    if volume.config_map is not None:
        return {"configMap": {"name": volume.config_map.name}}
    if volume.secret is not None:
        return {"secret": {"secretName": volume.secret.name}}
    if volume.persistent_volume_claim is not None:
        return {"persistentVolumeClaim": {"claimName": volume.persistent_volume_claim.name}}
    return _on_the_node(volume.empty_dir, volume.host_path)


def _mount(volume: EngineVolume) -> dict[str, Any]:
    mount = {"name": volume.name, "mountPath": volume.mount_path}
    return {**mount, "readOnly": True} if volume.read_only else mount


def _on_the_node(empty_dir: EmptyDirSource | None, host_path: HostPathSource | None) -> dict[str, Any]:
    if empty_dir is not None:
        size = empty_dir.size_limit_gib
        return {"emptyDir": {} if size is None else {"sizeLimit": f"{size}Gi"}}
    return {} if host_path is None else {"hostPath": {"path": host_path.path, "type": "Directory"}}


def _is_read_only(deployment: PDDeployment) -> bool:
    model = deployment.spec.model
    claim = model.source.persistent_volume_claim
    if claim is not None:
        return claim.read_only
    # A folder of the node is shared with everything else there: written only when weights may be fetched into it.
    return model.source.host_path is not None and (model.is_local or model.source.download is Download.FORBIDDEN)
