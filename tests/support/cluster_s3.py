"""A real S3 server as a pod of the test cluster, behind a Service, with a bucket and a Secret of credentials."""

from __future__ import annotations

import secrets
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import botocore.exceptions

from tests.cluster.up import images
from tests.support import node as support
from tests.support.node import Node, Object
from tests.support.s3 import REGION, ROOT

IMAGE = "test.local/s3:1"
PORT = 9000
"""As in examples/02-cluster."""
SECRET = "s3"


@dataclass(frozen=True)
class ClusterS3:
    """A server that answers."""

    namespace: str
    bucket: str
    access_key: str
    secret_key: str

    @property
    def url(self) -> str:
        """Endpoint, for pods of any namespace and for the node's own processes."""
        return f"http://s3.{self.namespace}.svc.cluster.local:{PORT}"

    def client(self) -> Any:
        """A plain client on the node."""
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=botocore.config.Config(s3={"addressing_style": "path"}, proxies={}),
        )

    def secret(self, name: str = SECRET) -> Object:
        """The Secret that a run names."""
        data = {"accessKeyId": self.access_key, "secretAccessKey": self.secret_key}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}

    def upload(self, folder: Path, prefix: str) -> None:
        """What a user does with ``aws s3 cp --recursive``."""
        client = self.client()
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            client.upload_file(str(path), self.bucket, f"{prefix}/{path.relative_to(folder)}")


def start(node: Node, namespace: str, bucket: str) -> ClusterS3:
    """Start the server in a namespace (restricted, too), and make the bucket."""
    done = subprocess.run([str(ROOT / "scripts" / "s3-server")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    node.add_image(images.Image(IMAGE, files={"s3": Path(done.stdout.strip())}, entrypoint=["/s3"]))
    server = ClusterS3(namespace, bucket, secrets.token_hex(8), secrets.token_urlsafe(24))
    pod = support.pod_spec([_container()], volumes=[{"name": name, "emptyDir": {}} for name in _FOLDERS])
    del pod["runtimeClassName"]
    manifests = (server.secret(), support.deployment("s3", pod), support.service("s3", PORT, PORT))
    node.apply(*manifests, namespace=namespace)
    node.kubectl("rollout", "status", "deployment/s3", "-n", namespace, "--timeout=180s")
    # A new Service's name and rules arrive a moment after its pods are ready.
    node.wait("the S3 server answers by its name", lambda: _has_bucket(server), namespace=namespace, seconds=60)
    return server


def _has_bucket(server: ClusterS3) -> bool:
    """Whether the bucket is there, made now if need be."""
    try:
        server.client().create_bucket(Bucket=server.bucket)
    except botocore.exceptions.EndpointConnectionError:
        return False
    return True


_FOLDERS = ("buckets", "attributes", "accounts")


def _container() -> Object:
    arguments = ["/s3", "--port", f"0.0.0.0:{PORT}", "--region", REGION, "--health", "/healthz"]
    # With a list of accounts an unknown key is refused as on AWS.
    arguments += ["--iam-dir", "/data/accounts", "posix", "--sidecar", "/data/attributes", "/data/buckets"]
    # Patient, so that a machine with other work on it does not take the store away from the tests.
    ready = {"httpGet": {"path": "/healthz", "port": PORT}, "periodSeconds": 2, "timeoutSeconds": 20}
    env = [_from_secret("ROOT_ACCESS_KEY_ID", "accessKeyId"), _from_secret("ROOT_SECRET_ACCESS_KEY", "secretAccessKey")]
    mounts = [{"name": name, "mountPath": f"/data/{name}"} for name in _FOLDERS]
    return support.container(arguments, volumeMounts=mounts, readinessProbe=ready) | {"image": IMAGE, "env": env}


def _from_secret(name: str, key: str) -> Object:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": key}}}
