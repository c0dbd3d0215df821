"""An S3 server in the cluster, reached from pods by its Service's name."""

from __future__ import annotations

import json

from tests.support import cluster_s3
from tests.support import node as support
from tests.support.node import Node

PROGRAM = """
import json, os, sys
from pathlib import Path
from prodrl.config import StoreConfig
from prodrl.errors import RuntimeFault
from prodrl.store import open_store
import boto3, botocore.config, botocore.exceptions

uri, endpoint = sys.argv[1:]
store = open_store(StoreConfig(uri=uri, endpoint_url=endpoint, region="us-east-1"))
said = {"created": [store.create("once", b"1"), store.create("once", b"2")], "kept": store.get("once").decode()}

folder = Path(os.environ["PRODRL_CREDENTIALS_DIR"])
client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1",
    aws_access_key_id=(folder / "accessKeyId").read_text(),
    aws_secret_access_key=(folder / "secretAccessKey").read_text(),
    config=botocore.config.Config(s3={"addressing_style": "path"}))
codes = []
for _ in range(2):
    try:
        answer = client.put_object(Bucket=uri.split("/")[2], Key="plain", Body=b"x", IfNoneMatch="*")
        codes.append(answer["ResponseMetadata"]["HTTPStatusCode"])
    except botocore.exceptions.ClientError as exc:
        codes.append(exc.response["Error"]["Code"])
print(json.dumps(said | {"codes": codes}))
"""


def test_a_pod_writes_once_and_only_once(node: Node, namespace: str) -> None:
    server = cluster_s3.start(node, namespace, "prodrl-pods")
    mounts = [{"name": "credentials", "mountPath": "/credentials", "readOnly": True}]
    command = ["python", "-c", PROGRAM, "s3://prodrl-pods/some/prefix", server.url]
    env = {"PRODRL_CREDENTIALS_DIR": "/credentials"}
    writer = support.container(command, env=env, volumeMounts=mounts)
    volumes = [{"name": "credentials", "secret": {"secretName": cluster_s3.SECRET, "defaultMode": 0o440}}]
    spec = support.pod_spec([writer], volumes=volumes)
    said = json.loads(node.run_to_end(support.pod("writer", spec), namespace=namespace).splitlines()[-1])
    assert said == {"created": [True, False], "kept": "1", "codes": [200, "PreconditionFailed"]}
    assert server.client().get_object(Bucket="prodrl-pods", Key="some/prefix/once")["Body"].read() == b"1"
