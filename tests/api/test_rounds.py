"""Whole rounds on a real API server with its real controllers; only the pods are played."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prodrl_operator.cluster import port
from prodrl_operator.names import Step
from tests.support.api_world import ApiWorld
from tests.support.operator_harness import blocking


@pytest.fixture
def make(api_server) -> Iterator[type]:
    made: list[ApiWorld] = []

    def new(*arguments, **options) -> ApiWorld:
        made.append(ApiWorld(api_server, *arguments, **options))
        return made[-1]

    yield new
    for world in made:
        world.close()


def test_a_round_is_promoted(make):
    it = make()
    it.until(ApiWorld.is_finished)
    assert [(e.number, e.outcome) for e in it.run.status.history] == [(0, "Promoted"), (1, "Promoted")]
    assert it.names_of(port.DEPLOYMENT) == ["chess-gateway", "chess-r0001-serve"]
    it.check_jobs()


def test_a_harmful_round_is_blocked_and_stable_stays(make):
    it = make({"rounds": {"max": 2, "steps": 2, "batchSize": 2}}, blocking(1))
    it.until(lambda w: w.is_true("Stalled"))
    assert it.condition("Stalled") == ("True", "GateBlocked")
    assert it.run.status.stable.round == 0


def test_a_gateway_that_would_be_refused_stalls_the_run_before_a_round_takes_it(make):
    """The name is taken by the gateway that serves; the server judges the settings all the same."""
    it = make({"rounds": {"max": 2, "steps": 2, "batchSize": 2}})
    it.until(lambda w: w.at(1, Step.COLLECTING))
    it.edit(gateway={"resources": {"requests": {"memory": "8Gi"}, "limits": {"memory": "4Gi"}}})
    it.until(lambda w: w.is_true("Stalled"))
    assert it.condition("Stalled") == ("True", "InvalidConfiguration")
    (message,) = [item.message for item in it.run.status.conditions if item.type == "Stalled"]
    assert '"chess-gateway" is invalid' in message
    assert "less than or equal to memory limit" in message
    assert it.run.status.stable.round == 1
    assert "chess-r0002" not in it.names_of(port.ROUND)
    it.edit(gateway={"resources": None})
    it.until(ApiWorld.is_finished)
    assert it.run.status.stable.round == 2
