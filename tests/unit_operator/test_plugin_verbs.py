"""What ``kubectl prodrl`` writes: fields of spec that Git could hold, on what is so now, and nothing in vain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from prodrl_operator.cluster import port
from prodrl_operator.cluster.local import podspec
from prodrl_operator.errors import ForbiddenError
from prodrl_operator.names import Reason, Step
from tests.support.fake_kubelet import Outcome
from tests.support.operator_harness import World, all_well, blocking, result
from tests.support.plugin import Kubectl, merged

Start = Callable[[World], Kubectl]
APPROVAL: dict[str, Any] = {"gate": {"approval": "Required"}}


@pytest.fixture
def kubectl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    return lambda world: Kubectl(world, monkeypatch, capsys, "default")


def collecting_forever(number: int, step: Step, attempt: int) -> Outcome | None:
    return None if number == 1 and step is Step.COLLECTING else all_well(number, step, attempt)


def inconclusive(number: int, step: Step, attempt: int) -> Outcome:
    if step is Step.GATING and number == 1 and attempt == 0:
        return Outcome(result(1, step, agreement=result(1, step)["agreement"] | {"samples": 0}))
    return all_well(number, step, attempt)


def unqueue(world: World, part: str) -> None:
    world.store.edit(port.RUN, "default", "chess", lambda obj: obj["spec"][part].pop("queueName"))


def awaiting() -> World:
    world = World(APPROVAL)
    world.until(lambda w: w.at(1, Step.GATING) and w.round(1).status.reason == Reason.AWAITING_APPROVAL)
    return world


def collecting() -> World:
    world = World(script=collecting_forever)
    world.until(lambda w: w.at(1, Step.COLLECTING))
    return world


def fragment_of(text: str) -> Any:
    return yaml.safe_load(text.rsplit("# The same for Git:\n", maxsplit=1)[-1])


def test_approve_promotes_the_round_that_waits(kubectl: Start) -> None:
    world = awaiting()
    call = kubectl(world)
    before = call.raw
    done = call("approve", "chess")
    assert (done.code, done.err) == (0, "")
    assert fragment_of(done.out)["spec"] == {"requests": {"approveRound": 1}}
    assert call.store.managers == ["kubectl-prodrl"]
    after = call.raw
    # Nothing but the one field of spec: what Git could have written.
    assert after["spec"] == merged(before["spec"], {"requests": {"approveRound": 1}})
    assert after["status"] == before["status"]
    world.until(lambda w: w.at(1, Step.PROMOTED))


def test_approve_promotes_an_inconclusive_round_and_retry_measures_it_again(kubectl: Start) -> None:
    for verb, reason in (("approve", Reason.APPROVED), ("retry", Reason.GATE_PASSED)):
        world = World(script=inconclusive)
        world.until(lambda w: w.is_true("Stalled"))
        assert kubectl(world)(verb, "chess").code == 0
        world.until(lambda w: w.at(1, Step.PROMOTED))
        assert world.run.status.history[1].reason == reason


def test_approve_refuses_where_nothing_waits(kubectl: Start) -> None:
    call = kubectl(collecting())
    done = call("approve", "chess")
    assert done.code == 2
    assert "there is nothing to approve" in done.err
    assert "Collecting" in done.err
    assert call.store.managers == []


@pytest.mark.parametrize("verb", ["approve", "abort"])
def test_a_round_that_is_not_the_current_one_is_refused(kubectl: Start, verb: str) -> None:
    call = kubectl(awaiting())
    for number in ("0", "2"):
        done = call(verb, "chess", number)
        assert done.code == 2
        assert f"round {number} is not the current one, which is 1" in done.err
    assert call(verb, "chess", "1", "--dry-run").code == 0


def test_abort_ends_the_current_round_and_the_next_one_begins(kubectl: Start) -> None:
    world = collecting()
    call = kubectl(world)
    assert call("abort", "chess").code == 0
    world.until(lambda w: w.at(1, Step.ABORTED))
    world.until(lambda w: w.has_round(2))


def test_abort_is_written_once(kubectl: Start) -> None:
    call = kubectl(collecting())
    assert call("abort", "chess", "1").code == 0
    version = call.raw["metadata"]["resourceVersion"]
    again = call("abort", "chess", "1")
    assert again.code == 0
    assert "unchanged" in again.out
    assert call.raw["metadata"]["resourceVersion"] == version


def test_abort_refuses_round_0_and_what_is_over(kubectl: Start) -> None:
    world = World(script=lambda *_: None)
    call = kubectl(world)
    assert "has no round in work" in call("abort", "chess").err
    world.until(lambda w: w.at(0, Step.EXPORTING))
    done = call("abort", "chess")
    assert done.code == 2
    assert "cannot be aborted" in done.err
    over = World(script=blocking(1))
    over.until(lambda w: w.is_true("Stalled"))
    done = kubectl(over)("abort", "chess")
    assert done.code == 2
    assert "is Blocked; there is nothing to abort" in done.err


def test_abort_says_so_where_the_operator_would_ignore_it(kubectl: Start) -> None:
    world = World(script=collecting_forever)
    world.edit(requests={"abortRound": 1})
    world.until(lambda w: w.at(1, Step.COLLECTING))
    world.steps(2)
    call = kubectl(world)
    if world.at(1, Step.ABORTED):
        pytest.fail("the operator aborts a round that was named before it began: the refusal is out of date")
    done = call("abort", "chess")
    assert done.code == 2
    assert "was handled before this round was current" in done.err
    # The remedy that the refusal names works.
    world.edit(requests={"abortRound": 999})
    world.steps(2)
    assert call("abort", "chess").code == 0
    world.until(lambda w: w.at(1, Step.ABORTED))


def test_retry_begins_the_next_round_after_a_block(kubectl: Start) -> None:
    world = World(script=blocking(1))
    world.until(lambda w: w.is_true("Stalled"))
    call = kubectl(world)
    done = call("retry", "chess")
    assert done.code == 0
    assert "the next round begins from the checkpoint of round" in done.out
    world.until(lambda w: w.at(2, Step.PROMOTED))


def test_retry_refuses_where_it_would_do_nothing(kubectl: Start) -> None:
    world = World(script=blocking(1))
    call = kubectl(world)
    assert "is not stalled" in call("retry", "chess").err
    world.until(lambda w: w.is_true("Stalled"))
    assert "1 to 64 characters" in call("retry", "chess", "--token", "x" * 65).err
    assert "1 to 64 characters" in call("retry", "chess", "--token", "").err
    assert call("retry", "chess", "--token", "again").code == 0
    world.script = blocking(2)
    world.edit(rounds={"max": 9})
    world.until(lambda w: w.is_true("Stalled") and w.at(2, Step.BLOCKED))
    used = call("retry", "chess", "--token", "again")
    assert used.code == 2
    assert "was used before" in used.err


def test_a_stall_that_goes_on_once_it_is_cured_is_not_retried(kubectl: Start) -> None:
    world = collecting()
    world.deployments = lambda item: "InvalidImageName" if "gateway" in item["metadata"]["name"] else True
    world.until(lambda w: w.is_true("Stalled"))
    call = kubectl(world)
    seen = call("status").out
    assert "the loop then goes on by itself" in seen
    assert "prodrl retry" not in seen
    refused = call("retry", "chess")
    assert refused.code == 2
    assert "a retry cannot cure ImagePullFailed: the gateway cannot run" in refused.err
    assert call.store.managers == []
    world.deployments = lambda item: True
    world.until(lambda w: not w.is_true("Stalled"))


@pytest.mark.parametrize("words", [("approve", "chess"), ("abort", "chess"), ("retry", "chess")])
def test_who_may_not_see_rounds_is_told_so_and_not_that_there_are_none(
    kubectl: Start, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    world = World(script=blocking(1))
    world.until(lambda w: w.is_true("Stalled"))
    call = kubectl(world)
    listed = call.store.list

    def refused(kind: port.Kind, *rest: Any) -> port.Objects:
        if kind == port.ROUND:
            raise ForbiddenError("prodrlrounds is forbidden")
        return listed(kind, *rest)

    monkeypatch.setattr(call.store, "list", refused)
    done = call(*words)
    assert done.code == 2
    assert "you may not list prodrlrounds" in done.err
    seen = call("status").out
    assert "ask for the verb list on prodrlrounds" in seen
    assert "goes on by itself" not in seen
    assert call.store.managers == []


def test_settings_that_the_api_server_refuses_are_cured_by_the_spec_not_by_a_retry(kubectl: Start) -> None:
    """A rule of the cluster's that came after the round had begun: the round keeps the settings that it began with."""
    world = World({"training": {"queueName": "gpus"}}, script=collecting_forever)
    world.until(lambda w: w.at(1, Step.COLLECTING))
    world.store._admit = podspec.check
    world.script = all_well
    world.until(lambda w: w.is_true("Stalled"))
    call = kubectl(world)
    refused = call("retry", "chess")
    assert refused.code == 2
    assert "a retry cannot cure its settings" in refused.err
    assert "queueName" in refused.err
    seen = call("status").out
    assert "correct the spec where it is kept" in seen
    assert "kubectl prodrl abort chess 1 -n default" in seen
    # What it says is what helps: each alone does not.
    unqueue(world, "training")
    world.steps(5)
    assert world.is_true("Stalled")
    assert call("abort", "chess", "1").code == 0
    world.until(lambda w: w.at(2, Step.PROMOTED))
    assert world.round(1).status.step == Step.ABORTED


