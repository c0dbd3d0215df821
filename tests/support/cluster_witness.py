"""Watches a run on the cluster from outside, all the time: what it says of itself, against what is really there.

A thread looks about once a second and notes every moment in which the two disagree; the logs of all pods are kept,
also of those that are gone when a test fails.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.node import KubectlError, Node, Object

_LOOK_SECONDS = 1.0
_BLIND_LOOKS = 2
REACTION_SECONDS = 15.0
"""How long the operator may take to see and to say that something changed, on a machine with other work on it."""


def conditions(run: Object) -> dict[str, Object]:
    """By type."""
    return {item["type"]: item for item in run.get("status", {}).get("conditions", [])}


def kstatus(run: Object) -> str:
    """What Flux, Argo CD's health of conditions, and ``kubectl wait`` make of an object (cli-utils' kstatus)."""
    found = conditions(run)
    status = {name: item["status"] for name, item in found.items()}
    if run.get("status", {}).get("observedGeneration") != run["metadata"]["generation"]:
        return "InProgress"
    if status.get("Stalled") == "True":
        return "Failed"
    if status.get("Reconciling") == "True" or status.get("Ready") in {"False", "Unknown"}:
        return "InProgress"
    return "Current"


@dataclass
class Witness:
    """One run."""

    node: Node
    namespace: str
    run: str
    folder: Path
    """Where pods' logs go."""
    contradictions: list[str] = field(default_factory=list)
    timeline: list[str] = field(default_factory=list)
    """Step after step, with the seconds since the start."""
    pods: dict[str, set[str]] = field(default_factory=dict)
    """Deployment of a policy -> uids of its pods that were ready."""

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._followed: set[str] = set()
        self._children: list[subprocess.Popen[bytes]] = []
        self._differs_since: float | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stop.set()
        self._thread.join(30)
        for child in self._children:
            child.kill()
            child.wait()

    def _watch(self) -> None:
        blind = 0
        while not self._stop.wait(_LOOK_SECONDS):
            try:
                self._look()
                blind = 0
            except (KubectlError, subprocess.TimeoutExpired) as exc:
                blind += 1  # a busy machine refuses a look; a witness that sees nothing is none
                if blind > _BLIND_LOOKS:
                    self.contradictions.append(f"{self._now()}: cannot look, {exc}")

    def _look(self) -> None:
        text = self.node.kubectl("get", "prodrlruns,pods,deployments", "-n", self.namespace, "-o", "json")
        items = json.loads(text)["items"]
        pods = [item for item in items if item["kind"] == "Pod"]
        for pod in pods:
            self._note_pod(pod)
        run = next(
            (item for item in items if item["kind"] == "ProdRLRun" and item["metadata"]["name"] == self.run), None
        )
        if run is not None:
            self._note_step(run)
            self._judge(run, {item["metadata"]["name"]: item for item in items if item["kind"] == "Deployment"})

    def _judge(self, run: Object, deployments: dict[str, Object]) -> None:
        """Ready is to say that users are served; for longer than a reaction takes the two must not differ."""
        is_ready = conditions(run).get("Ready", {}).get("status") == "True"
        if kstatus(run) == "Current" and not is_ready:
            self.contradictions.append(f"{self._now()}: kstatus is Current without Ready")
        stable = run.get("status", {}).get("stable")
        wanted = [f"{self.run}-r{stable['round']:04d}-serve" if stable else "", f"{self.run}-gateway"]
        replicas = {name: int(deployments.get(name, {}).get("status", {}).get("readyReplicas") or 0) for name in wanted}
        if is_ready == all(replicas.values()):
            self._differs_since = None
            return
        self._differs_since = self._differs_since or time.monotonic()
        if time.monotonic() - self._differs_since > REACTION_SECONDS:
            self.contradictions.append(f"{self._now()}: Ready is {is_ready}, but ready replicas are {replicas}")

    def _note_step(self, run: Object) -> None:
        current: dict[str, Any] = run.get("status", {}).get("currentRound") or {}
        line = f"{current.get('number')} {current.get('step')} {kstatus(run)}"
        if not self.timeline or not self.timeline[-1].endswith(line):
            self.timeline.append(f"{self._now()} {line}")

    def _note_pod(self, pod: Object) -> None:
        name, status = pod["metadata"]["name"], pod.get("status", {})
        started = [c for c in status.get("containerStatuses", []) if "waiting" not in c["state"]]
        if started and name not in self._followed:
            self._followed.add(name)
            command = [self.node.settings.program("kubectl"), "logs", "-f", name, "-n", self.namespace]
            with (self.folder / f"{name}.log").open("wb") as log:
                self._children.append(
                    subprocess.Popen([*command, "--all-containers", "--timestamps"], stdout=log, stderr=log)
                )
        is_ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))
        deployment = name.rsplit("-", 2)[0]
        if is_ready and deployment.endswith("-serve"):
            self.pods.setdefault(deployment, set()).add(pod["metadata"]["uid"])

    def _now(self) -> str:
        return f"{time.monotonic() - self._began:6.0f} s"
