"""What ``decide`` is given in table tests: a run whose round 0 is stable and whose round 1 stands somewhere."""

from __future__ import annotations

import dataclasses
import json
from datetime import UTC, datetime, timedelta
from typing import Any

from prodrl_operator import names
from prodrl_operator.api.judgement import Counters, Judgement
from prodrl_operator.api.round import Round
from prodrl_operator.api.run import Run
from prodrl_operator.names import Reason, Step, Verdict
from prodrl_operator.rounds import decide as machine
from prodrl_operator.rounds.decision import AddFinalizer, Decision, RemoveFinalizer
from prodrl_operator.rounds.observed import CanaryLook, DeploymentView, GatewayReplica, JobView, Observed
from prodrl_operator.rounds.times import stamp
from tests.support.manifests import exported, trained
from tests.support.operator_harness import digest, result

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
VERSION = "v1"
PASS = Judgement(Verdict.PASS, "within limits", Reason.GATE_PASSED)
FAIL = Judgement(Verdict.FAIL, "beyond limits", Reason.GATE_BLOCKED)
ERROR = Judgement(Verdict.ERROR, "not measured", Reason.INVALID_DATA)
INCONCLUSIVE = Judgement(Verdict.INCONCLUSIVE, "too little", Reason.NO_DATA)


def ago(seconds: float) -> str:
    """A stored time."""
    return stamp(NOW - timedelta(seconds=seconds))


def make_run(status: dict[str, Any] | None = None, generation: int = 1, **spec: Any) -> Run:
    """A run whose status was written for generation 1."""
    base: dict[str, Any] = {
        "model": {"uri": "file:///models/base", "servedName": "chess"},
        "storage": {"uri": "file:///store"},
    }
    metadata = {
        "name": "chess",
        "namespace": "default",
        "uid": "uid-run",
        "generation": generation,
    }
    return Run.model_validate(
        {"metadata": metadata, "spec": {**base, **spec}, "status": {"observedGeneration": 1, **(status or {})}}
    )


def make_round(number: int, run: Run, *, source: int = 0, lineage: int = 0, **status: Any) -> Round:
    """A round under the run's present spec."""
    spec: dict[str, Any] = {"run": "chess", "number": number, "settings": run.spec, "lineageRound": lineage}
    if number:
        spec["source"] = {"round": source, "digest": digest(source)}
    metadata = {"name": f"chess-r{number:04d}", "namespace": "default", "uid": f"uid-{number}", "generation": 1}
    return Round.model_validate({"metadata": metadata, "spec": spec, "status": status})


def stable_status(number: int = 0, **more: Any) -> dict[str, Any]:
    """A run's status with a stable policy."""
    entry = {"number": number, "outcome": "Promoted", "digest": digest(number), "verdict": "Pass"}
    base = {"stable": {"round": number, "digest": digest(number), "since": ago(10_000)}, "history": [entry]}
    return {**base, **more}


def servers(**changes: Any) -> DeploymentView:
    """Ready ones."""
    return dataclasses.replace(DeploymentView(uid="d", desired=1, ready=1), **changes)


def job(state: Any = "Running", **changes: Any) -> JobView:
    """One attempt."""
    return dataclasses.replace(JobView(name="job", uid="j", state=state), **changes)


def succeeded(number: int, step: Step, **changes: Any) -> JobView:
    """A Job that reported what its step reports."""
    return job("Succeeded", exit_code=0, message=json.dumps(result(number, step, **changes)))


def failed(code: int | None, reason: str = "", message: str = "it broke") -> JobView:
    """A Job that did not."""
    text = json.dumps({"reason": "Whatever", "message": message})
    return job("Failed", exit_code=code, message=text, reason=reason)


def look(trajectories: int = 0, interim: Judgement = PASS, final: Judgement = PASS, **changes: Any) -> CanaryLook:
    """The gateway's counters."""
    base = CanaryLook(Counters(), Counters(), trajectories=trajectories, interim=interim, final=final)
    return dataclasses.replace(base, **changes)


