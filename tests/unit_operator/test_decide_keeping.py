"""``decide`` on what is let go and what is kept: rounds, their weights, and a run that is deleted."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prodrl_operator import names
from prodrl_operator.names import Step
from prodrl_operator.rounds import decision as intents
from prodrl_operator.rounds import retention
from prodrl_operator.rounds.decision import (
    AddFinalizer,
    DeleteOrphans,
    EnsureJob,
    OrphanServing,
    RemoveFinalizer,
)
from prodrl_operator.rounds.observed import Observed
from tests.support import runs
from tests.support.runs import PASS, ago, decide, scene, servers, settled

CREATING = (intents.CreateRound, intents.EnsureGateway, intents.EnsureServing, intents.EnsureJob, intents.AddFinalizer)


def of(observed: Observed, kind: Any, seconds: float = 0.0) -> list[Any]:
    return [item for item in settled(observed, seconds)[1].intents if isinstance(item, kind)]


@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_i13_retention_never_takes_what_is_needed(
    count: int, limit: int, stable: int, lineage: int, served: int
) -> None:
    stable, lineage, served = min(stable, count - 1), min(lineage, count - 1), min(served, count - 1)
    status = runs.stable_status(stable, lineageRound=lineage, previous={"round": max(stable - 1, 0), "digest": "x"})
    status["history"] = [{"number": n, "outcome": "Promoted"} for n in range(count)]
    run = runs.make_run(status, rounds={"historyLimit": limit})
    rounds = {
        n: runs.make_round(n, run, source=max(n - 1, 0), **runs.status_at(n, Step.PROMOTED)) for n in range(count)
    }
    rounds[count] = runs.make_round(count, run, source=stable, lineage=lineage, **runs.status_at(count, Step.TRAINING))
    observed = Observed(run=run, rounds=rounds, servings={served: servers()})
    expired = set(retention.expired(observed))
    assert not expired & {count, stable, max(stable - 1, 0), lineage, served}
    assert len(expired) <= max(count - limit, 0)
    assert all(n < count - limit for n in expired)


OUTCOMES = st.sampled_from(["Promoted", "Blocked", "Aborted", "Superseded"])


@given(st.lists(OUTCOMES, min_size=1, max_size=12), st.integers(2, 5), st.integers(0, 3), st.data())
def test_i13_weights_that_anything_needs_are_never_spent(
    outcomes: list[str], promoted: int, blocked: int, data: st.DataObject
) -> None:
    """prime-rl#1857: weights were deleted while somebody was about to load them."""
    count = len(outcomes)
    stable, lineage, served, previous = (data.draw(st.integers(0, count - 1)) for _ in range(4))
    status = runs.stable_status(stable, lineageRound=lineage, previous={"round": previous, "digest": "x"})
    status["history"] = [{"number": n, "outcome": outcome} for n, outcome in enumerate(outcomes)]
    settings = {"promoted": promoted, "blocked": blocked}
    run = runs.make_run(status, storage={"uri": "file:///s", "retention": settings})
    this = runs.make_round(count, run, source=stable, lineage=lineage, **runs.status_at(count, Step.COLLECTING))
    observed = Observed(run=run, rounds={count: this}, servings={served: servers()})
    spent = set(retention.spent(observed, run.spec.storage.retention))
    assert not spent & {count, stable, lineage, served, previous}
    for is_promoted, limit in ((True, promoted), (False, blocked)):
        alike = [n for n in range(count) if (outcomes[n] == "Promoted") == is_promoted]
        beyond = set(alike[: max(len(alike) - limit, 0)])
        assert spent & set(alike) == beyond - {stable, lineage, served, previous}


def test_the_collect_step_is_told_what_it_may_let_go() -> None:
    history = [{"number": n, "outcome": "Promoted"} for n in range(8)]
    spec = {"storage": {"uri": "file:///s", "retention": {"promoted": 3}}}

    def spent(step: Step) -> tuple[int, ...]:
        (job,) = of(scene(step, number=8, spec=spec, run={"history": history, "lineageRound": 7}), EnsureJob)
        return tuple(job.spent)

    assert spent(Step.COLLECTING) == (0, 1, 2, 3, 4)
    assert spent(Step.TRAINING) == ()


def test_what_retention_deleted_is_told() -> None:
    figures = {"retired": 2, "retention_error": "Object x: refused; allow s3:DeleteObject"}
    observed = scene(Step.COLLECTING, jobs={0: runs.succeeded(1, Step.COLLECTING, **figures)})
    told = {note.reason: note for note in decide(observed).events}
    assert "of 2 old rounds" in told["ArtifactsDeleted"].message
    assert told["RetentionFailed"].type == "Warning"
    assert "s3:DeleteObject" in told["RetentionFailed"].message


@pytest.mark.parametrize("keep", ["Keep", "Delete"])
def test_i7_nothing_is_created_after_the_deletion_timestamp(keep: str) -> None:
    for step in Step:
        observed = scene(step, spec={"onDelete": {"serving": keep}}, measured=PASS)
        observed.run.metadata["deletionTimestamp"] = ago(1)
        decision = decide(observed)
        assert not [item for item in decision.intents if isinstance(item, CREATING)], step
        assert decision.round_status is None


def test_deletion_keeps_or_deletes_what_serves() -> None:
    kept = scene(Step.GATING)
    kept.run.metadata["deletionTimestamp"] = ago(1)
    assert [type(item).__name__ for item in decide(kept).intents] == [
        "EnsureRoutes",
        "OrphanServing",
        "DeleteOrphans",
        "RemoveFinalizer",
    ]
    assert OrphanServing(0) in decide(kept).intents
    gone = scene(Step.GATING, spec={"onDelete": {"serving": "Delete"}})
    gone.run.metadata["deletionTimestamp"] = ago(1)
    assert decide(gone).intents == (DeleteOrphans(None), RemoveFinalizer())


def test_a_run_is_held_only_while_its_users_would_notice_that_it_went() -> None:
    """kopf#75 (zalando): a finalizer that nobody was left to remove kept namespaces Terminating."""

    def held(step: Step, *, has: bool, **changes: Any) -> bool:
        observed = scene(step, **changes)
        observed.run.metadata["finalizers"] = [names.FINALIZER] if has else []
        intents = decide(observed).intents
        return (has and RemoveFinalizer() not in intents) or AddFinalizer() in intents

    candidates = (Step.CANARY_DEPLOYING, Step.GATING, Step.PROMOTING)
    for step in (Step.PENDING, Step.COLLECTING, Step.TRAINING, Step.EXPORTING, *candidates):
        assert held(step, has=False) == held(step, has=True) == (step in candidates), step
        assert held(step, has=False, number=0) == (step in candidates), step
    assert held(Step.COLLECTING, has=False, is_kept_apart=False), "servers that drain, or that still have an owner"
    assert held(Step.COLLECTING, has=True, routes_version="v2"), "the gateway has not heard yet"
    assert not held(Step.COLLECTING, has=False, routes_version="v2")
    delete = {"onDelete": {"serving": "Delete"}}
    assert not held(Step.GATING, has=True, spec=delete)
    assert held(Step.GATING, has=False, spec=delete, has_orphans=True)


def test_deletion_waits_for_the_gateway_but_not_for_ever() -> None:
    observed = scene(Step.GATING, routes_version="v2")
    observed.run.metadata["deletionTimestamp"] = ago(1)
    assert RemoveFinalizer() not in decide(observed).intents
    assert RemoveFinalizer() in decide(observed, seconds=31).intents
