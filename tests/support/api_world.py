"""A run on a real API server: real controllers, pods played by a script, the gateway faked, a clock that can jump.

The counterpart of ``operator_harness.World``; one namespace each, so that many can be played at the same time.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from prodrl_operator import names
from prodrl_operator.api.run import Run
from prodrl_operator.builders import Platform
from prodrl_operator.cluster import port
from prodrl_operator.cluster.caching import CachedCluster
from prodrl_operator.cluster.kubernetes import KubernetesCluster
from prodrl_operator.cluster.port import Object
from prodrl_operator.controller import Controller
from prodrl_operator.errors import ConflictError, InvalidError, NotFoundError
from prodrl_operator.names import Step
from prodrl_operator.observing import parse_round
from tests.support.apiserver import ApiServer
from tests.support.fake_kubelet import Outcome
from tests.support.fake_node import FakeNode
from tests.support.operator_harness import NAME, FakeGateway, Script, all_well

_numbers = itertools.count(1)

SPEC: Object = {
    "model": {"uri": "s3://models/base", "servedName": NAME},
    "storage": {"uri": "s3://store/chess"},
    "rounds": {"max": 1, "steps": 2, "batchSize": 2},
    "serving": {"drainSeconds": 0},
    "gateway": {"authentication": "Anonymous"},
}


class ApiWorld:
    """One namespace with one run, and everything around the controller."""

    def __init__(
        self,
        server: ApiServer,
        spec: Object | None = None,
        script: Script = all_well,
        *,
        cluster: KubernetesCluster | None = None,
        metadata: Object | None = None,
    ) -> None:
        self.server, self.script = server, script
        self.admin = server.connect()
        self.namespace = f"world-{next(_numbers)}-{int(time.time()) % 100000}"
        server.kubectl("create", "namespace", self.namespace)
        self.deployments: Callable[[Object], bool | str] = lambda _: True
        self.node = FakeNode(self.admin, self.namespace, self._job, self._deployment)
        self.gateway = FakeGateway()
        self.users_per_step = 200
        self.jobs_seen: dict[tuple[str, str, str], set[str]] = {}
        self.skipped = timedelta()
        self.cluster = cluster or self.admin
        """Through which the controller looks; a test may put something in between."""
        self.restart()
        self.admin.create(
            {
                "apiVersion": names.API_VERSION,
                "kind": "ProdRLRun",
                "metadata": {"name": NAME, "namespace": self.namespace, **(metadata or {})},
                "spec": {**SPEC, **(spec or {})},
            }
        )

    def clock(self) -> datetime:
        return datetime.now(UTC) + self.skipped

    def restart(self) -> None:
        """A new controller that knows nothing."""
        self.cached = CachedCluster(self.cluster, [self.namespace])
        self.controller = Controller(self.cached, Platform(), clock=self.clock, gateway_admin=self.gateway)

    def _job(self, job: Object) -> Outcome | None:
        labels = job["metadata"]["labels"]
        number, step, attempt = (labels[x] for x in (names.LABEL_ROUND, names.LABEL_STEP, names.LABEL_ATTEMPT))
        self.jobs_seen.setdefault((number, step, attempt), set()).add(job["metadata"]["uid"])
        return self.script(int(number), Step(step), int(attempt))

    def _deployment(self, deployment: Object) -> bool | str:
        return self.deployments(deployment)

    # Turning.

    def turn(self, *, passes: int = 60) -> None:
        """See what is new, and reconcile until nothing is due at once."""
        self.cached.renew()
        for _ in range(passes):
            try:
                delay = self.controller.reconcile(self.namespace, NAME)
            except ConflictError:
                delay = 0.0
            if delay != 0.0:
                return
        raise AssertionError(f"still busy after {passes} passes: {self.run.status}")

    def around(self, seconds: float = 2.0) -> None:
        """What the rest of the world does meanwhile."""
        self.node.tick()
        self.gateway.users(self.users_per_step)
        self.skipped += timedelta(seconds=seconds)

    def step(self, seconds: float = 2.0) -> None:
        """A turn, and the world goes on."""
        self.turn()
        self.around(seconds)

    def until(self, is_so: Callable[[ApiWorld], bool], *, limit_seconds: float = 120.0) -> None:
        """Go on until something is so."""
        play([self], is_so, limit_seconds=limit_seconds)

    # Looking.

    @property
    def raw(self) -> Object:
        found = self.admin.get(port.RUN, self.namespace, NAME)
        assert found is not None, "the run is gone"
        return found

    @property
    def run(self) -> Run:
        """The run as stored."""
        raw = self.raw
        return Run.model_validate({"metadata": raw["metadata"], "spec": raw["spec"], "status": raw.get("status") or {}})

    def round(self, number: int) -> Any:
        """A round as stored."""
        raw = self.admin.get(port.ROUND, self.namespace, f"{NAME}-r{number:04d}")
        return parse_round(raw) if raw is not None else None

    def at(self, number: int, step: Step) -> bool:
        """Whether a round stands at a step."""
        found = self.round(number)
        return found is not None and found.status.step == step

    def is_true(self, kind: str) -> bool:
        """Whether a condition is true."""
        return any(item.type == kind and item.status == "True" for item in self.run.status.conditions)

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason of one of the run's conditions."""
        found = next(item for item in self.run.status.conditions if item.type == kind)
        return found.status, found.reason

    def names_of(self, kind: port.Kind) -> list[str]:
        """Names of all objects of a kind."""
        return [item["metadata"]["name"] for item in self.admin.list(kind, self.namespace)]

    def is_finished(self) -> bool:
        """Completed, and what is not needed any more is gone."""
        return self.is_true("Completed") and len(self.names_of(port.DEPLOYMENT)) == 2

    def edit(self, **spec: Any) -> Object:
        """Change the run's spec, as a user would."""
        return self.admin.merge_patch(port.RUN, self.namespace, NAME, {"spec": spec}, field_manager="user")

    def end(self) -> Object:
        """What must not depend on when things happened."""
        status = self.run.status
        objects = [
            f"{kind.kind}/{name}"
            for kind in (port.DEPLOYMENT, port.SERVICE, port.CONFIG_MAP, port.JOB, port.ROUND)
            for name in self.names_of(kind)
        ]
        return {
            "stable": (status.stable.round, status.stable.digest) if status.stable else None,
            "previous": status.previous.round if status.previous else None,
            "lineage": status.lineage_round,
            "weight": status.canary_weight,
            "finished": status.rounds_finished,
            "history": [(e.number, e.outcome, e.verdict, e.digest, e.reason) for e in status.history],
            "conditions": sorted((c.type, c.status, c.reason) for c in status.conditions),
            "objects": sorted(objects),
            "routes": {r.round: r.weight for r in self.gateway.routes.routes} if self.gateway.routes else {},
        }

    def check_jobs(self) -> None:
        """I2: one Job object for each (round, step, attempt), one pod at a time, and no attempt spent on a crash."""
        assert set(self.node.most_at_once) == {"Collecting", "Training", "Exporting", "Gating"}
        assert set(self.node.most_at_once.values()) == {1}, self.node.most_at_once
        assert all(len(found) == 1 for found in self.jobs_seen.values()), self.jobs_seen
        assert {key[2] for key in self.jobs_seen} == {"0"}, self.jobs_seen

    def close(self) -> None:
        """Let the namespace go; nobody waits for it.

        Neither an operator nor a kubelet is left to let go of anything, and the namespace controller tries for ever.
        """
        raw = self.admin.get(port.RUN, self.namespace, NAME)
        if raw is not None and raw["metadata"].get("finalizers"):
            with contextlib.suppress(ConflictError, NotFoundError, InvalidError):
                self.admin.set_finalizers(raw, [])
        self.server.kubectl("delete", "namespace", self.namespace, "--wait=false")
        force = ("--all", "--force", "--grace-period=0", "--wait=false", "--namespace", self.namespace)
        self.server.kubectl("delete", "pods", *force, check=False)  # the namespace controller deletes them too


def play(worlds: Iterable[ApiWorld], is_so: Callable[[ApiWorld], bool], *, limit_seconds: float = 300.0) -> None:
    """Step all worlds in turn until each is so: while one waits for the cluster's controllers, others go on."""
    waiting = list(worlds)
    deadline = time.monotonic() + limit_seconds
    while waiting:
        for world in waiting:
            world.step()
        waiting = [world for world in waiting if not is_so(world)]
        if waiting and time.monotonic() > deadline:
            states = "\n".join(f"{w.namespace}: {w.run.status.model_dump(exclude_none=True)}" for w in waiting[:3])
            raise AssertionError(f"{len(waiting)} worlds never came to it in {limit_seconds:.0f} s:\n{states}")
        if len(waiting) < 5:
            time.sleep(0.2)
