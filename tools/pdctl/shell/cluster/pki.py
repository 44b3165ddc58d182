"""Certificates and kubeconfigs of a cluster, by the openssl program: one authority, one identity per component."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from pdctl.core.cluster import config, daemons
from pdctl.core.cluster.layout import Layout, node_ip, node_name
from pdctl.shell.cluster.places import ClusterError

DAYS: Final = "365"
ADMIN: Final = "/O=system:masters/CN=admin"
CLIENTS: Final = {
    "controller-manager": "/CN=system:kube-controller-manager",
    "scheduler": "/CN=system:kube-scheduler",
    "kube-proxy": "/CN=system:kube-proxy",
}
"""Names that Kubernetes' own roles are bound to."""


def make_certificates(layout: Layout, nodes: int, server: str) -> None:
    """Everything below the cluster's pki folder, and the administrator's kubeconfig. ``server`` is the API's URL."""
    folder = layout.pki
    folder.mkdir(mode=0o700, exist_ok=True)
    _openssl(folder, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "sa.key")
    _openssl(
        folder,
        *("req", "-x509", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=pd-cluster", "-days", DAYS),
    )
    _certify(folder, "apiserver", "/CN=kube-apiserver", daemons.alternative_names())
    _certify(folder, "admin", ADMIN)
    for name, subject in CLIENTS.items():
        _certify(folder, name, subject)
    for node in range(nodes):
        name = node_name(node)
        _certify(folder, name, f"/O=system:nodes/CN=system:node:{name}", f"IP:{node_ip(node)},DNS:{name}")
    for name in (*CLIENTS, *(node_name(node) for node in range(nodes))):
        # Node 0's address, since a further node has another loopback.
        _write_kubeconfig(folder, name, folder / f"{name}.kubeconfig", server.replace("127.0.0.1", node_ip(0)))
    _write_kubeconfig(folder, "admin", layout.kubeconfig, server)


def _certify(folder: Path, name: str, subject: str, alternative_names: str = "") -> None:
    _openssl(
        folder,
        *("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", subject),
    )
    extensions = folder / f"{name}.ext"
    lines = ["extendedKeyUsage=serverAuth,clientAuth"]
    if alternative_names:
        lines.append(f"subjectAltName={alternative_names}")
    extensions.write_text("\n".join(lines) + "\n", encoding="ascii")
    _openssl(
        folder,
        *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"),
        *("-days", DAYS, "-out", f"{name}.crt", "-extfile", extensions.name),
    )


def _write_kubeconfig(folder: Path, name: str, target: Path, server: str) -> None:
    authority, certificate, key = ((folder / file).read_bytes() for file in ("ca.crt", f"{name}.crt", f"{name}.key"))
    target.touch(mode=0o600)
    target.write_text(config.kubeconfig(server, authority, certificate, key), encoding="ascii")


def _openssl(folder: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"openssl {arguments[0]}: {done.stderr.strip()}")