def test_round_0_begins_again_with_corrected_settings(kubectl: Start) -> None:
    world = World({"export": {"queueName": "gpus"}}, script=lambda *_: None)
    world.until(lambda w: w.has_round(0))
    world.store._admit = podspec.check
    for name in world.names_of(port.JOB):
        world.store.delete(port.JOB, "default", name)
    world.script = all_well
    world.until(lambda w: w.is_true("Stalled"))
    assert "abort" not in kubectl(world)("status").out
    unqueue(world, "export")
    world.until(lambda w: w.at(0, Step.PROMOTED))
    assert not world.is_true("Stalled")


def test_two_retries_never_carry_the_same_token(kubectl: Start) -> None:
    world = World(script=blocking(1))
    world.until(lambda w: w.is_true("Stalled"))
    call = kubectl(world)
    first = fragment_of(call("retry", "chess", "--dry-run").out)
    world.steps(1, seconds=0.001)
    assert first != fragment_of(call("retry", "chess", "--dry-run").out)


def test_suspend_and_resume(kubectl: Start) -> None:
    world = collecting()
    call = kubectl(world)
    assert "patched: running Jobs are suspended" in call("suspend", "chess").out
    world.until(lambda w: w.is_true("Suspended"))
    assert "Suspended" in call("status", "--exit-code").out
    assert "unchanged" in call("suspend", "chess").out
    assert call("resume", "chess").code == 0
    world.until(lambda w: not w.is_true("Suspended"))
    assert "unchanged" in call("resume", "chess").out


