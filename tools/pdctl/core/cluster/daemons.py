"""The command line of every daemon. Paths, ports and flags only; when each may start is said beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pdctl.core.cluster.layout import (
    API_SERVICE_IP,
    CLUSTER_DOMAIN,
    DEVICE_SOCKET,
    RUNTIME_SOCKET,
    SERVICE_CIDR,
    Layout,
    node_ip,
    node_name,
)

ETCD_PORT: Final = 2379
ETCD_PEER_PORT: Final = 2380
SERVICE_ACCOUNT_ISSUER: Final = "https://kubernetes.default.svc"
ADMISSION: Final = "NodeRestriction,OwnerReferencesPermissionEnforcement"
"""Besides the default plugins. OpenShift has the second one, and a right that only it asks for is easily forgotten."""


@dataclass(frozen=True, slots=True)
class Daemon:
    """One program that the node's pid 1 starts, and starts again when it ends.

    It waits for ``after_socket`` (a path) and ``after_port`` (on loopback) first. ``env`` is added to the environment.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    after_socket: str | None = None
    after_port: int | None = None
    inherits: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """As the plan file has it."""
        return {
            "name": self.name,
            "argv": list(self.argv),
            "env": dict(self.env),
            "after_socket": self.after_socket,
            "after_port": self.after_port,
            "inherits": list(self.inherits),
        }


@dataclass(frozen=True, slots=True)
class Programs:
    """Where the programs are: ours in one folder, the distribution's by path."""

    folder: Path
    containerd: Path = Path("/usr/bin/containerd")
    runc: Path = Path("/usr/sbin/runc")
    cni: Path = Path("/usr/lib/cni")

    def path(self, name: str) -> str:
        """One of ours."""
        return str(self.folder / name)


@dataclass(frozen=True, slots=True)
class ControlPlane:
    """Settings of the control plane. ``watch_seconds`` makes the API server end watches early (within 1 to 2 times)."""

    api_port: int
    watch_seconds: int | None = None
    audit: bool = True


def control_plane(layout: Layout, programs: Programs, settings: ControlPlane) -> tuple[Daemon, ...]:
    """etcd, API server, controller manager and scheduler."""
    port = settings.api_port
    return (
        _etcd(programs),
        _api_server(layout, programs, settings),
        _controller_manager(layout, programs, port),
        Daemon(
            "scheduler",
            (
                programs.path("kube-scheduler"),
                *_client(layout, "scheduler"),
                "--leader-elect=false",
                "--secure-port=10259",
                "--bind-address=127.0.0.1",
            ),
            after_port=port,
        ),
    )


def _client(layout: Layout, name: str) -> tuple[str, ...]:
    """A component's own identity. Its own port is on loopback and asks nobody who may read there: at the start the API
    server couldn't answer yet, and the component would give up.
    """
    # The default of 20 requests per second is what a start waits for: dozens of controllers get an account each.
    rate = ("--kube-api-qps=1000", "--kube-api-burst=2000")
    return ("--kubeconfig", str(layout.pki / f"{name}.kubeconfig"), *rate)


