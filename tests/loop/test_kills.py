"""The whole loop with a real engine while its processes are killed: it completes, nothing is lost or used twice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.local_run import LocalRun, Users, run_manifest
from tests.support.tiny_qwen import save_tiny_qwen

pytestmark = [pytest.mark.demo, pytest.mark.timeout(1800)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LocalRun]:
    save_tiny_qwen(tmp_path / "model")
    local = LocalRun(tmp_path, run_manifest(tmp_path))
    local.start()
    yield local
    local.stop()


def test_a_run_completes_though_everything_in_it_is_killed(run: LocalRun) -> None:
    users = Users(run)
    users.start()
    run.wait("the first server", lambda: run.processes("vllm.entrypoints"), 400)
    run.kill("vllm.entrypoints", "r0000-serve") if run.processes("r0000-serve") else run.kill("vllm.entrypoints")
    run.wait("round 1 collects", lambda: run.step() == "1 Collecting")
    run.kill("gateway.json")
    run.kill("prodrl", "collect")
    run.wait("round 1 trains", lambda: run.step() == "1 Training")
    run.kill("prodrl", "train")
    run.kill_controller()
    run.start()
    run.wait("the candidate starts", lambda: run.step() == "1 CanaryDeploying")
    run.kill("vllm.entrypoints", "--model")
    run.wait("the gate", lambda: run.step() in {"1 Gating", "1 Promoting", "1 Promoted"})
    run.kill_controller()
    run.start()
    run.wait("the end", lambda: run.summary().get("state") == "Completed", 600)
    users.done.set()
    users.join(130)
    facts = run.summary()
    assert [r["phase"] for r in facts["rounds"]] == ["Promoted", "Promoted"]
    assert facts["stable"]["round"] == 1
    assert facts["rounds"][1]["trajectories"] == 8
    audit = run.audit()
    assert audit["holds"], audit
    assert audit["rounds"] == {"1": 8}
    assert audit["fate"]["trained"] == 8
    known = {r["newDigest"] for r in facts["rounds"]}
    assert set(users.by_digest) <= known
    assert users.counts["rewarded"] >= 8


def test_a_second_start_on_the_same_folder_is_refused_and_harms_nothing(run: LocalRun) -> None:
    run.wait("the folder is taken", run.endpoint)
    command = [str(Path(sys.executable).with_name("prodrl-operator")), "local", str(run.path), "--data", str(run.data)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert str(run.process.pid) in done.stderr if run.process else False
    run.wait("the first start goes on", lambda: run.processes("vllm.entrypoints"), 400)
    run.stop()
    assert run.process is not None
    assert run.process.returncode == 130
    assert run.processes() == []
    assert (run.data / "report.html").is_file()
