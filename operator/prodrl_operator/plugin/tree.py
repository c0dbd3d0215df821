"""The tree of ``status``. Pure: a look and what it means in, something that rich can draw out. Called by ``cli``."""

from __future__ import annotations

from collections import Counter
from datetime import datetime

from pydantic import ValidationError
from rich.text import Text
from rich.tree import Tree

from prodrl.config.results import EvaluateResult
from prodrl_operator.api.model import Condition as Said
from prodrl_operator.builders.metadata import STEP_WORDS
from prodrl_operator.names import TERMINAL, Condition, Step, Verdict
from prodrl_operator.plugin import ages
from prodrl_operator.plugin.health import WELL, Health, State
from prodrl_operator.plugin.listing import PHASE_STYLES, short
from prodrl_operator.plugin.looking import Look, PodLook, RoundLook
from prodrl_operator.rounds import transitions
from prodrl_operator.rounds.observed import DeploymentView

CALM, GOOD, BUSY, BAD = "dim", "green", "yellow", "bold red"
STATE_STYLES = {State.STALLED: BAD, State.UNAVAILABLE: BAD, State.WAITING: BUSY, State.STARTING: BUSY}
VERDICT_STYLES: dict[str, str] = {Verdict.PASS: GOOD, Verdict.FAIL: BAD, Verdict.ERROR: BAD, Verdict.INCONCLUSIVE: BUSY}
BAD_WHEN_FALSE = frozenset({Condition.READY, Condition.STABLE_AVAILABLE})
SHOWN_PODS = 10
MOVING = frozenset({"Pending", "ContainerCreating", "PodInitializing", "Terminating"})


def draw(look: Look, health: Health, now: datetime) -> Tree:
    """The whole tree."""
    style = STATE_STYLES.get(health.state, GOOD if health.state in WELL else BUSY)
    title = Text.assemble((look.name, "bold"), (f" ({look.namespace})  ", CALM), (health.state.value, style))
    if health.message:
        title.append(f"  {health.message}")
    tree = Tree(title, guide_style=CALM)
    _advice(tree, health)
    _conditions(tree, look, health, now)
    _stable(tree, look, now)
    _current(tree, look, health, now)
    _history(tree, look)
    if look.hidden:
        tree.add(Text(f"not shown, you may not list them: {', '.join(look.hidden)}", style=BUSY))
    return tree


def _advice(tree: Tree, health: Health) -> None:
    if not health.advice:
        return
    branch = tree.add(Text("What to do", style="bold"))
    for item in health.advice:
        line = branch.add(Text(item.text + (":" if item.command else "")))
        if item.command:
            line.add(Text(item.command, style="cyan"))


def _conditions(tree: Tree, look: Look, health: Health, now: datetime) -> None:
    branch = tree.add(Text("Conditions"))
    if not look.status.conditions:
        branch.add(Text("none yet", style=CALM))
    for item in look.status.conditions:
        line = Text.assemble(f"{item.type} ", (item.status, _condition_style(item)), f" {item.reason}")
        line.append(f" for {ages.since(item.last_transition_time, now)}", style=CALM)
        # The headline has said it; a stall is said by three conditions alike.
        if item.message and item.message != health.message:
            line.append(f"  {item.message}", style="" if _condition_style(item) == BAD else CALM)
        branch.add(line)


def _condition_style(item: Said) -> str:
    if item.type in BAD_WHEN_FALSE:
        return {"True": GOOD, "False": BAD}.get(item.status, BUSY)
    if item.type == Condition.STALLED and item.status == "True":
        return BAD
    return CALM if item.status == "False" else ""


def _stable(tree: Tree, look: Look, now: datetime) -> None:
    stable = look.status.stable
    if stable is None:
        tree.add(Text.assemble("Stable policy: ", ("none yet", BUSY)))
        return
    branch = tree.add(
        Text.assemble("Stable policy: ", (f"round {stable.round} {short(stable.digest)}", GOOD))
        + Text(f" for {ages.since(stable.since, now)}", style=CALM)
    )
    branch.add(Text(f"endpoint {look.status.endpoint or '-'} (model {look.spec['model']['servedName']})"))
    _servers(branch, "servers", look.servings.get(stable.round), look.pods_of("serving", stable.round))
    _servers(branch, "gateway", look.gateway, look.pods_of("gateway"))


def _servers(tree: Tree, what: str, view: DeploymentView | None, pods: list[PodLook]) -> None:
    if view is None:
        tree.add(Text(f"{what}: no Deployment", style=BUSY))
        return
    style = GOOD if view.is_ready else (BUSY if view.ready else BAD)
    branch = tree.add(Text.assemble(f"{what}: ", (f"{view.ready} of {view.desired} ready", style)))
    if view.waiting and not pods:
        branch.add(Text(f"{view.waiting}: {view.waiting_message}", style=BAD))
    if not view.is_ready or any(pod.restarts for pod in pods):
        _pods(branch, pods)


def _pods(tree: Tree, pods: list[PodLook]) -> None:
    """Those that need a look first, and no more than a screen holds."""
    ordered = sorted(pods, key=lambda pod: (pod.is_ready, _pod_style(pod) != BAD, pod.name))
    for pod in ordered[:SHOWN_PODS]:
        line = Text.assemble(f"pod {pod.name} ", (pod.state, _pod_style(pod)))
        if pod.restarts:
            line.append(f", {pod.restarts} restarts", style=BUSY)
        if pod.message:
            line.append(f": {pod.message}")
        tree.add(line)
    if len(pods) > SHOWN_PODS:
        tree.add(Text(f"and {len(pods) - SHOWN_PODS} more pods", style=CALM))


