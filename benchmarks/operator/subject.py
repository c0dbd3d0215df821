"""The operator's process: started, asked, weighed by /proc, killed. Called by ``bench``."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from tests.support.apiserver import free_port

START_SECONDS = 900.0
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Weight:
    """What a process has used."""

    resident_mib: float
    highest_mib: float
    cpu_seconds: float


class Subject:
    """``prodrl-operator run`` with a kubeconfig."""

    def __init__(self, kubeconfig: Path, log: Path, environment: Mapping[str, str] | None = None) -> None:
        self._port = free_port()
        command = [str(Path(sys.executable).with_name("prodrl-operator")), "run", "--kubeconfig", str(kubeconfig)]
        command += ["--listen", f"127.0.0.1:{self._port}", "--lease-namespace", "default"]
        self._begin = time.monotonic()
        with log.open("ab") as file:
            self.process = subprocess.Popen(command, stderr=file, env={**os.environ, **(environment or {})})
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", trust_env=False, timeout=60)

    def until_synced(self) -> float:
        """Seconds from its start until /readyz says 200."""
        while True:
            with contextlib.suppress(httpx.TransportError):
                if self._http.get("/readyz").status_code == 200:
                    return time.monotonic() - self._begin
            self._check(START_SECONDS)
            time.sleep(0.1)

    def until_looked(self, runs: int) -> float:
        """Seconds from its start until there were as many passes as runs: every run was looked at, or nearly."""
        while True:
            with contextlib.suppress(httpx.TransportError):
                figures = self.figures()
                passes = sum(value for name, value in figures.items() if name.startswith("prodrl_reconcile_total"))
                if passes >= runs:
                    return time.monotonic() - self._begin
            self._check(START_SECONDS)
            time.sleep(0.5)

    def figures(self) -> dict[str, float]:
        """The samples of /metrics that are not about one run, by name and label values."""
        found = {}
        for family in text_string_to_metric_families(self._http.get("/metrics").text):
            for sample in family.samples:
                if "run" not in sample.labels:
                    found["/".join([sample.name, *sample.labels.values()])] = sample.value
        return found

    def weight(self) -> Weight:
        """As the kernel counts it."""
        self._check(float("inf"))
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        sizes = {line.split()[0]: float(line.split()[1]) / 1024 for line in status.splitlines() if line.endswith("kB")}
        times = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return Weight(sizes["VmRSS:"], sizes["VmHWM:"], (int(times[11]) + int(times[12])) / TICKS)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()
        self._http.close()

    def stop(self) -> None:
        """SIGTERM, then wait."""
        self.process.terminate()
        self.process.wait(60)
        self._http.close()

    def _check(self, limit: float) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the operator ended with {self.process.returncode}; see its log")
        if time.monotonic() - self._begin > limit:
            raise RuntimeError(f"the operator is not there after {limit:g} s; see its log")
