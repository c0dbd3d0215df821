"""The terminal view: round, step, progress, time left, traffic. Pure rendering with rich, from a snapshot."""

from __future__ import annotations

from datetime import UTC, datetime
from statistics import mean

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from prodrl_operator.names import TERMINAL, Step
from prodrl_operator.report.snapshot import Snapshot
from prodrl_operator.report.summary import requests_summary, seconds

ORDER = [Step.COLLECTING, Step.TRAINING, Step.EXPORTING, Step.CANARY_DEPLOYING, Step.GATING, Step.PROMOTING]


def time_left(snapshot: Snapshot, now: datetime) -> float | None:
    """Seconds to the end of the run, from the mean length of the finished rounds; None before there is one."""
    finished = [r for r in snapshot.rounds if r.spec.number > 0 and Step(r.status.step) in TERMINAL]
    lengths = [sum(seconds(t.started, t.finished) or 0 for t in r.status.times) for r in finished]
    if not lengths:
        return None
    remaining = snapshot.run.spec.rounds.max - len(finished)
    current = snapshot.run.status.current_round
    begun = 0.0
    if current and current.number > 0 and current.since:
        this = next((r for r in snapshot.rounds if r.spec.number == current.number), None)
        if this and this.status.times:
            started = datetime.fromisoformat(this.status.times[0].started.replace("Z", "+00:00"))
            begun = (now - started).total_seconds()
    return max(0.0, remaining * mean(lengths) - begun)


def clock(value: float | None) -> str:
    """Seconds as m:ss."""
    return "--:--" if value is None else f"{int(value) // 60}:{int(value) % 60:02d}"


def _steps(current: str) -> Text:
    text = Text()
    for step in ORDER:
        style = "bold yellow" if step.value == current else "dim"
        text.append(f" {step.value} ", style=style)
        text.append("" if step is ORDER[-1] else ">", style="dim")
    return text


def _bar(snapshot: Snapshot) -> RenderableType:
    progress = snapshot.progress
    if not progress or not progress.get("total"):
        return Text((progress or {}).get("message", ""), style="dim")
    done, total = float(progress.get("done") or 0), float(progress["total"])
    line = Table.grid(padding=(0, 1))
    line.add_row(
        ProgressBar(total=total, completed=done, width=40),
        f"{done:.0f}/{total:.0f} {progress.get('unit', '')}",
        Text(str(progress.get("message", "")), style="dim"),
    )
    return line


def view(snapshot: Snapshot, page: str, endpoint: str, now: datetime | None = None) -> RenderableType:
    """The whole view."""
    status = snapshot.run.status
    now = now or datetime.now(UTC)
    current = status.current_round
    requests = requests_summary(snapshot)
    facts = Table.grid(padding=(0, 2))
    facts.add_row("round", f"{current.number if current else '-'} of {snapshot.run.spec.rounds.max}")
    facts.add_row("time left", f"about {clock(time_left(snapshot, now))}")
    facts.add_row(
        "stable", f"round {status.stable.round}  {status.stable.digest[:19]}" if status.stable else "none yet"
    )
    facts.add_row("canary", f"{status.canary_weight} % of new conversations")
    facts.add_row("requests", f"{requests['sent']} sent, {requests['answered']} answered, {requests['failed']} failed")
    facts.add_row("endpoint", endpoint)
    facts.add_row("live page", page)
    for condition in status.conditions:
        if condition.type == "Stalled" and condition.status == "True":
            facts.add_row(Text("stalled", style="bold red"), f"{condition.reason}: {condition.message}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("round", "phase", "reward", "verdict", "seconds"):
        table.add_column(head)
    for item in snapshot.rounds[-6:]:
        length = sum(seconds(t.started, t.finished) or 0 for t in item.status.times)
        data = item.status.dataset
        style = {"Promoted": "green", "Blocked": "red", "Failed": "red"}.get(item.status.step, "yellow")
        table.add_row(
            str(item.spec.number),
            Text(item.status.step, style=style),
            f"{float(data.reward_mean):.3f}" if data else "-",
            item.status.gate.verdict or "-",
            f"{length:.0f}",
        )
    parts = [_steps(current.step if current else ""), _bar(snapshot), facts, table]
    return Panel(Group(*parts), title=f"prodrl {snapshot.run.metadata['name']}", border_style="blue")


def place(snapshot: Snapshot) -> str:
    """Round and step in two words."""
    current = snapshot.run.status.current_round
    return f"round {current.number} {current.step}" if current else "starting"


def line(snapshot: Snapshot) -> str:
    """One line for a terminal that cannot redraw (a log)."""
    progress = snapshot.progress or {}
    requests = requests_summary(snapshot)
    done = ""
    if progress.get("total"):
        done = f" {progress.get('done', 0):.0f}/{progress['total']:.0f} {progress['unit']}"
    message = f" ({progress['message']})" if progress.get("message") else ""
    counts = f"requests {requests['answered']}/{requests['sent']}, {requests['failed']} failed"
    return f"{place(snapshot)}{done}{message}; {counts}"