@pytest.mark.parametrize(
    ("verb", "make", "spec"),
    [
        ("approve", awaiting, {"requests": {"approveRound": 1}}),
        ("abort", collecting, {"requests": {"abortRound": 1}}),
        ("suspend", collecting, {"suspend": True}),
    ],
)
def test_dry_run_prints_what_git_needs_and_writes_nothing(
    kubectl: Start, verb: str, make: Callable[[], World], spec: dict[str, Any]
) -> None:
    call = kubectl(make())
    before = call.raw
    done = call(verb, "chess", "--dry-run")
    assert (done.code, done.err) == (0, "")
    assert call.raw == before
    document = yaml.safe_load(done.out)
    assert document == {
        "apiVersion": "prodrl.dev/v1alpha1",
        "kind": "ProdRLRun",
        "metadata": {"name": "chess", "namespace": "default"},
        "spec": spec,
    }
    wet = call(verb, "chess")
    assert fragment_of(wet.out) == document


@pytest.mark.parametrize(
    ("place", "key", "value", "tool"),
    [
        ("annotations", "argocd.argoproj.io/tracking-id", "prod:prodrl.dev/ProdRLRun:default/chess", "Argo CD prod"),
        ("labels", "argocd.argoproj.io/instance", "prod", "Argo CD prod"),
        ("labels", "kustomize.toolkit.fluxcd.io/name", "apps", "Flux (Kustomization) apps"),
        ("labels", "helm.toolkit.fluxcd.io/name", "apps", "Flux (HelmRelease) apps"),
        ("annotations", "meta.helm.sh/release-name", "prod", "Helm prod"),
        ("labels", "app.kubernetes.io/managed-by", "Helm", "Helm"),
    ],
)
def test_who_keeps_the_object_is_named_as_it_may_take_the_change_back(
    kubectl: Start, place: str, key: str, value: str, tool: str
) -> None:
    world = collecting()

    def mark(obj: dict[str, Any]) -> None:
        obj["metadata"].setdefault(place, {})[key] = value

    world.store.edit(port.RUN, "default", "chess", mark)
    call = kubectl(world)
    done = call("suspend", "chess")
    assert done.code == 0
    assert f"{tool} keeps this object" in done.err
    dry = call("resume", "chess", "--dry-run")
    assert f"{tool} keeps this object" in dry.err
    assert "keeps" not in dry.out, "stdout is the YAML alone"


def test_a_conflict_is_decided_again_on_what_is_so_then(kubectl: Start) -> None:
    world = awaiting()
    call = kubectl(world)
    call.store.before_patch = [lambda: world.edit(rounds={"max": 9})] * 2
    assert call("approve", "chess").code == 0
    assert call.raw["spec"]["requests"]["approveRound"] == 1
    assert call.raw["spec"]["rounds"]["max"] == 9, "the other's edit stays"


def test_a_round_that_ended_meanwhile_is_not_approved(kubectl: Start) -> None:
    world = awaiting()
    call = kubectl(world)

    def end() -> None:
        world.edit(requests={"abortRound": 1})
        world.until(lambda w: w.at(1, Step.ABORTED))

    call.store.before_patch = [end]
    done = call("approve", "chess")
    assert done.code == 2
    assert call.store.managers == []


def test_an_object_that_never_stands_still_is_given_up(kubectl: Start) -> None:
    world = awaiting()
    call = kubectl(world)
    counter = iter(range(3, 1000))
    call.store.before_patch = [lambda: world.edit(rounds={"max": next(counter)})] * 50
    done = call("approve", "chess")
    assert done.code == 2
    assert "try again" in done.err
