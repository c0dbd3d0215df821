"""What Argo CD, Flux and kubectl see of a run while it turns, on a real API server with the real kubectl."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator

import pytest

from prodrl_operator import names
from prodrl_operator.cluster import port
from prodrl_operator.cluster.port import Object
from tests.support.api_world import SPEC, ApiWorld
from tests.support.apiserver import ApiServer
from tests.support.kstatus import kstatus
from tests.support.operator_harness import NAME, blocking

TRACKING = {
    "labels": {"app.kubernetes.io/instance": "games", "argocd.argoproj.io/instance": "games", "team": "games"},
    "annotations": {
        "argocd.argoproj.io/tracking-id": "games:ProdRLRun:chess",
        "meta.helm.sh/x": "y",
    },
}


class GitWorld(ApiWorld):
    """A run that somebody applies from a file."""

    def __init__(self, server: ApiServer, spec: Object | None = None, **options) -> None:
        super().__init__(server, spec, **options)
        self.admin.delete(port.RUN, self.namespace, NAME)
        self.text = json.dumps(
            {
                "apiVersion": names.API_VERSION,
                "kind": "ProdRLRun",
                "metadata": {"name": NAME, "namespace": self.namespace, **TRACKING},
                "spec": {**SPEC, **(spec or {})},
            }
        )

    def apply(self, *flags: str) -> None:
        self.server.kubectl("apply", *flags, "-f", "-", text=self.text)

    def diff(self, *flags: str) -> subprocess.CompletedProcess[str]:
        return self.server.kubectl("diff", *flags, "-f", "-", text=self.text, check=False)


@pytest.fixture
def make(api_server) -> Iterator[type[GitWorld]]:
    made: list[GitWorld] = []

    def new(*arguments, **options) -> GitWorld:
        made.append(GitWorld(api_server, *arguments, **options))
        return made[-1]

    yield new
    for world in made:
        world.close()


EVERY_LIST = {
    "gate": {
        "evaluations": [{"name": "puzzles", "suite": "prodrl.lab.suite:chess_puzzles", "metric": "solved"}],
        "canary": {"steps": [{"weight": 20, "minTrajectories": 10}]},
    },
    "serving": {
        **SPEC["serving"],
        "args": ["--enforce-eager"],
        "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h200"}],
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
        ],
    },
}


def as_in_git(wanted: object, live: object, path: str = "spec") -> list[str]:
    """Where the server has other than Git says; fields that Git leaves out are not looked at, but lists are whole."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        return [fault for name, value in wanted.items() for fault in as_in_git(value, live.get(name), f"{path}.{name}")]
    return [] if wanted == live else [f"{path}: {wanted!r} in Git, {live!r} on the server"]


def test_a_tool_that_compares_lists_whole_finds_no_difference_either(make):
    """Argo CD without a dry run on the server: nothing that the server fills in may be in an item of a list."""
    it = make(EVERY_LIST)
    it.apply()
    it.turn()
    assert as_in_git(json.loads(it.text)["spec"], it.raw["spec"]) == []


@pytest.mark.parametrize("flags", [(), ("--server-side", "--field-manager=kustomize-controller")])
def test_git_and_cluster_never_differ_by_our_doing(make, flags):
    it = make()
    it.apply(*flags)
    before = it.raw
    it.until(ApiWorld.is_finished)
    for _ in range(10):
        it.turn()
    found = it.diff(*flags)
    assert (found.returncode, found.stdout) == (0, ""), found.stdout + found.stderr
    assert it.raw["spec"] == before["spec"]
    assert it.raw["metadata"]["generation"] == 1, "the operator never writes spec"
    assert it.raw["metadata"]["annotations"] == before["metadata"]["annotations"], "nor annotations"
    assert it.raw["metadata"]["labels"] == before["metadata"]["labels"]


def test_the_diff_sees_a_change_that_was_made_by_hand(make):
    it = make()
    it.apply()
    it.edit(rounds={"max": 9})
    found = it.diff()
    assert found.returncode == 1
    assert "max: 9" in found.stdout


def test_tracking_labels_and_annotations_stay_on_the_run(make):
    it = make()
    it.apply()
    it.until(ApiWorld.is_finished)
    children = 0
    for kind in (port.ROUND, port.JOB, port.DEPLOYMENT, port.POD, port.SERVICE, port.CONFIG_MAP, port.NETWORK_POLICY):
        for obj in it.admin.list(kind, it.namespace, {names.LABEL_RUN: NAME}):
            metadata = obj["metadata"]
            assert not TRACKING["labels"].keys() & metadata["labels"].keys()
            assert not TRACKING["annotations"].keys() & metadata.get("annotations", {}).keys()
            children += 1
    assert children >= 15


