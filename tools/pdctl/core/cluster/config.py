"""The daemons' configuration files. JSON wherever the reader takes YAML: it is YAML, and needs no quoting rules."""

from __future__ import annotations

import base64
import json
from typing import Any, Final

from pdctl.core.cluster.daemons import Programs
from pdctl.core.cluster.layout import CLUSTER_DOMAIN, RUNTIME_SOCKET, Layout, node_ip, node_name, pod_cidr

PAUSE_IMAGE: Final = "localhost/pause:1"


def audit_policy() -> str:
    """One metadata line per request, when it has been answered; health checks and node leases would only be noise."""
    return _json(
        {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [
                {"level": "None", "nonResourceURLs": ["/livez*", "/readyz*", "/healthz*"]},
                {
                    "level": "None",
                    "userGroups": ["system:nodes"],
                    "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}],
                },
                {"level": "Metadata"},
            ],
        }
    )


def kubeconfig(server: str, authority: bytes, certificate: bytes, key: bytes) -> str:
    """A kubeconfig that holds its certificates (PEM), so that the file can be copied anywhere."""
    user = {"client-certificate-data": _base64(certificate), "client-key-data": _base64(key)}
    return _json(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {"name": "pd", "cluster": {"server": server, "certificate-authority-data": _base64(authority)}}
            ],
            "users": [{"name": "pd", "user": user}],
            "contexts": [{"name": "pd", "context": {"cluster": "pd", "user": "pd"}}],
            "current-context": "pd",
        }
    )


def node_resolv_conf() -> str:
    """What the node's own programs see as /etc/resolv.conf: the cluster's names, and no machine's resolver."""
    search = f"svc.{CLUSTER_DOMAIN} {CLUSTER_DOMAIN}"
    return f"nameserver {node_ip(0)}\nsearch default.{search}\noptions ndots:5\n"


def cni_network(node: int) -> str:
    """Pods on a bridge of their node, with a default route that ends there: the network has no way out."""
    ipam = {"type": "host-local", "ranges": [[{"subnet": pod_cidr(node)}]], "routes": [{"dst": "0.0.0.0/0"}]}
    bridge = {
        "type": "bridge",
        "bridge": "pods",
        "isGateway": True,
        "hairpinMode": True,
        "ipMasq": False,
        "ipam": ipam,
    }
    return _json({"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]})


def containerd_toml(layout: Layout, programs: Programs, node: int, major_version: int) -> str:
    """Configuration of containerd 1.x or 2.x.

    `restrict_oom_score_adj`: root may lack CAP_SYS_RESOURCE, and then nothing may lower an oom_score_adj.
    """
    cni = layout.node_folder(node) / "cni"
    if major_version == 1:
        head = ["version = 2"]
        runtime = "plugins.'io.containerd.grpc.v1.cri'"
        images = [f"[{runtime}]", f'sandbox_image = "{PAUSE_IMAGE}"']
        bin_dir = f'bin_dir = "{programs.cni}"'
    else:
        head = ["version = 3"]
        runtime = "plugins.'io.containerd.cri.v1.runtime'"
        images = [
            "[plugins.'io.containerd.cri.v1.images'.pinned_images]",
            f'sandbox = "{PAUSE_IMAGE}"',
            f"[{runtime}]",
        ]
        bin_dir = f'bin_dirs = ["{programs.cni}"]'
    lines = [
        *head,
        *images,
        "restrict_oom_score_adj = true",
        "tolerate_missing_hugetlb_controller = true",
        f"[{runtime}.containerd.runtimes.runc]",
        'runtime_type = "io.containerd.runc.v2"',
        f"[{runtime}.containerd.runtimes.runc.options]",
        f'BinaryName = "{programs.path("hostmounts")}"',
        "SystemdCgroup = false",
        f"[{runtime}.cni]",
        bin_dir,
        f'conf_dir = "{cni}"',
    ]
    return "\n".join(lines) + "\n"


def kubelet(layout: Layout, node: int) -> str:
    """The kubelet's configuration. It owns one cgroup of the machine and sets none of the machine's sysctls."""
    pki = layout.pki
    return _json(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{RUNTIME_SOCKET}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{layout.cgroup}/{node_name(node)}",
            "cgroupsPerQOS": True,
            "enforceNodeAllocatable": ["pods"],
            "protectKernelDefaults": True,
            "clusterDomain": CLUSTER_DOMAIN,
            "clusterDNS": [node_ip(0)],
            "resolvConf": str(layout.state / "resolv.conf"),
            "volumePluginDir": "/var/lib/kubelet/volumeplugins",
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": str(pki / "ca.crt")},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": str(pki / f"{node_name(node)}.crt"),
            "tlsPrivateKeyFile": str(pki / f"{node_name(node)}.key"),
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "nodefs.inodesFree": "1%",
                "imagefs.available": "1%",
            },
            "maxPods": 100,
            # Pods of tests come in crowds; the defaults (50 and 100 per second) are kept, the creation isn't throttled.
            "serializeImagePulls": False,
        }
    )


def kube_proxy(layout: Layout, node: int) -> str:
    """Services by nftables. Connection-tracking limits are the machine's, not the namespace's: left alone."""
    return _json(
        {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "nftables",
            "nftables": {"minSyncPeriod": "100ms"},
            "clusterCIDR": "10.244.0.0/16",
            "hostnameOverride": node_name(node),
            "clientConnection": {"kubeconfig": str(layout.pki / "kube-proxy.kubeconfig")},
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        }
    )


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")