def _pod_style(pod: PodLook) -> str:
    if pod.state in ("Running", "Succeeded"):
        return GOOD
    return BUSY if pod.state in MOVING else BAD


def _current(tree: Tree, look: Look, health: Health, now: datetime) -> None:
    current = look.current
    if current is None:
        tree.add(Text("Current round: none", style=CALM))
        return
    status, limit = current.status, (look.spec.get("rounds") or {}).get("max", "-")
    style = PHASE_STYLES.get(status.step, BUSY)
    line = Text.assemble(f"Round {current.number} of {limit}: ", (status.step, style))
    line.append(f" for {ages.since(status.since, now)}", style=CALM)
    message = "" if status.message in health.message else status.message
    if status.reason or message:
        line.append("  " + ": ".join(part for part in (status.reason or "", message) if part))
    branch = tree.add(line)
    source = current.spec.get("source")
    if source:
        branch.add(Text(f"trains on data of round {source['round']} {short(source['digest'])}", style=CALM))
    _attempts(branch, look, current)
    _candidate(branch, look, current)
    _gate(branch, look, current)


def _attempts(tree: Tree, look: Look, current: RoundLook) -> None:
    """The present step's Job and its pods; older attempts as counts."""
    if current.status.step not in set(Step):
        return  # of a newer operator
    step = Step(current.status.step)
    step = transitions.last_working_step(current.status) if step is Step.FAILED else step
    tried = transitions.attempt_of(current.status, step)
    if tried.failures or tried.disruptions:
        text = f"{step}: attempt {tried.number}, {tried.failures} failures, {tried.disruptions} disruptions"
        tree.add(Text(text, style=BUSY))
    job = look.jobs.get((current.number, step, tried.number))
    if job is None:
        return
    state = "Suspended" if job.suspended else job.state
    style = BAD if state == "Failed" else GOOD if state in ("Running", "Succeeded") else BUSY
    branch = tree.add(Text.assemble(f"Job {job.name} ", (state, style)))
    pods = look.pods_of(STEP_WORDS[step], current.number, tried.number)
    if job.waiting and not pods:
        branch.add(Text(f"{job.waiting}: {job.waiting_message}", style=BAD))
    _pods(branch, pods)


def _candidate(tree: Tree, look: Look, current: RoundLook) -> None:
    stable = look.status.stable
    is_stable = stable is not None and stable.round == current.number
    if current.number in look.servings and not is_stable and current.status.step not in TERMINAL:
        servers = look.servings[current.number]
        _servers(tree, "candidate's servers", servers, look.pods_of("serving", current.number))


def _gate(tree: Tree, look: Look, current: RoundLook) -> None:
    gate = current.status.gate
    if gate.measurements is None and gate.verdict is None and gate.canary is None:
        return
    title = Text("gate")
    if gate.verdict:
        title.append(f" {gate.verdict}", style=VERDICT_STYLES.get(gate.verdict, ""))
    if gate.message:
        title.append(f"  {gate.message}")
    branch = tree.add(title)
    for line in gate_lines(current):
        branch.add(Text(line))
    steps = ((current.spec["settings"].get("gate") or {}).get("canary") or {}).get("steps") or []
    if gate.canary is not None and gate.canary.index < len(steps):
        wanted = steps[gate.canary.index]
        branch.add(
            Text(
                f"canary step {gate.canary.index + 1} of {len(steps)}: {look.status.canary_weight}% of new "
                f"conversations until {wanted['minTrajectories']} trajectories"
            )
        )


def gate_lines(current: RoundLook) -> list[str]:
    """Figures against their limits."""
    if current.status.gate.measurements is None:
        return []
    try:
        found = EvaluateResult.model_validate_json(current.status.gate.measurements)
    except ValidationError:
        return ["the gate's measurements cannot be read"]
    gate = current.spec["settings"].get("gate") or {}
    lines = []
    if found.agreement is not None:
        limit = (gate.get("agreement") or {}).get("maxMeanAbsLogprobDiff", "0.05")
        stable = found.agreement.stable_mean_abs
        versus = f", stable {stable:.4g}" if stable is not None else ""
        lines.append(
            f"agreement: mean {found.agreement.mean_abs:.4g} (limit {limit}{versus}), p99 {found.agreement.p99_abs:.4g}"
        )
    margins = {item["name"]: item.get("margin", "0.02") for item in gate.get("evaluations") or []}
    lines += [
        f"{item.name} {item.metric}: {item.candidate_mean:.4g} against {item.stable_mean:.4g}, difference "
        f"[{item.low:+.4g}, {item.high:+.4g}] (margin {margins.get(item.name, '-')}, {item.items} items)"
        for item in found.evaluations
    ]
    return lines


def _history(tree: Tree, look: Look) -> None:
    history = look.status.history
    if not history:
        return
    counts = Counter(entry.outcome for entry in history)
    parts = Text("History: ")
    for index, (phase, count) in enumerate(sorted(counts.items())):
        parts.append(", " if index else "")
        parts.append(f"{count} {phase}", style=PHASE_STYLES.get(phase, ""))
    last = history[-1]
    reward = f", reward {float(last.reward):.4g}" if last.reward else ""
    parts.append(f"; last: round {last.number} {last.outcome}{reward}", style=CALM)
    if look.status.consecutive_blocked:
        parts.append(f"; {look.status.consecutive_blocked} blocked in a row", style=BAD)
    tree.add(parts)
