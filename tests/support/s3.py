"""A real S3 server for tests: a process of its own on a loopback port, with credentials made for it.

``scripts/s3-server`` finds or builds the binary. Where that is impossible the tests are skipped with the reason, unless
``PRODRL_REQUIRE_TIERS`` is set: then they fail. tests/s3/conftest.py makes the fixtures of this module known.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import socketserver
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import botocore.config
import httpx
import pytest

from prodrl.config import StoreConfig
from tests.support import tiers

BUCKET = "prodrl-real"
REGION = "us-east-1"
START_SECONDS = 60
BUILD_SECONDS = 3600
ROOT = Path(__file__).parents[2]


class ServerMissingError(Exception):
    """There is no server and none could be built here."""


def find_server() -> Path:
    """The binary, built now where it is missing."""
    try:
        done = subprocess.run(
            [str(ROOT / "scripts" / "s3-server")], capture_output=True, text=True, check=False, timeout=BUILD_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise ServerMissingError(f"scripts/s3-server: {exc}") from exc
    if done.returncode != 0:
        raise ServerMissingError(done.stderr.strip()[-2000:] or f"scripts/s3-server ended with {done.returncode}")
    return Path(done.stdout.strip())


class RealServer:
    """Starts, kills and restarts one server over one folder; port and credentials stay the same."""

    def __init__(self, binary: Path, folder: Path) -> None:
        self.binary = binary
        self.folder = folder
        self.access_key = secrets.token_hex(8)
        self.secret_key = secrets.token_urlsafe(24)
        self.port = _free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "server.log"
        (folder / "data").mkdir(parents=True)
        (folder / "meta").mkdir()
        (folder / "accounts").mkdir()

    @property
    def url(self) -> str:
        """Endpoint."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start (again) and wait until it answers."""
        command = [str(self.binary), "--port", f"127.0.0.1:{self.port}", "--region", REGION, "--health", "/healthz"]
        # With an (empty) list of accounts, an unknown key is InvalidAccessKeyId as on AWS; without one it is a 404.
        command += ["--iam-dir", str(self.folder / "accounts")]
        command += ["posix", *([] if _keeps_attributes(self.folder) else ["--sidecar", str(self.folder / "meta")])]
        # Nothing else of the environment: every option of the server can be set there too.
        env = {"ROOT_ACCESS_KEY_ID": self.access_key, "ROOT_SECRET_ACCESS_KEY": self.secret_key, "HOME": os.devnull}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, str(self.folder / "data")], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )
        self._wait()

    def _wait(self) -> None:
        assert self.process is not None
        deadline = time.monotonic() + START_SECONDS
        with httpx.Client(trust_env=False, timeout=5) as client:
            while time.monotonic() < deadline:
                if self.process.poll() is not None:
                    raise AssertionError(f"the S3 server ended with {self.process.returncode}\n{self.tail()}")
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/healthz").status_code == 200:
                        return
                time.sleep(0.05)
        raise AssertionError(f"the S3 server does not answer after {START_SECONDS} s\n{self.tail()}")

    def kill(self) -> None:
        """End it at once, as a failing machine would."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        """End it in order."""
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()

    def tail(self) -> str:
        """The end of its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-3000:]

    def client(self) -> Any:
        """A plain boto3 client, to look at the bucket without the code under test."""
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=botocore.config.Config(s3={"addressing_style": "path"}),
        )

    def config(self, credentials: Path) -> StoreConfig:
        """A prefix of its own; writes the credentials as a Secret mounts them."""
        credentials.mkdir(parents=True)
        (credentials / "accessKeyId").write_text(self.access_key + "\n")
        (credentials / "secretAccessKey").write_text(self.secret_key + "\n")
        uri = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        return StoreConfig(uri=uri, endpoint_url=self.url, region=REGION, credentials_dir=str(credentials))


class AnswerLoser(socketserver.ThreadingTCPServer):
    """A proxy that passes bytes on, but hangs up instead of the next answer when ``lose`` is set."""

    daemon_threads = True

    def __init__(self, port: int) -> None:
        self.upstream_port = port
        self.lose = threading.Event()
        self.lost = 0
        super().__init__(("127.0.0.1", 0), _Passing)


class _Passing(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        server = self.server
        assert isinstance(server, AnswerLoser)
        with socket.create_connection(("127.0.0.1", server.upstream_port)) as upstream:
            threading.Thread(target=_pump, args=(self.request, upstream), daemon=True).start()
            while data := upstream.recv(65536):
                # "100 Continue" is no answer yet: the client has not sent the body.
                if server.lose.is_set() and not data.startswith(b"HTTP/1.1 100 "):
                    server.lose.clear()
                    server.lost += 1
                    return
                self.request.sendall(data)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        return  # the other direction has hung up


@contextlib.contextmanager
def running_server(binary: Path, folder: Path) -> Iterator[RealServer]:
    """A server with one bucket, stopped at the end of the block."""
    server = RealServer(binary, folder)
    try:
        server.start()
        server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def s3_binary() -> Path:
    """The server's binary, or the reason why there is none."""
    try:
        return find_server()
    except ServerMissingError as exc:
        tiers.lack(f"no S3 server: {exc}")


@pytest.fixture(scope="session")
def real_server(s3_binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """One server for all tests that leave it running."""
    with running_server(s3_binary, tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def own_server(s3_binary: Path, tmp_path: Path) -> Iterator[RealServer]:
    """A server that the test may kill."""
    with running_server(s3_binary, tmp_path / "s3") as server:
        yield server


@pytest.fixture
def real_config(real_server: RealServer, tmp_path: Path) -> StoreConfig:
    return real_server.config(tmp_path / "credentials")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _keeps_attributes(folder: Path) -> bool:
    """Whether the file system has extended attributes, where the server keeps what S3 knows of an object."""
    try:
        os.setxattr(folder, "user.prodrl", b"1")
    except OSError:
        return False
    return True
