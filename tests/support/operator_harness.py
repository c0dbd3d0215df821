"""A whole cluster in memory, with a clock that tests move: store, kubelet, gateway and the controller under test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from prodrl.config.serving import RouteTable
from prodrl_operator import names
from prodrl_operator.api.crd import crds
from prodrl_operator.api.round import Round
from prodrl_operator.api.run import Run
from prodrl_operator.builders import Platform
from prodrl_operator.cluster import port
from prodrl_operator.cluster.local.store import ObjectStore
from prodrl_operator.controller import Controller
from prodrl_operator.errors import ConflictError
from prodrl_operator.names import Step
from prodrl_operator.observing import parse_round
from tests.support.fake_kubelet import FakeKubelet, Outcome

CRDS = list(crds().values())
START = datetime(2026, 1, 1, tzinfo=UTC)
NAME = "chess"
Script = Callable[[int, Step, int], Outcome | None]
"""(round, step, attempt) -> how the Job ends; None: it runs."""


def digest(number: int, kind: str = "f") -> str:
    """A digest that tells its round."""
    return f"sha256:{kind * 60}{number:04x}"


def result(number: int, step: Step, **changes: Any) -> dict[str, Any]:
    """What a step reports when all goes well."""
    folder = f"rounds/{number:04d}"
    results: dict[Step, dict[str, Any]] = {
        Step.COLLECTING: {
            "dataset_key": f"{folder}/dataset",
            "dataset_digest": digest(number, "d"),
            "trajectories": 4,
            "tokens": 100,
            "reward_mean": 0.5,
        },
        Step.TRAINING: {
            "checkpoint_key": f"{folder}/checkpoint",
            "weights_key": f"{folder}/weights",
            "weights_digest": digest(number, "c"),
            "steps": 2,
        },
        Step.EXPORTING: {
            "policy_key": f"{folder}/policy",
            "policy_digest": digest(number),
            "size_bytes": 10,
            "quantization": "None",
            "weights_key": f"{folder}/weights",
        },
        Step.GATING: {
            "agreement": {
                "samples": 16,
                "tokens": 100,
                "mean_abs": 0.01,
                "p99_abs": 0.1,
                "stable_mean_abs": 0.01 if number else None,
            }
        },
    }
    return {**results[step], **changes}


def all_well(number: int, step: Step, attempt: int) -> Outcome:
    """Every step succeeds at once."""
    return Outcome(result(number, step))


def blocking(*bad: int) -> Script:
    """The gate fails for these rounds."""

    def script(number: int, step: Step, attempt: int) -> Outcome:
        if step is Step.GATING and number in bad:
            figures = result(number, step)["agreement"] | {"mean_abs": 9.0}
            return Outcome(result(number, step, agreement=figures))
        return all_well(number, step, attempt)

    return script


@dataclass
class FakeGateway:
    """All replicas behind one address."""

    routes: RouteTable | None = None
    stats: dict[str, dict[str, Any]] = field(default_factory=dict)
    conversations: dict[str, int] = field(default_factory=dict)
    is_up: bool = True
    pushes: list[RouteTable] = field(default_factory=list)
    failures: dict[str, float] = field(default_factory=dict)
    """Share of failing requests by digest."""

    def status(self, url: str) -> dict[str, Any] | None:
        if not self.is_up:
            return None
        version = self.routes.version if self.routes else None
        return {"version": version, "stats": self.stats, "conversations": self.conversations}

    def push(self, url: str, table: RouteTable) -> bool:
        self.pushes.append(table)
        self.routes = table
        return True

    def users(self, conversations: int) -> None:
        """New conversations, shared by weight; each is one request and one reward."""
        for route in self.routes.routes if self.routes else ():
            share = conversations * route.weight // 100
            counters = self.stats.setdefault(route.digest, {})
            failed = round(share * self.failures.get(route.digest, 0.0))
            for name in ("requests", "trajectories", "feedback"):
                counters[name] = counters.get(name, 0) + share
            counters["failed"] = counters.get("failed", 0) + failed
            counters["reward_sum"] = counters.get("reward_sum", 0.0) + share * 0.5
            counters["reward_squares"] = counters.get("reward_squares", 0.0) + share * 0.5


class World:
    """Everything around the controller, and the controller."""

    def __init__(self, spec: dict[str, Any] | None = None, script: Script = all_well) -> None:
        self.now = START
        self.script = script
        self.deployments: Callable[[dict[str, Any]], bool | str] = lambda _: True
        self.store = ObjectStore(crds=CRDS, now=lambda: self.now)
        self.kubelet = FakeKubelet(self.store, self._job, self._deployment, now=lambda: self.now)
        self.gateway = FakeGateway()
        self.users_per_step = 0
        self.jobs_seen: dict[tuple[str, str, str], set[str]] = {}
        self.restart()
        base = {
            "model": {"uri": "file:///models/base", "servedName": NAME},
            "storage": {"uri": "file:///store"},
            "rounds": {"max": 2, "steps": 2, "batchSize": 2},
        }
        gateway = (spec or {}).get("gateway", {})
        self.store.create(
            {
                "apiVersion": names.API_VERSION,
                "kind": "ProdRLRun",
                "metadata": {"name": NAME, "namespace": "default"},
                "spec": {**base, **(spec or {}), "gateway": {"authentication": "Anonymous", **gateway}},
            }
        )

    def restart(self) -> None:
        """A new controller that knows nothing."""
        self.controller = Controller(
            self.store, Platform(), clock=lambda: self.now, gateway_admin=self.gateway, namespace="default"
        )

    def _deployment(self, item: dict[str, Any]) -> bool | str:
        return self.deployments(item)

    def _job(self, job: dict[str, Any]) -> Outcome | None:
        labels = job["metadata"]["labels"]
        number, step, attempt = (labels[x] for x in (names.LABEL_ROUND, names.LABEL_STEP, names.LABEL_ATTEMPT))
        self.jobs_seen.setdefault((number, step, attempt), set()).add(job["metadata"]["uid"])
        return self.script(int(number), Step(step), int(attempt))

    # Turning.

    def turn(self, *, passes: int = 60) -> None:
        """Reconcile until nothing is due at once."""
        for _ in range(passes):
            try:
                delay = self.controller.reconcile("default", NAME)
            except ConflictError:
                delay = 0.0
            if delay != 0.0:
                return
        raise AssertionError(f"still busy after {passes} passes: {self.run.status}")

    def step(self, seconds: float = 5.0) -> None:
        """Reconcile, then let the cluster, the users and the clock go on."""
        self.turn()
        self.kubelet.tick()
        self.gateway.users(self.users_per_step)
        self.now += timedelta(seconds=seconds)

    def steps(self, count: int, seconds: float = 5.0) -> None:
        """Many of them."""
        for _ in range(count):
            self.step(seconds)

    def until(self, is_so: Callable[[World], bool], *, limit: int = 200, seconds: float = 5.0) -> None:
        """Go on until something is so."""
        for _ in range(limit):
            if is_so(self):
                return
            self.step(seconds)
        raise AssertionError(f"never came to be: {self.run.status.model_dump()}")

    # Looking.

    @property
    def run(self) -> Run:
        """The run as stored."""
        raw = self.store.get(port.RUN, "default", NAME)
        assert raw is not None
        return Run.model_validate({"metadata": raw["metadata"], "spec": raw["spec"], "status": raw.get("status") or {}})

    def round(self, number: int) -> Round:
        """A round as stored."""
        raw = self.store.get(port.ROUND, "default", f"{NAME}-r{number:04d}")
        assert raw is not None, f"there is no round {number}"
        return parse_round(raw)

    def has_round(self, number: int) -> bool:
        """Whether the round exists."""
        return self.store.get(port.ROUND, "default", f"{NAME}-r{number:04d}") is not None

    def at(self, number: int, step: Step) -> bool:
        """Whether a round stands at a step."""
        return self.has_round(number) and self.round(number).status.step == step

    def condition(self, kind: str) -> tuple[str, str]:
        """Status and reason of one of the run's conditions."""
        found = next(item for item in self.run.status.conditions if item.type == kind)
        return found.status, found.reason

    def is_true(self, kind: str) -> bool:
        """Whether a condition is true."""
        return any(item.type == kind and item.status == "True" for item in self.run.status.conditions)

    def names_of(self, kind: port.Kind) -> list[str]:
        """Names of all objects of a kind."""
        return [item["metadata"]["name"] for item in self.store.list(kind, "default")]

    def edit(self, **spec: Any) -> None:
        """Change the run's spec, as a user would."""

        def change(obj: dict[str, Any]) -> None:
            for name, value in spec.items():
                present = obj["spec"].get(name)
                obj["spec"][name] = {**present, **value} if isinstance(present, dict) else value

        self.store.edit(port.RUN, "default", NAME, change)

    def weights(self) -> dict[int, int]:
        """Round -> share of new conversations, as the gateway has it."""
        return {route.round: route.weight for route in self.gateway.routes.routes} if self.gateway.routes else {}

    def reasons_of_events(self) -> list[str]:
        """Reasons of all events."""
        return [item["reason"] for item in self.store.list(port.EVENT, "default")]
