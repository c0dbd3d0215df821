"""Stores for tests: a folder, and a bucket of an S3 server (moto) in this process.

A test module says ``pytest_plugins = ["tests.support.stores"]`` to use the fixtures.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from prodrl.config import StoreConfig
from prodrl.store import open_store
from prodrl.store.port import Store

BUCKET = "prodrl-tests"


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """URL of an S3 server with one bucket, on a free loopback port."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    client = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="key", aws_secret_access_key="secret"
    )
    client.create_bucket(Bucket=BUCKET)
    yield url
    server.stop()


@pytest.fixture
def s3_config(s3_endpoint: str, tmp_path: Path) -> StoreConfig:
    """A prefix of its own, with credentials in files as a Secret mounts them."""
    folder = tmp_path / "credentials"
    folder.mkdir()
    (folder / "accessKeyId").write_text("key\n")
    (folder / "secretAccessKey").write_text("secret\n")
    uri = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    return StoreConfig(uri=uri, endpoint_url=s3_endpoint, region="us-east-1", credentials_dir=str(folder))


@pytest.fixture
def local_config(tmp_path: Path) -> StoreConfig:
    return StoreConfig(uri=(tmp_path / "store").as_uri())


@pytest.fixture(params=["local", "s3"])
def any_config(request: pytest.FixtureRequest) -> StoreConfig:
    """Both implementations, one after the other."""
    return request.getfixturevalue(f"{request.param}_config")


@pytest.fixture
def any_store(any_config: StoreConfig) -> Store:
    return open_store(any_config)


@pytest.fixture
def local_store(local_config: StoreConfig) -> Store:
    return open_store(local_config)


@pytest.fixture
def s3_store(s3_config: StoreConfig) -> Store:
    return open_store(s3_config)
