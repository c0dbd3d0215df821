"""The figures of the report and of the live page, as plotly dictionaries. Pure, from a snapshot."""

from __future__ import annotations

import json
from typing import Any

import plotly.graph_objects as go

from prodrl_operator.names import Step
from prodrl_operator.report.snapshot import Snapshot
from prodrl_operator.report.summary import seconds

VERDICT_COLOURS = {"Promoted": "#2f9e63", "Blocked": "#c8452f", "Failed": "#8a2be2", "Aborted": "#777777"}
WORKING = "#d9a127"
MISMATCHES = (
    ("engine_mismatch", "engine: |log p_k - log mu|", "#3568b8"),
    ("staleness", "staleness: |log p - log p_k|", "#d9822b"),
    ("net_mismatch", "net: |log p - log mu|", "#444444"),
)


def _figure(title: str, x: str, y: str) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        title=title,
        xaxis_title=x,
        yaxis_title=y,
        template="plotly_white",
        height=360,
        margin={"l": 60, "r": 20, "t": 50},
    )
    return figure


def reward(snapshot: Snapshot) -> go.Figure:
    """Mean reward of each round's training data: the deployed policy's reward as its users gave it."""
    figure = _figure("Reward of the data each round trained on", "round", "mean reward")
    rounds = [r for r in snapshot.rounds if r.status.dataset]
    figure.add_scatter(
        x=[r.spec.number for r in rounds],
        y=[float(r.status.dataset.reward_mean) for r in rounds if r.status.dataset],
        mode="lines+markers",
        marker={"size": 12, "color": [VERDICT_COLOURS.get(r.status.step, WORKING) for r in rounds]},
        line={"color": "#bbbbbb"},
        text=[f"{r.status.step}, policy of round {r.spec.source.round if r.spec.source else 0}" for r in rounds],
        name="reward",
    )
    figure.update_xaxes(dtick=1)
    return figure


def evaluations(snapshot: Snapshot) -> go.Figure:
    """Candidate minus stable per item, with its confidence interval and the margin."""
    figure = _figure("Held-out evaluation: candidate minus stable (paired)", "round", "difference")
    series: dict[str, dict[str, list[float]]] = {}
    for item in snapshot.rounds:
        for figures in measurements(item.status.gate.measurements).get("evaluations", []):
            points = series.setdefault(figures["name"], {"x": [], "y": [], "up": [], "down": []})
            points["x"].append(item.spec.number)
            points["y"].append(figures["difference"])
            points["up"].append(figures["high"] - figures["difference"])
            points["down"].append(figures["difference"] - figures["low"])
    for name, points in series.items():
        error = {"type": "data", "symmetric": False, "array": points["up"], "arrayminus": points["down"]}
        figure.add_scatter(x=points["x"], y=points["y"], error_y=error, mode="markers", name=name, marker={"size": 10})
    for evaluation in snapshot.run.spec.gate.evaluations:
        figure.add_hline(y=-float(evaluation.margin), line_dash="dot", annotation_text=f"margin of {evaluation.name}")
    figure.add_hline(y=0, line_color="#999999")
    figure.update_xaxes(dtick=1)
    return figure


def measurements(text: str | None) -> dict[str, Any]:
    """The gate's measurements; empty before they exist."""
    return dict(json.loads(text)) if text else {}


def mismatch(snapshot: Snapshot) -> go.Figure:
    """The recipe's three curves over optimizer steps; staleness is a saw-tooth that starts at 0 each round."""
    figure = _figure("Train-rollout mismatch per optimizer step", "optimizer step", "mean |log ratio|")
    steps = list(range(1, len(snapshot.curves) + 1))
    for key, label, colour in MISMATCHES:
        values = [row.get(key) for row in snapshot.curves]
        figure.add_scatter(x=steps, y=values, mode="lines+markers", name=label, line={"color": colour})
    previous = None
    for step, row in zip(steps, snapshot.curves, strict=True):
        if row.get("round") != previous:
            figure.add_vline(
                x=step - 0.5, line_dash="dot", line_color="#cccccc", annotation_text=f"r{row.get('round')}"
            )
            previous = row.get("round")
    return figure


def fates(snapshot: Snapshot) -> go.Figure:
    """What became of every recorded trajectory."""
    figure = _figure("Every recorded trajectory by fate", "", "trajectories")
    fate = (snapshot.audit or {}).get("fate") or {}
    bars = [(key, fate.get(key, 0)) for key in ("trained", "waiting", "expired")]
    bars += [(f"excluded: {reason}", count) for reason, count in sorted((fate.get("excluded") or {}).items())]
    figure.add_bar(x=[label for label, _ in bars], y=[count for _, count in bars], marker_color="#3568b8")
    return figure


def durations(snapshot: Snapshot) -> go.Figure:
    """Where the time of each round went."""
    figure = _figure("Seconds per step", "round", "seconds")
    for step in (Step.COLLECTING, Step.TRAINING, Step.EXPORTING, Step.CANARY_DEPLOYING, Step.GATING, Step.PROMOTING):
        values = [
            next((seconds(t.started, t.finished) for t in r.status.times if t.step == step.value), None)
            for r in snapshot.rounds
        ]
        figure.add_bar(x=[r.spec.number for r in snapshot.rounds], y=values, name=step.value)
    figure.update_layout(barmode="stack")
    figure.update_xaxes(dtick=1)
    return figure


def traffic(snapshot: Snapshot) -> go.Figure:
    """Answers by policy: who served the users."""
    figure = _figure("Requests answered, by policy", "policy", "requests")
    source = (snapshot.clients or {}).get("byDigest") or snapshot.gateway or {}
    numbers = {r.status.policy.digest: r.spec.number for r in snapshot.rounds if r.status.policy}
    rows = sorted((numbers.get(digest, -1), digest, c.get("answered", 0)) for digest, c in source.items())
    labels = [f"round {number} ({digest[7:15]})" for number, digest, _ in rows]
    figure.add_bar(x=labels, y=[count for *_, count in rows], marker_color="#2f9e63")
    return figure


def all_figures(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Every figure as JSON-ready dictionaries, in the order of the page."""
    drawn = (f(snapshot) for f in (reward, evaluations, mismatch, fates, traffic, durations))
    return [json.loads(str(figure.to_json())) for figure in drawn]
