"""A whole local run as a user has it: `prodrl-operator local` in its own process, users on its port."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import yaml

ENGINE_ARGS = ["--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16"]
ENGINE_ARGS += ["--kv-cache-memory-bytes", "67108864", "--disable-uvicorn-access-log"]
ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "DO_NOT_TRACK": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def run_manifest(folder: Path, **spec: Any) -> dict[str, Any]:
    """A small unquantised run with its model and store in ``folder``; keyword arguments replace parts of the spec."""
    base: dict[str, Any] = {
        "model": {"uri": f"file://{folder}/model", "servedName": "tiny"},
        "storage": {"uri": f"file://{folder}/store"},
        "rounds": {"max": 1, "steps": 2, "batchSize": 4},
        "serving": {
            "args": ENGINE_ARGS,
            "env": [{"name": name, "value": value} for name, value in ENGINE_ENV.items()],
            "drainSeconds": 1,
        },
        "recording": {"flushSeconds": 1, "settleSeconds": 30, "rewardDeadlineSeconds": 600},
        "training": {"dtype": "float32", "optimizer": {"learningRate": "1e-4"}, "checkpointEverySteps": 1},
        "export": {"quantization": "None"},
    }
    metadata = {"name": "tiny", "namespace": "default"}
    return {"apiVersion": "prodrl.dev/v1alpha1", "kind": "ProdRLRun", "metadata": metadata, "spec": {**base, **spec}}


class LocalRun:
    """Starts, watches, kills and restarts the controller of one run."""

    def __init__(self, folder: Path, manifest: dict[str, Any]) -> None:
        self.folder = folder
        self.data = folder / "data"
        self.path = folder / "run.yaml"
        self.path.write_text(yaml.safe_dump(manifest), encoding="utf-8")
        self.log = folder / "controller.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the controller (again)."""
        command = [str(Path(sys.executable).with_name("prodrl-operator")), "local", str(self.path)]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*command, "--data", str(self.data)], stdout=log, stderr=log)

    def summary(self) -> dict[str, Any]:
        """The newest summary; empty before the first."""
        try:
            return dict(json.loads((self.data / "summary.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def endpoint(self) -> str | None:
        """Where users connect, once it is known."""
        try:
            return str(json.loads((self.data / "endpoint.json").read_text(encoding="utf-8"))["endpoint"])
        except (OSError, ValueError):
            return None

    def step(self) -> str:
        """``<round> <step>`` of the newest round."""
        rounds = self.summary().get("rounds") or [{"number": -1, "phase": "none"}]
        return f"{rounds[-1]['number']} {rounds[-1]['phase']}"

    def wait(self, what: str, until: Callable[[], object], seconds: float = 300) -> Any:
        """Wait for a truth; the log's end is part of the failure."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = until()
            if found:
                return found
            if self.process is not None and self.process.poll() is not None:
                found = until()
                assert found, f"the controller ended ({self.process.returncode}) before: {what}\n{self.tail()}"
                return found
            time.sleep(0.2)
        raise AssertionError(f"not within {seconds} s: {what}; stands at {self.step()}\n{self.tail()}")

    def tail(self) -> str:
        """The end of the controller's log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-3000:]

    def processes(self, *needles: str) -> list[int]:
        """Pids of containers of this run whose command line has all needles (shims left out)."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(self.data) in line and "shim.py" not in line and all(needle in line for needle in needles):
                found.append(int(entry.name))
        return found

    def kill(self, *needles: str) -> list[int]:
        """Wait for such a process and kill -9 it."""
        pids = self.wait(f"a process with {needles}", lambda: self.processes(*needles), 120)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        return list(pids)

    def kill_controller(self) -> None:
        """kill -9 of the controller only; what it started goes on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Ctrl-C, and the end of everything."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(90)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def audit(self) -> dict[str, Any]:
        """``prodrl data audit`` as a user runs it; its exit code must be 0."""
        command = [str(Path(sys.executable).with_name("prodrl")), "data", "audit", "--json"]
        done = subprocess.run(
            [*command, "--store", f"file://{self.folder}/store"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return dict(json.loads(done.stdout))


class Users(threading.Thread):
    """One conversation after another through the gateway: one completion, then a reward."""

    def __init__(self, run: LocalRun, model: str = "tiny", pause_seconds: float = 0.3) -> None:
        super().__init__(name="users", daemon=True)
        self.run_under_test = run
        self.model = model
        self.pause_seconds = pause_seconds
        self.counts: Counter[str] = Counter()
        self.by_digest: Counter[str] = Counter()
        self.errors: list[str] = []
        self.done = threading.Event()

    def run(self) -> None:
        """Until ``done`` is set."""
        dice = random.Random(7)
        with httpx.Client(timeout=120, trust_env=False) as client:
            number = 0
            while not self.done.wait(self.pause_seconds):
                endpoint = self.run_under_test.endpoint()
                if endpoint is None:
                    continue
                number += 1
                self._converse(client, endpoint, f"c{number}", dice)

    def _converse(self, client: httpx.Client, endpoint: str, name: str, dice: random.Random) -> None:
        body = {"model": self.model, "messages": [{"role": "user", "content": f"say {name}"}], "max_tokens": 8}
        body |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        headers = {"X-ProdRL-Trajectory": name}
        try:
            answer = client.post(f"{endpoint}/v1/chat/completions", json=body, headers=headers)
        except httpx.HTTPError as exc:
            self.counts["unreachable"] += 1
            self.errors.append(f"{name}: {exc!r}")
            return
        if answer.status_code != 200:
            self.counts[str(answer.status_code)] += 1
            self.errors.append(f"{name}: {answer.status_code} {answer.text[:200]}")
            return
        self.counts["answered"] += 1
        self.by_digest[answer.headers["X-ProdRL-Policy"]] += 1
        reward = {"trajectory_id": name, "reward": float(dice.random() < 0.5), "idempotency_key": name}
        for _ in range(60):
            try:
                if client.post(f"{endpoint}/v1/feedback", json=reward).status_code == 202:
                    self.counts["rewarded"] += 1
                    return
            except httpx.HTTPError:
                pass  # the gateway is being restarted: the client's own retry, with the same key
            time.sleep(0.5)
