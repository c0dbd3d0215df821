"""A gate that can say no, with a real engine: users stay on stable, and `onBlocked` does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.local_run import LocalRun, Users, run_manifest
from tests.support.tiny_qwen import save_tiny_qwen

pytestmark = [pytest.mark.demo, pytest.mark.timeout(1800)]

NEVER = {"agreement": {"maxMeanAbsLogprobDiff": "1.0", "maxRatioToStable": "0.000001"}}
"""No candidate agrees a million times better than stable; round 0 has no stable to be compared with."""


@pytest.mark.parametrize(
    ("on_blocked", "reason", "lineages"),
    [
        ("HaltForHuman", "GateBlocked", [0, 0]),
        ("ContinueLineage", "ConsecutiveBlocksExceeded", [0, 0, 1]),
        ("RestartFromStable", "ConsecutiveBlocksExceeded", [0, 0, 0]),
    ],
)
def test_a_blocked_round_leaves_users_on_stable_and_the_trainer_where_it_was_told(
    tmp_path: Path, on_blocked: str, reason: str, lineages: list[int]
) -> None:
    save_tiny_qwen(tmp_path / "model")
    rounds = {"max": 5, "steps": 1, "batchSize": 4, "maxConsecutiveBlocked": 2}
    run = LocalRun(tmp_path, run_manifest(tmp_path, gate=NEVER, onBlocked=on_blocked, rounds=rounds))
    run.start()
    users = Users(run)
    users.start()
    try:
        run.wait("the run waits for a person", lambda: run.summary().get("state") == "Stalled", 1500)
    finally:
        users.done.set()
        run.stop()
    facts = run.summary()
    assert [item["phase"] for item in facts["rounds"]] == ["Promoted"] + ["Blocked"] * (len(lineages) - 1)
    assert [item["lineageRound"] for item in facts["rounds"]] == lineages
    assert facts["stable"]["round"] == 0
    stalled = next(c for c in facts["conditions"] if c["type"] == "Stalled")
    assert (stalled["status"], stalled["reason"]) == ("True", reason)
    assert set(users.by_digest) == {facts["rounds"][0]["newDigest"]}
    assert run.audit()["holds"]
