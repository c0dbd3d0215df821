"""A candidate that does not come up, or must not go live: users stay with stable, and the run says why."""

from __future__ import annotations

from prodrl_operator.cluster import port
from prodrl_operator.cluster.port import Object
from prodrl_operator.names import Step
from prodrl_operator.rounds import times
from tests.faults.stage import Maker, together
from tests.faults.world import FaultWorld, crashing, is_of, unschedulable
from tests.support.fake_kubelet import Outcome
from tests.support.fake_node import REPLICA_SET
from tests.support.operator_harness import Script, all_well, digest, result

CANDIDATE = "chess-r0001-serve"
STABLE = "chess-r0000-serve"


def seconds_in(world: FaultWorld, number: int, step: Step) -> float:
    """How long a round stood at a step."""
    found = next(item for item in world.round(number).status.times if item.step == step)
    assert found.finished is not None
    return (times.parse(found.finished) - times.parse(found.started)).total_seconds()


def check_users_are_with_stable(it: FaultWorld) -> None:
    it.until(lambda w: not w.is_there(port.DEPLOYMENT, CANDIDATE))
    it.until(lambda w: w.weights() == {0: 100})
    assert it.stable() == 0
    assert it.is_true("Ready"), "users are served"
    assert it.get(port.DEPLOYMENT, STABLE)["status"]["readyReplicas"] == 1


@together
def test_a_canary_that_cannot_pull_its_image_stalls_fast_and_goes_away(make: Maker) -> None:
    """argo-rollouts#4128: progress deadline and abort never fired with ImagePullBackOff."""
    it = make()
    it.deployments = lambda d: "ImagePullBackOff" if is_of(d, CANDIDATE) else True
    it.until(lambda w: w.at(1, Step.CANARY_DEPLOYING))
    it.pace = 10.0
    it.until(FaultWorld.stalled)
    assert it.stalled() == "ImagePullFailed"
    assert "ImagePullBackOff" in it.message("Stalled")
    assert seconds_in(it, 1, Step.CANARY_DEPLOYING) < 180, "not the whole start deadline"
    check_users_are_with_stable(it)


@together
def test_a_canary_without_a_spare_gpu_says_insufficient_capacity(make: Maker) -> None:
    """LLMKube#192: the surge waited for GPUs that stable held, for ever."""
    it = make({"serving": {"drainSeconds": 0, "startDeadlineSeconds": 600}})
    it.pods = lambda pod, parent: unschedulable(pod) if is_of(parent, CANDIDATE) else None
    it.until(lambda w: w.at(1, Step.CANARY_DEPLOYING))
    it.pace = 60.0
    it.until(FaultWorld.stalled)
    assert it.stalled() == "InsufficientCapacity"
    assert "nvidia.com/gpu" in it.message("Stalled")
    assert "surge: Replace" in it.message("Stalled"), "the remedy"
    check_users_are_with_stable(it)


@together
def test_replace_frees_the_only_gpu_before_the_canary_asks_for_it(make: Maker) -> None:
    """LLMKube#192: one GPU, two policies; they are never there at the same time, and the round ends well."""
    it = make({"serving": {"drainSeconds": 0, "surge": "Replace"}})
    holders: list[set[str]] = []

    def scheduler(pod: Object, parent: Object) -> Object | None:
        """One GPU: who else is there waits."""
        others = [p for p in it.admin.list(port.POD, it.namespace) if p["metadata"]["uid"] != pod["metadata"]["uid"]]
        served = {p["metadata"]["labels"].get("prodrl.dev/round") for p in others if "serve" in p["metadata"]["name"]}
        if not parent["metadata"]["name"].endswith("-serve"):
            return None
        holders.append(served)
        return unschedulable(pod) if served else None

    it.pods = scheduler
    it.until(lambda w: w.stable() == 1 and w.is_true("Completed"))
    assert [e.outcome for e in it.run.status.history] == ["Promoted", "Promoted"]
    assert all(not served for served in holders), "nobody had to wait for another's GPU"


@together
def test_a_canary_that_dies_of_memory_fails_fast_but_one_crash_is_forgiven(make: Maker) -> None:
    """llm-d-benchmark#285: a crash loop waited the whole time-out; the first crash may be the old pod's memory."""
    it = make()
    restarts = [1]
    it.pods = lambda pod, parent: crashing(pod, restarts[0]) if is_of(parent, CANDIDATE) else None
    it.until(lambda w: w.at(1, Step.CANARY_DEPLOYING))
    it.steps(5, 20.0)
    assert it.at(1, Step.CANARY_DEPLOYING), "tolerated once"
    restarts[0] = 3
    it.until(lambda w: w.at(1, Step.BLOCKED))
    assert it.round(1).status.reason == "OutOfMemory"
    assert seconds_in(it, 1, Step.CANARY_DEPLOYING) < 300, "not the whole start deadline"
    check_users_are_with_stable(it)


