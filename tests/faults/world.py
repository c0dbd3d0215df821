"""A world whose nodes can go wrong in every way, and whose operator can be away."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from prodrl_operator.cluster import port
from prodrl_operator.cluster.local.store import now_utc, timestamp
from prodrl_operator.cluster.port import Object
from prodrl_operator.errors import ConflictError, InvalidError, NotFoundError, OperatorError
from prodrl_operator.names import Step
from prodrl_operator.observing import parse_round
from tests.support.api_world import SPEC, ApiWorld
from tests.support.apiserver import ApiServer
from tests.support.fake_kubelet import Outcome
from tests.support.fake_node import REPLICA_SET, FakeNode, ended, running
from tests.support.operator_harness import NAME, Script, all_well

LIMIT_SECONDS = 150.0
IDLE_SECONDS = 0.25
"""Between two steps: the cluster's controllers and the other worlds want the processors, too."""
PodScript = Callable[[Object, Object], Object | None]
"""(pod, its Job or Deployment) -> a status of the test's own making; None: as usual."""


class FaultWorld(ApiWorld):
    """One namespace; the operator's errors are what its loop would make of them: another try."""

    def __init__(
        self,
        server: ApiServer,
        spec: Object | None = None,
        script: Script = all_well,
        *,
        name: str = NAME,
        metadata: Object | None = None,
    ) -> None:
        self.name = name
        super().__init__(server, spec, script, metadata={"name": name, **(metadata or {})})
        self.spec: Object = {**SPEC, **(spec or {})}
        self.pods: PodScript = lambda pod, parent: None
        self.is_stopping: Callable[[Object], bool] = lambda pod: True
        """Whether a pod that was told to stop does so."""
        self.is_operated = True
        self.pace = 2.0
        """Seconds that a step moves the clock on."""
        self.errors: list[str] = []
        self.node = _Node(self)

    def turn(self, *, passes: int = 60) -> None:
        """As the loop: a pass that fails is tried again later."""
        if not self.is_operated:
            return
        try:
            self.cached.renew()
            for _ in range(passes):
                if self._pass() != 0.0:
                    return
        except OperatorError as exc:
            self.errors.append(str(exc))

    def _pass(self) -> float | None:
        try:
            return self.controller.reconcile(self.namespace, self.name)
        except ConflictError:
            return 0.0

    def until(self, is_so: Callable[[Any], object], *, limit_seconds: float = LIMIT_SECONDS) -> None:
        """Go on until something is so."""
        deadline = time.monotonic() + limit_seconds
        while not is_so(self):
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.namespace} never came to it: {self._state()}")
            self.step(self.pace)
            time.sleep(IDLE_SECONDS)

    def steps(self, count: int, seconds: float | None = None) -> None:
        """Go on for a while."""
        for _ in range(count):
            self.step(self.pace if seconds is None else seconds)

    def jump(self, **length: float) -> None:
        """The clock jumps: ``days=1``."""
        self.skipped += timedelta(**length)

    def _state(self) -> str:
        found = self.admin.get(port.RUN, self.namespace, self.name)
        return json.dumps(found.get("status") if found else "the run is gone")[:2000] + "; ".join(self.errors[-3:])

    def close(self) -> None:
        """Let the namespace go, if it is still there."""
        raw = self.admin.get(port.RUN, self.namespace, self.name)
        if raw is not None and raw["metadata"].get("finalizers"):  # no operator is left to let go of it
            with contextlib.suppress(ConflictError, NotFoundError, InvalidError):
                self.admin.set_finalizers(raw, [])
        self.server.kubectl("delete", "namespace", self.namespace, "--wait=false", "--ignore-not-found")

    # Looking.

    @property
    def raw(self) -> Object:
        return self.get(port.RUN, self.name)

    def round(self, number: int) -> Any:
        raw = self.admin.get(port.ROUND, self.namespace, f"{self.name}-r{number:04d}")
        return parse_round(raw) if raw is not None else None

    def edit(self, **spec: Any) -> Object:
        return self.admin.merge_patch(port.RUN, self.namespace, self.name, {"spec": spec}, field_manager="user")

    def is_there(self, kind: port.Kind, name: str) -> bool:
        return self.admin.get(kind, self.namespace, name) is not None

    def get(self, kind: port.Kind, name: str) -> Object:
        found = self.admin.get(kind, self.namespace, name)
        assert found is not None, f"{kind.kind} {name} is not there"
        return found

    def is_run_gone(self) -> bool:
        return not self.is_there(port.RUN, self.name)

    def is_rid_of(self, deployment: str) -> bool:
        """Whether the garbage collector took all that a Deployment had."""
        return not [name for name in self.uids(port.DEPLOYMENT, REPLICA_SET, port.POD) if f"/{deployment}" in name]

    def stalled(self) -> str | None:
        """Reason of the stall."""
        found = [c for c in self.run.status.conditions if c.type == "Stalled" and c.status == "True"]
        return found[0].reason if found else None

    def message(self, kind: str) -> str:
        return next(c.message for c in self.run.status.conditions if c.type == kind)

    def stable(self) -> int | None:
        status = self.run.status
        return status.stable.round if status.stable else None

    def weights(self) -> dict[int, int]:
        return {r.round: r.weight for r in self.gateway.routes.routes} if self.gateway.routes else {}

    def events(self) -> list[str]:
        return [item["reason"] for item in self.admin.list(port.EVENT, self.namespace)]

    def jobs(self, step: Step) -> list[str]:
        """UIDs of all Jobs of a step whose pods ever ran."""
        return [uid for key, uids in self.jobs_seen.items() if key[1] == step for uid in uids]

    def uids(self, *kinds: port.Kind) -> Mapping[str, str]:
        """Name -> UID."""
        found = [o for kind in kinds for o in self.admin.list(kind, self.namespace)]
        return {f"{o['kind']}/{o['metadata']['name']}": o["metadata"]["uid"] for o in found}

    # The rest of the world.

    def kubectl(self, *arguments: str, text: str | None = None, check: bool = True) -> str:
        return self.server.kubectl("-n", self.namespace, *arguments, text=text, check=check).stdout

    def kubectl_started(self, *arguments: str) -> subprocess.Popen[str]:
        """A kubectl that goes on meanwhile."""
        command = [str(self.server.programs / "kubectl"), "--kubeconfig", str(self.server.kubeconfig_of("admin"))]
        command += ["-n", self.namespace, *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def apply(self, manifest: Object) -> None:
        """As somebody else."""
        self.kubectl("apply", "--server-side", "--field-manager=somebody", "-f", "-", text=json.dumps(manifest))

    def evict(self, pod: str) -> None:
        """As ``kubectl drain`` does."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        self.kubectl("create", "--raw", path, "-f", "-", text=json.dumps(eviction))


class _Node(FakeNode):
    """As its parent, with the test's own statuses first; a pod that was told to stop does so."""

    def __init__(self, world: FaultWorld) -> None:
        super().__init__(world.admin, world.namespace, world._job, world._deployment)
        self.world = world

    def _play(self, pod: Object, parents: dict[str, Object]) -> bool:
        if pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
            return False
        owners = pod["metadata"].get("ownerReferences", [])
        parent = parents.get(owners[0]["uid"]) if owners else None
        status = self.world.pods(pod, parent) if parent is not None else None
        if "deletionTimestamp" in pod["metadata"]:
            if not self.world.is_stopping(pod):
                return False
            status = ended(pod, Outcome(exit_code=143))
        if status is None:
            return super()._play(pod, parents)
        merged = {**pod["status"], **status}
        if merged == pod["status"]:
            return False
        try:
            self._cluster.update_status({**pod, "status": merged})
        except (ConflictError, NotFoundError):
            return False
        return True


# Statuses.


def is_of(item: Object, name: str) -> bool:
    """Whether a Job or Deployment has this name."""
    return str(item["metadata"]["name"]) == name


def waiting(pod: Object, reason: str) -> Object:
    """Its containers wait."""
    return running(pod, reason)


def unschedulable(pod: Object) -> Object:
    """No node has room for it."""
    condition = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu.",
        "lastTransitionTime": pod["metadata"]["creationTimestamp"],
    }
    return {"phase": "Pending", "conditions": [condition]}


def crashing(pod: Object, restarts: int, reason: str = "OOMKilled", exit_code: int = 137) -> Object:
    """It was restarted so often."""
    status = running(pod, "CrashLoopBackOff")
    now = pod["metadata"]["creationTimestamp"]
    last = {"terminated": {"exitCode": exit_code, "reason": reason, "startedAt": now, "finishedAt": now}}
    for container in status["containerStatuses"]:
        container |= {"restartCount": restarts, "lastState": last}
    return status


def disrupted(pod: Object, reason: str, exit_code: int = 137) -> Object:
    """Taken away by the cluster (scheduler, kubelet, taint manager): Kubernetes says so in a condition."""
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": reason,
        "message": f"scripted: {reason}",
        "lastTransitionTime": timestamp(now_utc()),
    }
    return {**ended(pod, Outcome(exit_code=exit_code, reason="Error")), "conditions": [condition]}