@pytest.mark.parametrize(("serving", "left"), [("Keep", ["chess-gateway", "chess-r0001-serve"]), ("Delete", [])])
def test_what_stays_when_the_run_is_deleted(make, serving, left):
    it = make({"onDelete": {"serving": serving}})
    it.apply()
    it.until(ApiWorld.is_finished)
    uids = {o["metadata"]["name"]: o["metadata"]["uid"] for o in it.admin.list(port.DEPLOYMENT, it.namespace)}
    it.server.kubectl("delete", "prun", NAME, "-n", it.namespace, "--wait=false")
    deadline = time.monotonic() + 60
    while it.admin.get(port.RUN, it.namespace, NAME) or it.names_of(port.ROUND) or it.names_of(port.JOB):
        assert time.monotonic() < deadline
        it.step()
    while it.names_of(port.DEPLOYMENT) != left:
        assert time.monotonic() < deadline, it.names_of(port.DEPLOYMENT)
        time.sleep(0.5)
    time.sleep(2)  # a garbage collector that is still about to come
    kept = {o["metadata"]["name"]: o for o in it.admin.list(port.DEPLOYMENT, it.namespace)}
    assert list(kept) == left
    assert {name: obj["metadata"]["uid"] for name, obj in kept.items()} == {name: uids[name] for name in left}
    for name, obj in kept.items():
        assert obj["status"]["readyReplicas"] >= 1, name
        assert it.admin.get(port.SERVICE, it.namespace, name) is not None


def moments(it: ApiWorld) -> list[Object]:
    """The run as it stood after each of its status writes."""
    seen: list[Object] = []
    write = it.admin.update_status

    def noting(manifest: Object) -> Object:
        written = write(manifest)
        if written["kind"] == "ProdRLRun":
            seen.append(written)
        return written

    it.admin.update_status = noting
    return seen


def is_served(it: ApiWorld) -> bool:
    return bool(it.gateway.routes and it.gateway.routes.routes)


def test_kstatus_tells_the_truth_at_every_moment(make):
    it = make({"rounds": {"max": 2, "steps": 2, "batchSize": 2}}, script=blocking(2))
    it.apply()
    seen = moments(it)
    it.until(lambda w: w.is_true("Completed") or w.is_true("Stalled"))
    states = [kstatus(obj) for obj in seen]
    first = states.index("Current")
    assert set(states[:first]) == {"InProgress"}, "until the first policy serves"
    assert "stable" not in (seen[first - 1].get("status") or {})
    assert set(states[first:]) == {"Current"}, "rounds turn, and Flux and Argo CD see a healthy object"
    steps = {obj["status"]["currentRound"]["step"] for obj in seen[first:]}
    assert {"Collecting", "Training", "Exporting", "CanaryDeploying", "Gating"} <= steps


def test_kstatus_fails_where_a_person_must_decide_and_comes_back_when_one_did(make):
    it = make({"rounds": {"max": 3, "steps": 2, "batchSize": 2}}, script=blocking(1))
    it.apply()
    it.until(lambda w: w.is_true("Stalled"))
    assert kstatus(it.raw) == "Failed"
    it.edit(requests={"retryToken": "again"})
    assert kstatus(it.raw) == "InProgress", "the new generation is not in force yet"
    it.until(lambda w: w.is_true("Completed"))
    assert kstatus(it.raw) == "Current"


def waiting(it: ApiWorld, *arguments: str) -> tuple[threading.Thread, list[subprocess.CompletedProcess[str]]]:
    done: list[subprocess.CompletedProcess[str]] = []
    command = ("wait", f"prun/{NAME}", "-n", it.namespace, "--timeout=110s", *arguments)
    thread = threading.Thread(target=lambda: done.append(it.server.kubectl(*command, check=False)), daemon=True)
    thread.start()
    return thread, done


def test_kubectl_wait_for_ready_waits_and_then_returns(make):
    it = make()
    it.apply()
    thread, done = waiting(it, "--for=condition=Ready")
    time.sleep(2)
    assert not done, "nothing is served yet"
    it.until(lambda w: w.run.status.stable is not None and w.is_true("Ready"))
    thread.join(30)
    assert done[0].returncode == 0, done[0].stderr


def test_kubectl_wait_after_an_edit_is_about_the_edit(make):
    it = make({"rounds": {"max": 5, "steps": 2, "batchSize": 2}})
    it.apply()
    it.until(lambda w: w.is_true("Ready"))
    generation = it.edit(rounds={"max": 6})["metadata"]["generation"]
    thread, done = waiting(it, "--for=condition=Ready")
    time.sleep(2)
    assert not done, "Ready is about the generation before"
    it.turn()
    thread.join(30)
    assert done[0].returncode == 0, done[0].stderr
    ready = next(c for c in it.run.status.conditions if c.type == "Ready")
    assert ready.observed_generation == it.run.status.observed_generation == generation


def test_columns_are_what_a_person_reads(make):
    it = make()
    it.apply()
    it.until(ApiWorld.is_finished)
    table = it.server.kubectl("get", "prun", "-n", it.namespace).stdout.splitlines()
    assert table[0].split() == ["NAME", "ROUND", "STEP", "READY", "STABLE", "GATE", "WEIGHT", "AGE"]
    assert table[1].split()[:7] == ["chess", "1", "Promoted", "True", "1", "Pass", "0"]
    wide = it.server.kubectl("get", "prun", "-n", it.namespace, "-o", "wide").stdout.splitlines()[0].split()
    assert {"REWARD", "MODEL", "REASON"} <= set(wide)
