"""Summary, page and terminal view from one snapshot: what is shown is what the objects say."""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from pathlib import Path

import httpx
from rich.console import Console

from prodrl_operator.report import figures, snapshot, terminal
from prodrl_operator.report.live import LivePage
from prodrl_operator.report.page import page_data, report_page
from prodrl_operator.report.snapshot import Snapshot
from prodrl_operator.report.summary import summary
from tests.support.manifests import DIGEST, OTHER, exported, make_round, make_run, trained

START, END = "2026-01-01T00:00:00Z", "2026-01-01T00:01:30Z"


def example(**kwargs: object) -> Snapshot:
    measured = {
        "evaluations": [
            {"name": "puzzles", "metric": "solved", "items": 60, "difference": -0.2, "low": -0.3, "high": -0.1}
        ]
    }
    times = [{"step": "Training", "started": START, "finished": END}]
    gate = {"verdict": "Fail", "message": "puzzles: candidate is worse", "measurements": json.dumps(measured)}
    blocked = make_round(1, **trained(1), step="Blocked", reason="GateBlocked", gate=gate, times=times)
    run = make_run(gate={"evaluations": [{"name": "puzzles", "suite": "m:f", "metric": "solved"}]})
    run = run.model_copy(
        update={
            "status": run.status.model_validate(
                {
                    "stable": {"round": 0, "digest": DIGEST},
                    "conditions": [
                        {
                            "type": "Stalled",
                            "status": "True",
                            "reason": "GateBlocked",
                            "message": "<b>round 1</b>",
                            "lastTransitionTime": END,
                        }
                    ],
                }
            )
        }
    )
    rounds = [make_round(0, **exported(0), step="Promoted"), blocked]
    return Snapshot(run=run, rounds=rounds, pods=[], **kwargs)  # type: ignore[arg-type]


def test_summary_counts_what_users_counted_before_what_the_gateway_counted() -> None:
    clients = {"sent": 10, "answered": 9, "failed": 1, "aborted": 0, "byDigest": {DIGEST: {"answered": 9}}}
    gateway = {DIGEST: {"requests": 8, "answered": 8, "failed": 0}}
    facts = summary(example(clients=clients, gateway=gateway), "Stalled")
    assert facts["requests"]["sent"] == 10
    assert facts["requests"]["failed"] == 1
    assert facts["requests"]["gateway"]["answered"] == 8
    assert facts["stable"] == {"round": 0, "digest": DIGEST}
    assert facts["rounds"][1]["secondsPerStep"] == {"Training": 90.0}
    assert facts["rounds"][1]["phase"] == "Blocked"
    assert facts["rounds"][1]["trajectories"] == 4


def test_client_reports_are_summed(tmp_path: Path) -> None:
    (tmp_path / "clients").mkdir()
    for name, answered in (("a", 3), ("b", 4)):
        report = {"sent": 5, "answered": answered, "failed": 0, "byDigest": {OTHER: {"answered": answered}}}
        (tmp_path / "clients" / f"{name}.json").write_text(json.dumps(report), encoding="utf-8")
    found = snapshot.client_reports(tmp_path)
    assert found == {"sent": 10, "answered": 7, "failed": 0, "aborted": 0, "byDigest": {OTHER: {"answered": 7}}}


def test_a_report_needs_nothing_else_and_escapes_what_it_shows() -> None:
    text = report_page(example(), "Stalled")
    assert "Plotly" in text
    assert "<b>round 1</b>" not in text
    assert "src=" not in text.split("<header>")[1]
    assert "puzzles: candidate is worse" in text


def test_figures_show_verdicts_and_intervals() -> None:
    rows = [{"round": 1, "engine_mismatch": 0.05, "staleness": 0.0, "net_mismatch": 0.05}] * 2
    drawn = figures.all_figures(example(curves=rows))
    assert len(drawn) == 6
    interval = drawn[1]["data"][0]
    assert interval["y"] == [-0.2]
    assert round(interval["error_y"]["array"][0], 6) == 0.1
    assert [trace["name"].split(":")[0] for trace in drawn[2]["data"]] == ["engine", "staleness", "net"]


def test_the_live_page_hands_out_what_was_drawn_last() -> None:
    page = LivePage("chess", 0)
    try:
        page.update(page_data(example(), "Running"), {"state": "Running"})
        assert "plotly.js" in httpx.get(page.url, trust_env=False).text
        assert len(httpx.get(page.url + "data.json", trust_env=False).json()["figures"]) == 6
        assert httpx.get(page.url + "summary.json", trust_env=False).json() == {"state": "Running"}
        assert httpx.get(page.url + "else", trust_env=False).status_code == 404
    finally:
        page.close()


def test_the_terminal_says_round_step_traffic_and_why_it_stalled() -> None:
    progress = {"done": 3, "total": 8, "unit": "steps", "message": ""}
    console = Console(file=io.StringIO(), width=140)
    console.print(
        terminal.view(example(progress=progress), "http://page", "http://users", datetime(2026, 1, 1, tzinfo=UTC))
    )
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for said in ("3/8 steps", "Blocked", "GateBlocked", "http://users", "http://page"):
        assert said in text