def status_at(number: int, step: Step, *, since: float = 10.0, **more: Any) -> dict[str, Any]:
    """The status of a round that came to ``step`` some seconds ago, with what the steps before left."""
    made: dict[str, Any] = {}
    order = list(Step)
    if order.index(step) > order.index(Step.EXPORTING):
        made = trained(number) if number else exported(number)
        made["policy"]["digest"] = digest(number)
    elif step is Step.EXPORTING and number:
        made = {name: value for name, value in trained(number).items() if name != "policy"}
    elif step is Step.TRAINING:
        made = {"dataset": trained(number)["dataset"], "lineageRound": 0}
    times = [{"step": step.value, "started": ago(since)}]
    return {"step": step.value, "since": ago(since), "times": times, **made, **more}


def scene(
    step: Step,
    *,
    number: int = 1,
    spec: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    jobs: dict[int, JobView] | None = None,
    generation: int = 1,
    since: float = 10.0,
    status: dict[str, Any] | None = None,
    **changes: Any,
) -> Observed:
    """Round ``number`` at ``step``; every round before is promoted and the last of them is stable.

    Args:
        step: Where the round stands.
        number: The round; 0 has no stable before it.
        spec: Parts of the run's spec, frozen into the rounds too.
        run: Parts of the run's status.
        jobs: Jobs of the present step, by attempt.
        generation: Of the run; the status was written for 1.
        since: Seconds since the step began.
        status: Parts of the round's status.
        changes: Fields of ``Observed``.
    """
    before = number - 1
    run_status = stable_status(before, **(run or {})) if number else dict(run or {})
    the_run = make_run(run_status, generation, **(spec or {}))
    rounds = {
        n: make_round(n, the_run, source=max(n - 1, 0), lineage=max(n - 1, 0), **status_at(n, Step.PROMOTED))
        for n in range(number)
    }
    own = status_at(number, step, since=since) | (status or {})
    rounds[number] = make_round(number, the_run, source=max(before, 0), lineage=max(before, 0), **own)
    base: dict[str, Any] = {
        "run": the_run,
        "rounds": rounds,
        "jobs": {(number, step, attempt): view for attempt, view in (jobs or {}).items()},
        "servings": {before: servers()} if number else {},
        "urls": {before: f"http://s{before}:8000"} if number else {},
        "gateway": servers(),
        "replicas": (GatewayReplica("http://g:8081", reachable=True, version=VERSION),),
        "routes_version": VERSION,
        "settled_versions": frozenset({VERSION}),
    }
    if step in (Step.CANARY_DEPLOYING, Step.GATING, Step.PROMOTING):
        base["servings"][number] = servers()
        base["urls"][number] = f"http://s{number}:8000"
        the_run.metadata["finalizers"] = [names.FINALIZER]
    return Observed(**(base | changes))


def decide(observed: Observed, seconds: float = 0.0) -> Decision:
    """One pass, some seconds after NOW."""
    return machine(observed, NOW + timedelta(seconds=seconds))


def step_after(observed: Observed, seconds: float = 0.0) -> str | None:
    """The step that the decision writes; None: it writes none."""
    decision = decide(observed, seconds)
    return decision.round_status.step if decision.round_status else None


def settled(observed: Observed, seconds: float = 0.0) -> tuple[Observed, Decision]:
    """Decide and store until nothing moves: the observation then, and its decision with intents."""
    for _ in range(20):
        decision = decide(observed, seconds)
        after = stored(observed, decision)
        if after == observed:
            return observed, decision
        observed = after
    raise AssertionError("statuses never settle")


def stored(observed: Observed, decision: Decision) -> Observed:
    """As if both statuses were written."""
    rounds = dict(observed.rounds)
    if decision.round_number is not None and decision.round_status is not None:
        rounds[decision.round_number] = rounds[decision.round_number].model_copy(
            update={"status": decision.round_status}
        )
    run = observed.run.model_copy(update={"status": decision.run_status})
    held = {AddFinalizer(): [names.FINALIZER], RemoveFinalizer(): []}
    for intent in decision.intents:
        if isinstance(intent, AddFinalizer | RemoveFinalizer) and "deletionTimestamp" not in run.metadata:
            run = run.model_copy(update={"metadata": {**run.metadata, "finalizers": held[intent]}})
    return dataclasses.replace(observed, run=run, rounds=rounds)


def condition(decision: Decision, kind: str) -> tuple[str, str, str]:
    """Status, reason and message of one of the run's conditions."""
    found = next(item for item in decision.run_status.conditions if item.type == kind)
    return found.status, found.reason, found.message
