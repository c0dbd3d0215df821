"""The programs of a one-node Kubernetes, started in order until a pod can be scheduled. Called by ``inside``."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

from tests.cluster.up import configuration, images, isolation
from tests.cluster.up.errors import CannotRunError
from tests.cluster.up.programs import Programs
from tests.cluster.up.settings import Settings

_ETCD = "http://127.0.0.1:2379"


def bring_up(settings: Settings, programs: Programs) -> None:
    """Start everything and wait until the node is Ready and Services are found by name."""
    spec = json.loads(programs.run("ctr", "oci", "spec").stdout)
    configuration.write_all(settings, snapshotter=isolation.snapshotter(settings), plain_spec=spec)
    programs.start("containerd", "containerd", "--config", str(settings.etc / "containerd.toml"))
    _control_plane(settings, programs)
    _import_images(settings, programs)
    _node(settings, programs)
    programs.wait("the node is Ready", lambda: _is_node_ready(settings, programs), 120)
    programs.wait("Services answer", lambda: _answers(settings.service_ip, 443), 60)
    programs.wait("DNS answers", lambda: _is_name_known(programs, "kubernetes.default.svc.cluster.local"), 60)
    _make_runtime_class(settings, programs)
    programs.wait("pods may be made", lambda: _exists(settings, programs, "serviceaccount/default"), 60)


def _control_plane(settings: Settings, programs: Programs) -> None:
    key = settings.data / "service-accounts.key"
    done = programs.run("openssl", "genrsa", "-out", str(key), "2048")
    if done.returncode != 0:
        raise CannotRunError(f"service account key: openssl ended with {done.returncode}, {done.stderr.strip()[-500:]}")
    _start_etcd(settings, programs)
    _start_apiserver(settings, programs, key)
    programs.wait("the API server is ready", lambda: _is_api_ready(settings, programs), 120)
    manager = "system:kube-controller-manager"
    programs.start(
        "kube-controller-manager",
        settings.program("kube-controller-manager"),
        f"--kubeconfig={settings.kubeconfig_of(manager)}",
        f"--service-account-private-key-file={key}",
        f"--root-ca-file={settings.data}/certs/apiserver.crt",
        "--use-service-account-credentials",
        "--leader-elect=false",
    )
    programs.start(
        "kube-scheduler",
        settings.program("kube-scheduler"),
        f"--kubeconfig={settings.kubeconfig_of('system:kube-scheduler')}",
        "--leader-elect=false",
    )
    programs.start("coredns", settings.program("coredns"), "-conf", str(settings.etc / "Corefile"))


def _start_etcd(settings: Settings, programs: Programs) -> None:
    programs.start(
        "etcd",
        settings.program("etcd"),
        f"--data-dir={settings.data}/etcd",
        f"--listen-client-urls={_ETCD}",
        f"--advertise-client-urls={_ETCD}",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
    )


def _start_apiserver(settings: Settings, programs: Programs, key: Path) -> None:
    programs.start(
        "kube-apiserver",
        settings.program("kube-apiserver"),
        f"--etcd-servers={_ETCD}",
        f"--cert-dir={settings.data}/certs",
        "--bind-address=0.0.0.0",
        f"--secure-port={settings.api_port}",
        f"--advertise-address={settings.bridge_ip}",
        f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--token-auth-file={settings.etc}/tokens.csv",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-cluster-ip-range={settings.service_range}",
        "--allow-privileged",
        "--kubelet-preferred-address-types=InternalIP",
    )


def _node(settings: Settings, programs: Programs) -> None:
    programs.start(
        "kubelet",
        settings.program("kubelet"),
        f"--config={settings.etc}/kubelet.yaml",
        f"--kubeconfig={settings.kubeconfig_of('system:node:node1')}",
        f"--hostname-override={settings.node}",
        f"--node-ip={settings.bridge_ip}",
    )
    programs.start(
        "kube-proxy",
        settings.program("kube-proxy"),
        f"--kubeconfig={settings.kubeconfig_of('system:kube-proxy')}",
        f"--hostname-override={settings.node}",
        "--proxy-mode=nftables",
        f"--cluster-cidr={settings.pod_range}",
        "--conntrack-max-per-core=0",
    )


def _import_images(settings: Settings, programs: Programs) -> None:
    probe = ("ctr", "--address", settings.containerd, "--namespace", "k8s.io", "plugins", "ls", "-q")
    programs.wait("containerd is ready", lambda: programs.run(*probe).returncode == 0, 60)
    archive = settings.data / "pause.tar"
    images.write_archive(images.pause(Path(settings.program("pause"))), archive)
    images.load(archive, address=settings.containerd)


def _make_runtime_class(settings: Settings, programs: Programs) -> None:
    name = configuration.USERLAND_CLASS
    manifest = settings.etc / "runtime-class.json"
    content = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": name}, "handler": name}
    manifest.write_text(json.dumps(content), encoding="utf-8")
    done = _kubectl(settings, programs, "apply", "-f", str(manifest))
    if done.returncode != 0:
        raise CannotRunError(f"RuntimeClass {name}: {done.stderr.strip()}")


def _kubectl(settings: Settings, programs: Programs, *arguments: str) -> subprocess.CompletedProcess[str]:
    return programs.run(settings.program("kubectl"), f"--kubeconfig={settings.kubeconfig}", *arguments)


def _is_api_ready(settings: Settings, programs: Programs) -> bool:
    done = _kubectl(settings, programs, "get", "--raw=/readyz", "--request-timeout=5s")
    return done.returncode == 0 and done.stdout.startswith("ok")


def _is_node_ready(settings: Settings, programs: Programs) -> bool:
    done = _kubectl(settings, programs, "get", "node", settings.node, "-o=json", "--request-timeout=5s")
    if done.returncode != 0:
        return False
    conditions = json.loads(done.stdout)["status"].get("conditions", [])
    return any(item["type"] == "Ready" and item["status"] == "True" for item in conditions)


def _exists(settings: Settings, programs: Programs, name: str) -> bool:
    return _kubectl(settings, programs, "get", name, "--request-timeout=5s").returncode == 0


def _answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=1):
            return True
    except OSError:
        return False


def _is_name_known(programs: Programs, name: str) -> bool:
    return programs.run("getent", "ahosts", name).returncode == 0
