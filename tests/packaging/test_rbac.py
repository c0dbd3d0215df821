"""RBAC is what the operator does: no verb is missing, none is granted that nothing uses."""

from __future__ import annotations

from typing import Any

import pytest

from prodrl_operator import names
from prodrl_operator.cluster import port
from prodrl_operator.cluster.caching import WATCHED
from prodrl_operator.cluster.local.store import ObjectStore
from prodrl_operator.cluster.port import KINDS
from prodrl_operator.errors import AlreadyExistsError
from prodrl_operator.leading import Elector
from prodrl_operator.names import Step
from prodrl_operator.observing import CHILD_KINDS
from tests.packaging import rendering
from tests.packaging.recording import Access, RecordedWorld, RecordingCluster, access
from tests.packaging.rendering import Object
from tests.support.fake_kubelet import Outcome
from tests.support.operator_harness import NAME, all_well, blocking

OWNERS = (port.RUN, port.ROUND)
ROLES = {"cluster-wide": "ClusterRole", "namespaced": "Role"}
BUSY = {
    "rounds": {"max": 3, "steps": 2, "batchSize": 2, "historyLimit": 1},
    "onBlocked": "ContinueLineage",
    "gateway": {"replicas": 2},
    "serving": {"replicas": 2},
    "gate": {"canary": {"steps": [{"weight": 10, "minTrajectories": 10}]}},
}


def rounds_and_a_block(seen: set[Access]) -> None:
    """Promoted and blocked rounds, canary traffic, a budget for the gateway, pruned history; then deleted."""
    world = RecordedWorld(seen, BUSY, blocking(2))
    world.users_per_step = 200
    world.until(lambda w: w.is_true("Completed"))
    world.steps(20)
    world.store.delete(port.RUN, "default", NAME)
    world.steps(5)


def kept_serving(seen: set[Access]) -> None:
    """Deleted with ``onDelete.serving: Keep``: children lose their owner."""
    world = RecordedWorld(seen, {"onDelete": {"serving": "Keep"}})
    world.until(lambda w: w.at(0, Step.PROMOTED))
    world.store.delete(port.RUN, "default", NAME)
    world.steps(10)


def suspended_and_aborted(seen: set[Access]) -> None:
    """A running training of two pods is suspended, resumed and aborted."""

    def script(number: int, step: Step, attempt: int) -> Outcome | None:
        return None if step is Step.TRAINING else all_well(number, step, attempt)

    world = RecordedWorld(seen, {"training": {"nodes": 2}}, script)
    world.until(lambda w: w.at(1, Step.TRAINING))
    world.steps(2)
    world.edit(suspend=True)
    world.steps(3)
    world.edit(suspend=False)
    world.steps(3)
    world.edit(requests={"abortRound": 1})
    world.steps(5)


def without_policies(seen: set[Access]) -> None:
    """The next round's settings ask for neither network policies nor a budget: what there was goes."""
    world = RecordedWorld(seen, {"rounds": {"max": 2, "steps": 2, "batchSize": 2}, "gateway": {"replicas": 2}})
    world.until(lambda w: w.at(1, Step.COLLECTING))
    assert world.store.list(port.NETWORK_POLICY, "default")
    world.edit(networkPolicy="None", gateway={"replicas": 1})
    world.until(lambda w: w.is_true("Completed"))
    world.steps(5)
    assert world.store.list(port.NETWORK_POLICY, "default") == []


def an_event_twice(seen: set[Access]) -> None:
    """The same transition decided twice is one event, and nobody reads the one that was there."""
    world = RecordedWorld(seen)
    world.until(lambda w: w.at(0, Step.EXPORTING))
    event = world.store.list(port.EVENT, "default")[0]
    metadata = {key: event["metadata"][key] for key in ("name", "namespace")}
    with pytest.raises(AlreadyExistsError):
        world.cached.create({**event, "metadata": metadata})


def meddled_with(seen: set[Access]) -> None:
    """Somebody edits and deletes every kind of child: a resync finds it and looks."""
    world = RecordedWorld(seen, {"gateway": {"replicas": 2}})
    world.until(lambda w: w.at(1, Step.COLLECTING))
    for kind in CHILD_KINDS:
        for obj in world.store.list(kind, "default"):
            world.store.delete(kind, "default", obj["metadata"]["name"])
    world.steps(3)


