"""Starts a real vLLM server on a loopback port, with or without the recorder, and stops it. A start takes 15-30 s."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pyarrow.parquet as pq

from prodrl.config import RecorderConfig, SamplingPolicy, StoreConfig
from prodrl.records import CompletionRecord

DIGEST = "sha256:" + "ab" * 32
MODEL_NAME = "tiny"
START_SECONDS = 600

# One thread and two processes instead of three; see docs/adr/0002.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "TORCHDYNAMO_DISABLE": "1",
}
ARGUMENTS = [
    "--middleware", "prodrl.recorder.middleware.Readiness", "--logprobs-mode", "processed_logprobs",
    "--max-logprobs", "32",
    "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "64", "--kv-cache-memory-bytes", str(64 * 2**20),
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--enable-prompt-tokens-details",
]  # fmt: skip


@dataclass
class Engine:
    """A server that answers."""

    url: str
    store: pathlib.Path
    spool: pathlib.Path
    process: subprocess.Popen[bytes]
    log: pathlib.Path
    client: httpx.Client
    started_seconds: float

    def metrics(self) -> dict[str, object]:
        return dict(self.client.get("/prodrl/metrics").json())

    def records(self, trajectory: str, count: int = 1, seconds: float = 15) -> list[CompletionRecord]:
        """The records of a trajectory, oldest first, once there are ``count`` of them in the store."""
        deadline = time.monotonic() + seconds
        while True:
            found = [row for row in stored_records(self.store) if row.trajectory_id == trajectory]
            if len(found) >= count:
                return sorted(found, key=lambda row: (row.started_ms, row.record_id))
            if time.monotonic() > deadline:
                raise TimeoutError(f"{trajectory}: {len(found)} records of {count}; {self.metrics()}")
            time.sleep(0.1)


def stored_records(store: pathlib.Path) -> list[CompletionRecord]:
    """Every record of every shard that has its manifest."""
    manifests = sorted(store.glob("records/*/*.manifest.json"))
    shards = [path.with_name(path.name.removesuffix(".manifest.json") + ".parquet") for path in manifests]
    return [CompletionRecord(**row) for shard in shards for row in pq.read_table(shard).to_pylist()]


def recorder_config(store: pathlib.Path, **changes: object) -> RecorderConfig:
    values: dict[str, object] = {
        "store": StoreConfig(uri=store.as_uri()),
        "run": "test",
        "round": 3,
        "policy_digest": DIGEST,
        "writer": "engine-test",
        "flush_seconds": 0.2,
        "sampling_policy": SamplingPolicy(),
    }
    return RecorderConfig(**{**values, **changes})  # type: ignore[arg-type]


@contextlib.contextmanager
def engine(
    model: pathlib.Path,
    folder: pathlib.Path,
    *,
    is_recording: bool = True,
    arguments: tuple[str, ...] = (),
    **config: object,
) -> Iterator[Engine]:
    """A server that is ready; everything it writes lies in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    store, spool, log = folder / "store", folder / "spool", folder / "engine.log"
    store.mkdir(exist_ok=True)
    (model / ".prodrl-policy").write_text(json.dumps({"digest": DIGEST}))
    environment = {**os.environ, **ENVIRONMENT, "PRODRL_MODEL_DIR": str(model), "PRODRL_SPOOL_DIR": str(spool)}
    if is_recording:
        (folder / "recorder.json").write_text(recorder_config(store, **config).model_dump_json())
        environment["PRODRL_RECORDER_CONFIG"] = str(folder / "recorder.json")
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port), *ARGUMENTS, *arguments]
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=60) as client:
            _wait(client, process, log, "/prodrl/ready" if is_recording else "/health")
            yield Engine(url, store, spool, process, log, client, time.monotonic() - began)
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], seconds: float = 30) -> None:
    """SIGTERM to the server, as a kubelet would; then end whatever is left of its process group."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(client: httpx.Client, process: subprocess.Popen[bytes], log: pathlib.Path, path: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.TransportError):
            if client.get(path).status_code == 200:
                return
        time.sleep(0.2)
    raise RuntimeError(f"vLLM did not become ready:\n{log.read_text(errors='replace')[-4000:]}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