@together
def test_a_bad_stable_does_not_hold_up_a_good_candidate(make: Maker) -> None:
    """argo-rollouts#1774, lws#567: the rollout waited for the stable version to become healthy first."""
    it = make()
    it.until(lambda w: w.at(1, Step.TRAINING))
    it.pods = lambda pod, parent: crashing(pod, 9) if is_of(parent, STABLE) else None
    it.until(lambda w: w.stable() == 1)
    assert it.round(1).status.gate.verdict == "Pass"


def without_data(job_of: Script = all_well) -> Script:
    """The gate of round 1 measures nothing."""

    def script(number: int, step: Step, attempt: int) -> Outcome | None:
        if (number, step) == (1, Step.GATING):
            nothing = result(1, step)["agreement"] | {"samples": 0, "tokens": 0}
            return Outcome(result(1, step, agreement=nothing))
        return job_of(number, step, attempt)

    return script


@together
def test_an_inconclusive_gate_is_held_however_long_and_measured_once(make: Maker) -> None:
    """argo-rollouts#3850: promoted when the pause elapsed. argo-rollouts#926: analysis made anew at every resync."""
    it = make(None, without_data())
    it.until(FaultWorld.stalled)
    assert it.stalled() == "GateInconclusive"
    for _ in range(25):
        it.jump(days=40)
        it.step()
    assert it.at(1, Step.GATING)
    assert it.stable() == 0
    # Of round 0 and round 1, one each.
    assert len(it.jobs(Step.GATING)) == 2
    assert [name for name in it.names_of(port.JOB) if "gate" in name] == ["chess-r0000-gate-a0", "chess-r0001-gate-a0"]
    it.edit(requests={"approveRound": 1})
    it.until(lambda w: w.stable() == 1)


@together
def test_a_breach_while_a_person_is_awaited_blocks(make: Maker) -> None:
    """flagger#1801: the failure threshold was ignored while the rollout waited for its confirmation."""
    canary = {"steps": [{"weight": 50, "minTrajectories": 100}]}
    it = make({"gate": {"approval": "Required", "canary": canary}})
    it.until(lambda w: w.at(1, Step.GATING) and w.round(1).status.reason == "AwaitingApproval")
    it.steps(3)
    assert it.weights() == {0: 50, 1: 50}
    it.gateway.failures[digest(1)] = 1.0
    it.until(lambda w: w.at(1, Step.BLOCKED))
    check_users_are_with_stable(it)


@together
def test_an_abort_of_a_round_that_is_over_leaves_users_served(make: Maker) -> None:
    """argo-rollouts#1292: an abort with nothing in progress scaled stable to zero."""
    it = make()
    it.until(FaultWorld.is_finished)
    it.until(lambda w: w.is_rid_of(STABLE))
    before = it.uids(port.DEPLOYMENT, port.SERVICE, port.POD)
    for number in (1, 99):
        it.edit(requests={"abortRound": number})
        it.until(lambda w, n=number: w.run.status.handled_requests.abort_round == n)
        it.steps(2)
    assert it.uids(port.DEPLOYMENT, port.SERVICE, port.POD) == before
    assert it.stable() == 1
    assert it.is_true("Ready")
    assert it.events().count("RequestIgnored") == 2


@together
def test_a_spec_edited_at_every_step_takes_effect_with_the_next_round(make: Maker) -> None:
    """argo-rollouts#1690, kuberay#3209: an update in the middle deployed neither the old nor the new."""
    edits: list[str] = []

    def script(number: int, step: Step, attempt: int) -> Outcome | None:
        edits.append(f"test.local/serving:{number}-{step.lower()}")
        it.edit(serving={"image": edits[-1]})
        return all_well(number, step, attempt)

    it = make(
        {"rounds": {"max": 2, "steps": 2, "batchSize": 2}, "serving": {"image": "a:1", "drainSeconds": 0}}, script
    )
    seen: dict[int, set[str]] = {}
    templates: dict[str, Object] = {}

    def look(world: FaultWorld) -> bool:
        for deployment in world.admin.list(port.DEPLOYMENT, world.namespace):
            number = deployment["metadata"]["labels"].get("prodrl.dev/round")
            if number is not None:
                template = deployment["spec"]["template"]
                seen.setdefault(int(number), set()).add(template["spec"]["containers"][0]["image"])
                made = templates.setdefault(deployment["metadata"]["name"], template)
                assert template == made, "never changed after it was made"
        return world.is_finished()

    it.until(look)
    assert [e.outcome for e in it.run.status.history] == ["Promoted"] * 3
    frozen = {number: it.round(number).spec.settings.serving.image for number in seen}
    assert seen == {number: {image} for number, image in frozen.items()}
    assert frozen[0] == "a:1"
    assert frozen[1] == "test.local/serving:0-gating"
    assert frozen[2] == "test.local/serving:1-gating"
    it.until(lambda w: w.is_rid_of(CANDIDATE))
    before = it.uids(REPLICA_SET, port.POD)
    for image in ("b:1", edits[-1]):
        it.edit(serving={"image": image})
        it.steps(2)
    assert it.uids(REPLICA_SET, port.POD) == before
