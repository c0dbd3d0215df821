"""A real control plane for tests: etcd and kube-apiserver on loopback, and the controllers of built-in kinds.

Imported by the conftest of a tier. Nothing of it is needed twice: one server a test session, namespaces by the test.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from prodrl_operator.cluster import port
from prodrl_operator.cluster.kubernetes import KubernetesCluster, connect
from tests.support import tiers

ROOT = Path(__file__).parents[2]
TOKENS = {"admin": "system:masters", "nobody": "nobodies"}
START_SECONDS = 90


@dataclass(frozen=True)
class ApiServer:
    """A running control plane."""

    folder: Path
    url: str
    kubeconfig: Path
    """Of ``admin``; see :meth:`kubeconfig_of` for others."""
    has_controllers: bool
    """Deployments, Jobs, garbage collection and namespace deletion work (kube-controller-manager was found)."""
    programs: Path

    def kubeconfig_of(self, token: str, namespace: str = "default", url: str | None = None) -> Path:
        """A kubeconfig for a bearer token (``admin``, ``nobody``, or a service account's), perhaps through a proxy."""
        path = self.folder / f"kubeconfig-{abs(hash((token, namespace, url)))}"
        cluster = {"server": url or self.url}
        if cluster["server"].startswith("https"):
            cluster["certificate-authority"] = str(self.folder / "certs/apiserver.crt")
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": namespace}}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def connect(self, token: str = "admin", url: str | None = None) -> KubernetesCluster:
        """A new client."""
        return connect(str(self.kubeconfig_of(token, url=url)))

    def kubectl(
        self, *arguments: str, text: str | None = None, token: str = "admin", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run the real kubectl; ``text`` is its standard input."""
        command = [str(self.programs / "kubectl"), "--kubeconfig", str(self.kubeconfig_of(token)), *arguments]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120, check=False)
        if check and done.returncode != 0:
            raise AssertionError(f"kubectl {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}")
        return done


def free_port() -> int:
    """A port nobody listens on at this moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def programs() -> Path:
    """The folder with the programs, as scripts/kubernetes finds or, in a required tier, builds them."""
    arguments = ["api"] if tiers.are_required() else ["--find", "api"]
    done = subprocess.run([str(ROOT / "scripts/kubernetes"), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        remedy = "run scripts/kubernetes api once (10 minutes, needs Go), or set KUBEBUILDER_ASSETS"
        tiers.lack(f"no kube-apiserver: {remedy}\n{done.stderr[-2000:]}".strip())
    return Path(done.stdout.strip())


@contextlib.contextmanager
def running(
    folder: Path,
    extra_arguments: tuple[str, ...] = (),
    *,
    controllers: bool = True,
    tokens: Mapping[str, str] = TOKENS,
) -> Iterator[ApiServer]:
    """Start everything, install our CRDs, stop everything.

    Args:
        folder: Where data and logs go.
        extra_arguments: Of kube-apiserver.
        controllers: False: what Jobs and Deployments say is left to whoever plays the cluster.
        tokens: Bearer token, and name, of each user -> group.
    """
    found = programs()
    started: list[subprocess.Popen[bytes]] = []
    folder.mkdir(parents=True, exist_ok=True)

    def start(name: str, *arguments: str) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            started.append(subprocess.Popen([str(found / name), *arguments], cwd=folder, stdout=log, stderr=log))

    try:
        client, peer, secure = (f"http://127.0.0.1:{free_port()}" for _ in range(3))
        secure = secure.replace("http:", "https:")
        start("etcd", *_etcd(client, peer))
        subprocess.run(["openssl", "genrsa", "-out", "sa.key", "2048"], cwd=folder, check=True, capture_output=True)
        (folder / "tokens.csv").write_text("".join(f"{t},{t},{t},{g}\n" for t, g in tokens.items()))
        start("kube-apiserver", *_apiserver(client, secure), *extra_arguments)
        has_controllers = controllers and (found / "kube-controller-manager").exists()
        server = ApiServer(folder, secure, folder / "kubeconfig", has_controllers, found)
        shutil.copy(server.kubeconfig_of("admin"), server.kubeconfig)
        _wait_ready(f"{secure}/readyz", folder / "kube-apiserver.log", started)
        server.kubectl("apply", "--server-side", "-f", os.environ.get("PRODRL_TEST_CRDS", str(ROOT / "crds")))
        # On a CRD too young to have conditions kubectl gives up at once; what follows waits for what is needed.
        server.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=60s", check=False)
        _wait_served(server)
        if has_controllers:
            # After the CRDs: the garbage collector looks for new kinds only twice a minute.
            secure_port = free_port()
            start("kube-controller-manager", *_controllers(server.kubeconfig, secure_port))
            _wait_ready(f"https://127.0.0.1:{secure_port}/healthz", folder / "kube-controller-manager.log", started)
        yield server
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=3)
            if process.poll() is None:
                process.kill()
                process.wait()


def _etcd(client: str, peer: str) -> list[str]:
    urls = ["--listen-client-urls", client, "--advertise-client-urls", client]
    urls += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    return ["--data-dir", "etcd", "--unsafe-no-fsync", "--log-level", "warn", *urls]


def _apiserver(etcd: str, secure: str) -> list[str]:
    return [
        *["--etcd-servers", etcd, "--cert-dir", "certs", "--bind-address", "127.0.0.1"],
        *["--secure-port", secure.rsplit(":", 1)[1], "--token-auth-file", "tokens.csv"],
        *["--service-account-key-file", "sa.key", "--service-account-signing-key-file", "sa.key"],
        *["--service-account-issuer", "https://kubernetes.default.svc", "--authorization-mode", "RBAC"],
        *["--service-cluster-ip-range", "10.96.0.0/16", "--allow-privileged", "--max-requests-inflight", "2000"],
        # Without the controllers there are no service accounts for pods.
        *["--disable-admission-plugins", "ServiceAccount"],
    ]


def _controllers(kubeconfig: Path, secure_port: int) -> list[str]:
    wanted = ["garbage-collector", "namespace", "serviceaccount", "serviceaccount-token"]
    wanted += ["deployment", "replicaset", "job", "disruption", "resourcequota", "endpoints", "endpointslice"]
    return [
        *["--kubeconfig", str(kubeconfig), "--leader-elect=false"],
        *["--controllers", ",".join(f"{name}-controller" for name in wanted)],
        *["--service-account-private-key-file", "sa.key", "--secure-port", str(secure_port)],
        *["--bind-address", "127.0.0.1", "--kube-api-qps", "500", "--kube-api-burst", "1000"],
    ]


def _wait_ready(url: str, log: Path, started: list[subprocess.Popen[bytes]]) -> None:
    import ssl

    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=anyone))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and all(process.poll() is None for process in started):
        try:
            with opener.open(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    end = log.read_text(errors="replace")[-2000:]
    raise AssertionError(f"{log.stem} ended or is not ready after {START_SECONDS} s; its log ends with:\n{end}")


def _wait_served(server: ApiServer) -> None:
    """Established is not yet served: wait until a list of each of our kinds answers."""
    cluster = server.connect()
    deadline = time.monotonic() + START_SECONDS
    for kind in (port.RUN, port.ROUND):
        while True:
            try:
                cluster.list(kind)
                break
            except Exception:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
