"""Export, fetch and agreement against a real vLLM on this machine's processor."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

import httpx
import pytest

from prodrl.config import EvaluateConfig, ExportConfig, FetchConfig, PolicyRef, StoreConfig
from prodrl.evaluate.run import run as evaluate
from prodrl.export import fetch
from prodrl.export.run import run as export
from prodrl.progress import Progress
from tests.support.tiny_qwen import save_tiny_qwen

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}
ARGUMENTS = [
    "--served-model-name=chess",
    "--enforce-eager",
    "--max-model-len=256",
    "--max-num-seqs=16",
    "--logprobs-mode=processed_logprobs",
    "--kv-cache-memory-bytes=67108864",
    "--disable-uvicorn-access-log",
]


@pytest.fixture
def serve(tmp_path):
    """Start a server on a folder; stop it afterwards."""
    running = []

    def start(folder) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with (tmp_path / "vllm.log").open("w") as log:
            command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host=127.0.0.1"]
            command += [f"--port={port}", f"--model={folder}", *ARGUMENTS]
            running.append(subprocess.Popen(command, env=os.environ | ENVIRONMENT, stdout=log, stderr=log))
        url = f"http://127.0.0.1:{port}"
        for _ in range(240):
            assert running[-1].poll() is None, (tmp_path / "vllm.log").read_text()[-3000:]
            try:
                if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                    return url
            except httpx.HTTPError:
                pass
            time.sleep(1.0)
        raise AssertionError("the server did not become healthy: " + (tmp_path / "vllm.log").read_text()[-3000:])

    yield start
    for process in running:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.mark.parametrize(("quantization", "least", "most"), [("None", 0.0, 0.03), ("NVFP4", 0.03, 1.5)])
def test_agreement_of_a_served_export(serve, tmp_path, quantization, least, most):
    """bfloat16 kernels cost rounding noise; four bits cost visibly more, and both stay far from unrelated models."""
    model = save_tiny_qwen(tmp_path / "base", layers=2)
    store = StoreConfig(uri=f"file://{tmp_path}/store")
    base = f"file://{model}"
    result = export(
        ExportConfig(store=store, run="chess", round=0, model_uri=base, quantization=quantization), Progress()
    )
    policy = PolicyRef(round=0, digest=result.policy_digest, key=result.policy_key)
    fetch.run(FetchConfig(store=store, policy=policy), tmp_path / "served")
    url = serve(tmp_path / "served")
    config = EvaluateConfig(
        store=store,
        run="chess",
        round=0,
        candidate=policy,
        candidate_url=url,
        weights_key=result.weights_key,
        served_name="chess",
        agreement_samples=8,
    )
    found = evaluate(config, Progress()).agreement
    assert found.tokens == 8 * 63
    assert least <= found.mean_abs <= most
    assert found.mean_abs < found.p99_abs < 5.0
