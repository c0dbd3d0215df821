"""The real one-node cluster as tests use it: kubectl, waiting with a diagnosis, pods that need no image of their own.

Inside ``scripts/test-cluster`` only. Pods run the image ``USERLAND`` (no programs) under the RuntimeClass that shows
them this machine's ``/usr`` and this checkout's Python environment, read-only, so that nothing is built or pulled and
restricted namespaces take them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.cluster.up import images
from tests.cluster.up.configuration import USERLAND_CLASS
from tests.cluster.up.inside import SCRATCH_VARIABLE
from tests.cluster.up.settings import Settings

Object = dict[str, Any]

ROOT = Path(__file__).parents[2]
USERLAND = "test.local/userland:1"
PATH = f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
SECURITY_LABEL = "pod-security.kubernetes.io/enforce"
_LOOK_SECONDS = 0.5


class KubectlError(AssertionError):
    """kubectl said no; the message is its own."""


class Node:
    """The cluster that this process runs in."""

    def __init__(self) -> None:
        self.settings = Settings.read(Path(os.environ[SCRATCH_VARIABLE]))

    def kubectl(self, *arguments: str, stdin: str | None = None, seconds: float = 120) -> str:
        """Run kubectl as the administrator.

        Raises:
            KubectlError: It ended with another code than 0.
        """
        command = [self.settings.program("kubectl"), *arguments]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=seconds)
        if done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def apply(self, *manifests: Object, namespace: str = "default") -> None:
        """Apply as a user would."""
        # JSON, because a text like "1e-4" is a number to YAML readers other than the one that would write it here.
        listed = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(listed))

    def get(self, kind: str, name: str, namespace: str = "default") -> Object:
        """One object.

        Raises:
            KubectlError: There is none.
        """
        found: Object = json.loads(self.kubectl("get", kind, name, "-n", namespace, "-o", "json"))
        return found

    def find(self, kind: str, name: str, namespace: str = "default") -> Object | None:
        """One object, None where there is none."""
        text = self.kubectl("get", kind, name, "-n", namespace, "-o", "json", "--ignore-not-found")
        return json.loads(text) if text.strip() else None

    def list(self, kind: str, namespace: str = "default", selector: str = "") -> list[Object]:
        """All of a kind with these labels."""
        text = self.kubectl("get", kind, "-n", namespace, "-o", "json", f"--selector={selector}")
        return list(json.loads(text)["items"])

    def wait(self, what: str, until: Callable[[], Any], *, namespace: str = "default", seconds: float = 120) -> Any:
        """Wait for a truth; what the cluster says is part of the failure."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := until():
                return found
            time.sleep(_LOOK_SECONDS)
        raise AssertionError(f"not within {seconds:.0f} s: {what}\n{self.diagnosis(namespace)}")

    def wait_for_end(self, pod: str, *, namespace: str = "default", seconds: float = 120) -> Object:
        """The status of a pod that ended."""

        def ended() -> Object | None:
            status: Object = self.get("pod", pod, namespace).get("status", {})
            return status if status.get("phase") in {"Succeeded", "Failed"} else None

        found: Object = self.wait(f"pod {pod} ends", ended, namespace=namespace, seconds=seconds)
        return found

    def run_to_end(self, manifest: Object, *, namespace: str = "default", seconds: float = 120) -> str:
        """Run a pod and return its output; it must succeed."""
        name = manifest["metadata"]["name"]
        self.apply(manifest, namespace=namespace)
        status = self.wait_for_end(name, namespace=namespace, seconds=seconds)
        output = self.kubectl("logs", name, "-n", namespace)
        assert status["phase"] == "Succeeded", f"pod {name}: {status}\n{output}"
        return output

    def make_namespace(self, level: str = "restricted", *, prefix: str = "test") -> str:
        """A namespace of its own under a Pod Security level."""
        name = f"{prefix}-{uuid.uuid4().hex[:8]}"
        metadata = {"name": name, "labels": {SECURITY_LABEL: level}}
        self.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": metadata})
        self.wait(f"namespace {name} has its account", lambda: self.find("serviceaccount", "default", name))
        return name

    def diagnosis(self, namespace: str) -> str:
        """Pods and events, for people."""
        pods = self.kubectl("get", "pods", "-n", namespace, "-o", "wide")
        events = self.kubectl("get", "events", "-n", namespace, "--sort-by=.lastTimestamp")
        return f"{pods}\n{events[-4000:]}"

    def load_image(self, archive: Path) -> None:
        """Import a docker archive."""
        images.load(archive, address=self.settings.containerd)

    def add_image(self, image: images.Image) -> None:
        """Make and import an image of a few files."""
        archive = self.settings.data / f"{uuid.uuid4().hex}.tar"
        images.write_archive(image, archive)
        self.load_image(archive)
        archive.unlink()


def user_security() -> Object:
    """A container's security context as Pod Security's restricted level asks."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container(
    command: Sequence[str], *, name: str = "main", env: Mapping[str, str] | None = None, **fields: Any
) -> Object:
    """A container that runs a program of this machine or of the checkout's environment."""
    return {
        "name": name,
        "image": USERLAND,
        "command": list(command),
        "env": [{"name": key, "value": value} for key, value in {"HOME": "/scratch", **(env or {})}.items()],
        "securityContext": user_security(),
        **fields,
        "volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}, *fields.get("volumeMounts", [])],
    }


def pod_spec(containers: Iterable[Object], *, restart: str = "Never", **fields: Any) -> Object:
    """A pod that runs as the workloads do."""
    return {
        "runtimeClassName": USERLAND_CLASS,
        "restartPolicy": restart,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
        "securityContext": {"runAsUser": images.USER, "runAsGroup": images.USER, "fsGroup": images.USER},
        "containers": list(containers),
        **fields,
        "volumes": [{"name": "scratch", "emptyDir": {}}, *fields.get("volumes", [])],
    }


def pod(name: str, spec: Object) -> Object:
    """A bare pod, labelled with its name."""
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


def deployment(name: str, spec: Object, *, replicas: int = 1) -> Object:
    """A Deployment, labelled with its name."""
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": {**spec, "restartPolicy": "Always"}}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {"replicas": replicas, "selector": {"matchLabels": labels}, "template": template},
    }


def service(name: str, port: int, target: int) -> Object:
    """A Service for the pods labelled with its name."""
    ports = [{"port": port, "targetPort": target}]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": name}, "ports": ports},
    }