def electing(seen: set[Access]) -> None:
    """The Lease is taken, kept and given back."""
    cluster: Any = RecordingCluster(ObjectStore(), seen)
    elector = Elector(cluster, "default", names.MANAGED_BY, "me")
    elector.look()
    elector.look()
    elector.give_back()


def jobs_without_pods(seen: set[Access]) -> None:
    """A Job whose pods cannot be created is explained by its events."""
    world = RecordedWorld(seen)
    world.kubelet.tick = lambda: None  # type: ignore[method-assign]
    world.steps(10)


def operating(seen: set[Access]) -> None:
    """What kopf does (it lists, then watches); and what the API server asks of whoever makes an owner's child."""
    seen |= {access(kind, verb) for kind in WATCHED for verb in ("list", "watch")}
    seen |= {access(kind, "update", "finalizers") for kind in OWNERS}


SCENARIOS = (
    rounds_and_a_block,
    kept_serving,
    suspended_and_aborted,
    without_policies,
    an_event_twice,
    meddled_with,
    jobs_without_pods,
    operating,
)


@pytest.fixture(scope="module")
def used() -> set[Access]:
    seen: set[Access] = set()
    for scenario in SCENARIOS:
        scenario(seen)
    return seen


def granted(role: Object) -> set[Access]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize("overlay", rendering.OVERLAYS)
def test_the_role_grants_what_whole_rounds_use_and_nothing_else(overlay: str, used: set[Access]) -> None:
    role = rendering.only(rendering.kustomized(overlay), ROLES[overlay])
    assert granted(role) - used == set(), "granted and never used"
    assert used - granted(role) == set(), "used and not granted"


@pytest.mark.parametrize("overlay", rendering.OVERLAYS)
def test_the_chart_grants_the_same(overlay: str) -> None:
    role = rendering.only(rendering.templated(overlay), ROLES[overlay])
    assert granted(role) == granted(rendering.only(rendering.kustomized(overlay), ROLES[overlay]))


@pytest.mark.parametrize("overlay", rendering.OVERLAYS)
def test_no_wildcards_and_no_secrets_anywhere(overlay: str) -> None:
    roles = [item for item in rendering.kustomized(overlay) if item["kind"] in ("Role", "ClusterRole")]
    assert roles
    for role in roles:
        for group, resource, verb in granted(role):
            assert "*" not in group + resource + verb, role["metadata"]["name"]
            assert "secrets" not in resource, role["metadata"]["name"]


def test_a_namespaced_installation_has_nothing_cluster_scoped() -> None:
    for item in rendering.kustomized("namespaced"):
        assert item["metadata"].get("namespace") == rendering.NAMESPACES["namespaced"], item["kind"]
        assert not item["kind"].startswith("Cluster")


@pytest.mark.parametrize("overlay", rendering.OVERLAYS)
def test_the_lease_is_the_operators_own_and_no_other(overlay: str) -> None:
    role = rendering.only(rendering.kustomized(overlay), "Role", "prodrl-operator-lease")
    used: set[Access] = set()
    electing(used)
    assert granted(role) == used
    rules = role["rules"]
    by_verb = {verb: rule for rule in rules for verb in rule["verbs"]}
    assert by_verb["get"]["resourceNames"] == by_verb["update"]["resourceNames"] == [names.MANAGED_BY]


@pytest.mark.parametrize("overlay", rendering.OVERLAYS)
def test_bindings_bind_the_operators_own_account(overlay: str) -> None:
    items = rendering.kustomized(overlay)
    account = rendering.only(items, "ServiceAccount")["metadata"]
    bindings = [item for item in items if item["kind"].endswith("Binding")]
    assert len(bindings) == 2
    for binding in bindings:
        subject = {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
        assert binding["subjects"] == [subject]


def test_users_may_never_write_status_or_rounds() -> None:
    items = rendering.kustomized("cluster-wide")
    edit = granted(rendering.only(items, "ClusterRole", "prodrl-edit"))
    assert {resource for _, resource, _ in edit} == {"prodrlruns"}
    assert {verb for _, _, verb in granted(rendering.only(items, "ClusterRole", "prodrl-view"))} == {
        "get",
        "list",
        "watch",
    }


def test_a_recording_that_saw_too_little_would_fail() -> None:
    """The comparison is against something: without rounds, nearly everything granted is left over."""
    seen: set[Access] = set()
    operating(seen)
    role = rendering.only(rendering.kustomized("cluster-wide"), "ClusterRole")
    assert access(KINDS["Job"], "delete") in granted(role) - seen
