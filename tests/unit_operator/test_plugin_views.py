"""What ``kubectl prodrl`` shows: a well run looks calm, a stuck one says what a person must do, and doing it helps."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import shlex
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import yaml
from rich.console import Console

from prodrl_operator.cluster import port
from prodrl_operator.errors import ClusterUnavailableError, ForbiddenError, NotFoundError
from prodrl_operator.names import Reason, Step
from prodrl_operator.plugin import ages, health, tree, watching
from prodrl_operator.plugin.access import Access
from prodrl_operator.plugin.looking import Look, look
from tests.support.fake_kubelet import Outcome
from tests.support.operator_harness import World, all_well, blocking, result
from tests.support.plugin import Kubectl

Start = Callable[..., Kubectl]
Object = dict[str, Any]


@pytest.fixture
def kubectl(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    def start(world: World, namespace: str = "default") -> Kubectl:
        return Kubectl(world, monkeypatch, capsys, namespace)

    return start


def training_forever(number: int, step: Step, attempt: int) -> Outcome | None:
    return None if number == 1 and step is Step.TRAINING else all_well(number, step, attempt)


def failing(number: int, step: Step, attempt: int) -> Outcome | None:
    if number == 1 and step is Step.TRAINING and attempt == 0:
        return Outcome({"reason": "Numerics", "message": "the loss is not finite"}, exit_code=79)
    return all_well(number, step, attempt)


def inconclusive(number: int, step: Step, attempt: int) -> Outcome | None:
    if step is Step.GATING and number == 1:
        return Outcome(result(1, step, agreement=result(1, step)["agreement"] | {"samples": 0}))
    return all_well(number, step, attempt)


@functools.cache
def blocked() -> World:
    """For tests that only look: round 1 was blocked, and the run waits for a person."""
    world = World(script=blocking(1))
    world.until(lambda w: w.is_true("Stalled"))
    return world


def look_at(kubectl: Kubectl) -> Look:
    return look(Access(kubectl.store, kubectl.pods, "default"), "default", "chess")


def test_a_well_run_is_calm_and_shows_where_it_stands(kubectl: Start) -> None:
    world = World(script=training_forever)
    world.until(lambda w: w.at(1, Step.TRAINING))
    world.steps(3, seconds=60)
    done = kubectl(world)("status", "chess", "--exit-code")
    assert done.code == 0, done.err
    assert "Healthy" in done.out
    assert "What to do" not in done.out
    assert "Round 1 of 2: Training for 3m" in done.out
    assert "Job chess-r0001-train-a0 Running" in done.out
    assert "pod chess-r0001-train-a0-" in done.out
    assert "trains on data of round 0" in done.out
    assert "Stable policy: round 0" in done.out
    assert "endpoint http://" in done.out
    assert "History: 1 Promoted" in done.out
    assert "\x1b[" not in done.out


def test_colour_is_for_terminals(kubectl: Start) -> None:
    world = blocked()
    seen = look_at(kubectl(world))
    drawn = {}
    for is_terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=is_terminal, width=200, _environ={"TERM": "xterm"})
        console.print(tree.draw(seen, health.judge(seen), world.now))
        drawn[is_terminal] = out.getvalue()
    assert "\x1b[1;31mStalled" in drawn[True], "a stall is bold red"
    assert "\x1b[" not in drawn[False]


def advised(done_out: str) -> list[list[str]]:
    """The commands that a status names, ready to be called."""
    lines = [line.split("kubectl prodrl ", 1)[1] for line in done_out.splitlines() if "kubectl prodrl " in line]
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("script", [blocking(1), failing, inconclusive])
def test_a_stalled_run_says_what_to_do_and_every_command_it_names_is_accepted(kubectl: Start, script: object) -> None:
    world = World(script=script)  # type: ignore[arg-type]
    world.until(lambda w: w.is_true("Stalled"))
    call = kubectl(world)
    done = call("status", "--exit-code")
    assert done.code == 1
    assert "What to do" in done.out
    commands = [words for words in advised(done.out) if words[0] != "logs"]
    assert ["retry", "chess", "-n", "default"] in commands
    for words in commands:
        dry = ["--dry-run"] if words[0] in ("retry", "approve", "abort") else []
        answer = call(*words, *dry)
        assert answer.code == 0, (words, answer.err)


def test_the_remedy_ends_the_stall(kubectl: Start) -> None:
    world = World(script=failing)
    world.until(lambda w: w.is_true("Stalled"))
    call = kubectl(world)
    seen = call("status").out
    assert "the loss is not finite" in seen
    assert "Training: attempt 0, 1 failures" in seen
    assert "Job chess-r0001-train-a0 Failed" in seen
    assert "pod chess-r0001-train-a0-" in seen
    assert call("retry", "chess").code == 0
    world.until(lambda w: w.at(1, Step.PROMOTED))
    assert call("status", "--exit-code").code == 0


def test_a_pod_that_cannot_pull_its_image_is_named_with_its_reason(kubectl: Start) -> None:
    world = World()
    world.deployments = lambda item: "ImagePullBackOff" if "r0000-serve" in item["metadata"]["name"] else True
    world.until(lambda w: w.at(0, Step.CANARY_DEPLOYING))
    world.steps(2)
    done = kubectl(world)("status")
    assert "Starting" in done.out
    assert "candidate's servers: 0 of 1 ready" in done.out
    assert "ImagePullBackOff: scripted: ImagePullBackOff" in done.out


def test_gate_figures_stand_beside_their_limits(kubectl: Start) -> None:
    world = World({"gate": {"approval": "Required"}})
    world.until(lambda w: w.at(1, Step.GATING) and w.round(1).status.reason == Reason.AWAITING_APPROVAL)
    done = kubectl(world)("status", "--exit-code")
    assert done.code == 0, "users are served; kstatus calls it Current"
    assert "WaitingForApproval" in done.out
    assert "agreement: mean 0.01 (limit 0.05, stable 0.01), p99 0.1" in done.out
    assert ["approve", "chess", "1", "-n", "default"] in advised(done.out)


def test_a_run_that_nobody_looked_at_is_not_well(kubectl: Start) -> None:
    done = kubectl(World())("status", "--exit-code")
    assert done.code == 1
    assert "is prodrl-operator running" in done.out


def test_an_edit_that_the_operator_has_not_seen_is_not_well_yet(kubectl: Start) -> None:
    world = World(script=training_forever)
    world.until(lambda w: w.at(1, Step.TRAINING))
    world.edit(rounds={"max": 9})
    call = kubectl(world)
    assert call("status", "--exit-code").code == 1
    assert "Updating" in call("status").out
    world.step()
    assert call("status", "--exit-code").code == 0


def test_every_reason_of_a_stall_has_an_advice(kubectl: Start) -> None:
    world = blocked()
    seen = look_at(kubectl(world))
    for reason in Reason:
        conditions = [
            item.model_copy(update={"reason": reason.value}) if item.type == "Stalled" else item
            for item in seen.status.conditions
        ]
        changed = dataclasses.replace(seen, status=seen.status.model_copy(update={"conditions": conditions}))
        assert health.judge(changed).advice, reason


def test_documents_for_machines_agree_with_the_objects(kubectl: Start) -> None:
    world = blocked()
    call = kubectl(world)
    found = json.loads(call("status", "-o", "json").out)
    assert found == yaml.safe_load(call("status", "-o", "yaml").out)
    assert (found["state"], found["healthy"]) == ("Stalled", False)
    assert found["conditions"] == call.raw["status"]["conditions"]
    assert found["currentRound"]["step"] == "Blocked"
    assert found["rounds"][1]["source"]["digest"] == call.raw["status"]["stable"]["digest"]


def test_rounds_lists_what_became_of_each(kubectl: Start) -> None:
    world = World(script=blocking(2))
    world.until(lambda w: w.is_true("Completed"))
    call = kubectl(world)
    head, *lines = call("rounds").out.splitlines()
    assert head.split() == ["ROUND", "PHASE", "DATA", "OF", "VERDICT", "REWARD", "DIGEST", "DURATION", "REASON"]
    assert [line.split()[:2] for line in lines] == [["0", "Promoted"], ["1", "Promoted"], ["2", "Blocked"]]
    blocked = lines[2]
    assert "1 sha256:" in blocked, "the data of round 2 came from round 1"
    assert " Fail " in blocked
    assert "GateBlocked" in blocked
    rows = json.loads(call("rounds", "-o", "json").out)
    assert [row["reward"] for row in rows] == [None, "0.5", "0.5"]
    assert all(row["durationSeconds"] >= 0 for row in rows)


def test_rounds_whose_objects_are_gone_are_told_from_the_history(kubectl: Start) -> None:
    world = World()
    world.until(lambda w: w.is_true("Completed"))
    world.store.delete(port.ROUND, "default", "chess-r0001")
    with world.store.as_system():
        world.store.collect_garbage()
    rows = json.loads(kubectl(world)("rounds", "-o", "json").out)
    assert [(row["number"], row["phase"]) for row in rows] == [(0, "Promoted"), (1, "Promoted"), (2, "Promoted")]
    assert rows[1]["source"] is None


def test_the_only_run_need_not_be_named_and_two_must(kubectl: Start) -> None:
    world = World()
    call = kubectl(world)
    assert call("status").code == 0
    other = {**call.raw, "metadata": {"name": "go", "namespace": "default"}}
    world.store.create({key: other[key] for key in ("apiVersion", "kind", "metadata", "spec")})
    done = call("rounds")
    assert done.code == 2
    assert "chess, go" in done.err
    assert call("status", "go").code == 0
    missing = call("status", "shogi")
    assert missing.code == 2
    assert "chess, go" in missing.err


def test_options_stand_before_or_after_the_command(kubectl: Start) -> None:
    call = kubectl(World(), namespace="elsewhere")
    assert "Namespace elsewhere" in call("status").err
    assert call("status", "-n", "default").code == 0
    assert call("-n", "default", "status").code == 0
    assert call("--context", "a", "status", "--kubeconfig", "k", "-n", "default").code == 0
    assert call.connected[-1] == ("k", "a")
    assert call("-n", "nowhere", "status", "--namespace", "default").code == 0


def test_who_may_not_list_pods_sees_the_rest(kubectl: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(script=training_forever)
    world.until(lambda w: w.at(1, Step.TRAINING))
    call = kubectl(world)
    allowed = call.store.list

    def restricted(kind: port.Kind, *arguments: object) -> port.Objects:
        if kind == port.POD:
            raise ForbiddenError("pods is forbidden")
        return allowed(kind, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(call.store, "list", restricted)
    done = call("status")
    assert done.code == 0
    assert "not shown, you may not list them: pods" in done.out
    assert "Job chess-r0001-train-a0" in done.out


def test_a_newer_operator_does_not_break_an_older_plugin(kubectl: Start) -> None:
    world = World(script=training_forever)
    world.until(lambda w: w.at(1, Step.TRAINING))

    def run(obj: Object) -> None:
        obj["spec"]["novelty"] = {"enabled": True}
        obj["status"]["currentRound"]["step"] = "Verifying"
        obj["status"]["novelty"] = 1

    def this(obj: Object) -> None:
        obj["spec"]["settings"]["novelty"] = {"enabled": True}
        obj["status"] |= {"step": "Verifying", "gate": {"verdict": "Maybe"}}

    world.store.edit(port.RUN, "default", "chess", run)
    world.store.edit(port.ROUND, "default", "chess-r0001", this)
    call = kubectl(world)
    done = call("status")
    assert done.code == 0
    assert "Round 1 of 2: Verifying" in done.out
    assert "gate Maybe" in done.out
    assert call("rounds").code == 0
    report = call("report")
    assert report.code == 2
    assert "use a plugin of the operator's version" in report.err


def test_what_a_process_said_cannot_command_the_terminal(kubectl: Start) -> None:
    def hostile(number: int, step: Step, attempt: int) -> Outcome:
        if number == 1 and step is Step.TRAINING:
            return Outcome({"reason": "Numerics", "message": "\x1b]0;owned\x07 \x9b31m"}, exit_code=79)
        return all_well(number, step, attempt)

    world = World(script=hostile)
    world.until(lambda w: w.is_true("Stalled"))
    call = kubectl(world)
    assert "]0;owned" in json.dumps(call.raw)
    for words in (("status",), ("rounds",), ("status", "-o", "yaml")):
        assert not set(call(*words).out) & {"\x1b", "\x07", "\x9b"}, words


def test_many_pods_show_those_that_need_a_look(kubectl: Start) -> None:
    world = World({"serving": {"replicas": 30}})
    world.until(lambda w: w.at(1, Step.COLLECTING))
    sick = sorted(name for name in world.names_of(port.POD) if "r0000-serve" in name)[-1]

    def change(pod: Object) -> None:
        pod["status"]["conditions"] = [
            {"type": "Ready", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        ]
        waiting = {"reason": "CrashLoopBackOff"}
        ended = {"exitCode": 137, "reason": "OOMKilled"}
        pod["status"]["containerStatuses"][0] |= {
            "restartCount": 4,
            "state": {"waiting": waiting},
            "lastState": {"terminated": ended},
        }

    world.store.edit(port.POD, "default", sick, change)
    seen = kubectl(world)("status").out
    assert f"pod {sick} CrashLoopBackOff, 4 restarts: last exit 137 OOMKilled" in seen
    assert "and 20 more pods" in seen


class Watched:
    """A run seen through an API server that sometimes does not answer."""

    def __init__(self, call: Kubectl, hiccups: set[int]) -> None:
        self.call, self.hiccups, self.looks = call, hiccups, 0

    def look(self) -> Look:
        self.looks += 1
        if self.looks in self.hiccups:
            raise ClusterUnavailableError("no answer")
        return look_at(self.call)

    def lines(self) -> list[str]:
        out = io.StringIO()
        console = Console(file=out, width=10_000, markup=False, highlight=False)
        world = self.call.world
        watching.Watch(self.look, world.step, lambda: world.now, console).turn()
        return out.getvalue().splitlines()


def test_watch_says_each_change_once_and_survives_an_api_server_that_is_away(kubectl: Start) -> None:
    world = World(script=blocking(1), spec={"onBlocked": "ContinueLineage"})
    watched = Watched(kubectl(world), hiccups={5, 6})
    lines = watched.lines()
    text = "\n".join(lines)
    assert lines[0].endswith("chess: Unseen, no round yet; no status yet: the operator has not looked at this run")
    assert text.count("the API server does not answer") == 1
    assert text.count("the API server answers again") == 1
    for news in ("round 1: Blocked GateBlocked", "round 1 gate: Fail", "stable: round 2", "Completed: True"):
        assert sum(news in line for line in lines) == 1, news
    assert all(line.startswith("2026-01-01T") for line in lines)


def test_watch_ends_when_the_run_is_deleted_and_refuses_one_that_never_was(kubectl: Start) -> None:
    world = World()
    call = kubectl(world)
    watched = Watched(call, set())

    def gone() -> Look:
        if watched.looks == 0:
            return watched.look()
        raise NotFoundError("gone")

    out = io.StringIO()
    watch = watching.Watch(gone, lambda: None, lambda: world.now, Console(file=out, width=10_000))
    watch.turn()
    assert "the run was deleted" in out.getvalue()
    assert call("watch", "shogi").code == 2


def test_watch_on_a_terminal_draws_the_tree(kubectl: Start) -> None:
    world = World()
    watched = Watched(kubectl(world), hiccups={3})
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=160, _environ={"TERM": "xterm"})
    watching.Watch(watched.look, world.step, lambda: world.now, console).turn()
    assert "the API server does not answer since 00:00" in out.getvalue()
    assert "2 rounds were made" in out.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (192, "3m12s"), (7500, "2h5m"), (172_799, "47h59m"), (356_400, "4d3h")],
)
def test_ages(seconds: int, text: str) -> None:
    assert ages.span(seconds) == text
    now = World().now
    assert ages.since((now - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z"), now) == text