def _etcd(programs: Programs) -> Daemon:
    client, peer = f"http://127.0.0.1:{ETCD_PORT}", f"http://127.0.0.1:{ETCD_PEER_PORT}"
    return Daemon(
        "etcd",
        (
            programs.path("etcd"),
            *("--data-dir", "/var/lib/etcd", "--unsafe-no-fsync", "--log-level", "warn"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *(
                "--listen-peer-urls",
                peer,
                "--initial-advertise-peer-urls",
                peer,
                "--initial-cluster",
                f"default={peer}",
            ),
        ),
    )


def _api_server(layout: Layout, programs: Programs, settings: ControlPlane) -> Daemon:
    pki = layout.pki
    argv = [
        programs.path("kube-apiserver"),
        *("--etcd-servers", f"http://127.0.0.1:{ETCD_PORT}"),
        *("--bind-address", "0.0.0.0", "--secure-port", str(settings.api_port)),
        *("--advertise-address", node_ip(0)),
        *("--service-cluster-ip-range", SERVICE_CIDR, "--kubelet-preferred-address-types", "InternalIP"),
        # As clusters have it; what a namespace allows is Pod Security's business.
        "--allow-privileged",
        *("--authorization-mode", "Node,RBAC", "--enable-admission-plugins", ADMISSION),
        *("--client-ca-file", str(pki / "ca.crt")),
        *("--tls-cert-file", str(pki / "apiserver.crt"), "--tls-private-key-file", str(pki / "apiserver.key")),
        *("--kubelet-client-certificate", str(pki / "admin.crt"), "--kubelet-client-key", str(pki / "admin.key")),
        *("--kubelet-certificate-authority", str(pki / "ca.crt")),
        *("--service-account-issuer", SERVICE_ACCOUNT_ISSUER),
        *("--service-account-key-file", str(pki / "sa.key")),
        *("--service-account-signing-key-file", str(pki / "sa.key")),
    ]
    if settings.audit:
        argv += [
            *(
                "--audit-log-path",
                str(layout.audit_log),
                "--audit-policy-file",
                str(layout.audit_policy),
            ),
            # One file that is never cut off: tests read on from where they were.
            *("--audit-log-maxsize", "100000", "--audit-log-mode", "blocking"),
        ]
    if settings.watch_seconds is not None:
        argv += ["--min-request-timeout", str(settings.watch_seconds)]
    return Daemon("apiserver", tuple(argv), after_port=ETCD_PORT)


def _controller_manager(layout: Layout, programs: Programs, port: int) -> Daemon:
    pki = layout.pki
    return Daemon(
        "controller-manager",
        (
            programs.path("kube-controller-manager"),
            *_client(layout, "controller-manager"),
            *("--leader-elect=false", "--secure-port=10257", "--bind-address=127.0.0.1"),
            "--use-service-account-credentials",
            # Where nothing else runs but tests on two cores, a node that is late is not a node that is gone.
            *("--node-monitor-grace-period", "5m"),
            *("--service-account-private-key-file", str(pki / "sa.key"), "--root-ca-file", str(pki / "ca.crt")),
        ),
        after_port=port,
    )


def worker(layout: Layout, programs: Programs, node: int, devices: Mapping[str, int]) -> tuple[Daemon, ...]:
    """containerd, kubelet, device plugin and kube-proxy of one node."""
    folder = layout.node_folder(node)
    runtime_path = f"{programs.containerd.parent}:{programs.runc.parent}:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
    kubelet = Daemon(
        "kubelet",
        (
            programs.path("kubelet"),
            *(
                "--config",
                str(folder / "kubelet.json"),
                "--kubeconfig",
                str(layout.pki / f"{node_name(node)}.kubeconfig"),
            ),
            *("--hostname-override", node_name(node), "--node-ip", node_ip(node)),
        ),
        after_socket=RUNTIME_SOCKET,
    )
    daemons = [
        Daemon(
            "containerd",
            (str(programs.containerd), "-c", str(folder / "containerd.toml")),
            # The shims and so hostmounts inherit both.
            env={"PATH": runtime_path, "PD_RUNC": str(programs.runc)},
        ),
        kubelet,
        Daemon("kube-proxy", (programs.path("kube-proxy"), "--config", str(folder / "kube-proxy.json"))),
    ]
    if devices:
        wanted = (f"{resource}={count}" for resource, count in sorted(devices.items()))
        daemons.append(Daemon("devplugin", (programs.path("devplugin"), *wanted), after_socket=DEVICE_SOCKET))
    return tuple(daemons)


def name_server(layout: Layout, programs: Programs, port: int) -> Daemon:
    """Names of Services and of StatefulSets' pods. It reads what kube-proxy reads, and so uses its identity."""
    kubeconfig = str(layout.pki / "kube-proxy.kubeconfig")
    return Daemon("dns", (programs.path("dns"), kubeconfig, f"{node_ip(0)}:53", CLUSTER_DOMAIN), after_port=port)


def forwarder(programs: Programs, listener: int, api_port: int) -> Daemon:
    """Brings the API server to the machine's loopback; ``listener`` is a listening socket made there."""
    argv = (programs.path("forward"), str(listener), f"127.0.0.1:{api_port}")
    return Daemon("forward", argv, inherits=(listener,))


def alternative_names() -> str:
    """What the API server's certificate is good for, as openssl writes it."""
    addresses = ("127.0.0.1", node_ip(0), API_SERVICE_IP)
    names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
    return ",".join((*(f"IP:{address}" for address in addresses), *(f"DNS:{name}" for name in names)))
