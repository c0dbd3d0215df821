"""``logs``: which pods are meant, and their lines, together where there are several. Called by ``cli``."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prodrl_operator.builders.metadata import STEP_WORDS
from prodrl_operator.errors import InvalidError, NotFoundError, OperatorError
from prodrl_operator.names import LABEL_ATTEMPT, LABEL_ROUND, Step
from prodrl_operator.plugin.access import PodAccess
from prodrl_operator.plugin.looking import Look, PodLook
from prodrl_operator.rounds import transitions

STEPS = (*STEP_WORDS.values(), "gateway")
"""What may be asked for."""
COMPONENTS = {word: word for word in STEPS} | {"serve": "serving"}
LOGLESS = frozenset({"Pending", "ContainerCreating", "PodInitializing", "Unschedulable", "SchedulingGated"})


@dataclass(frozen=True)
class Wanted:
    """What is to be shown."""

    step: str
    round: int | None = None
    """None: the newest that has pods."""
    attempt: int | None = None
    """None: the newest."""
    container: str | None = None
    """None: the pod's first."""
    follow: bool = False
    tail: int | None = None
    previous: bool = False
    """Before the container's last restart."""


def pods(look: Look, wanted: Wanted) -> list[PodLook]:
    """The pods that are meant.

    Raises:
        InvalidError: There is no such step.
        NotFoundError: No pod of it is left.
    """
    if wanted.step not in STEPS:
        raise InvalidError(f"Step: must be one of {', '.join(STEPS)}, got {wanted.step!r}; name one")
    found = look.pods_of(COMPONENTS[wanted.step], wanted.round, wanted.attempt)
    for label in (LABEL_ROUND, LABEL_ATTEMPT):
        numbers = [int(pod.labels[label]) for pod in found if label in pod.labels]
        found = [pod for pod in found if not numbers or pod.labels.get(label) == str(max(numbers))]
    if not found:
        raise NotFoundError(_nothing(look, wanted))
    return found


def note(look: Look, wanted: Wanted) -> str | None:
    """Says that the lines are of an older round than a person may think."""
    current = look.status.current_round
    numbers = {int(pod.labels[LABEL_ROUND]) for pod in pods(look, wanted) if LABEL_ROUND in pod.labels}
    if wanted.round is not None or wanted.step == "serve" or current is None or not numbers - {current.number}:
        return None
    return f"round {current.number} has no pod of {wanted.step} (yet); these lines are of round {max(numbers)}"


def _nothing(look: Look, wanted: Wanted) -> str:
    number = f" of round {wanted.round}" if wanted.round is not None else ""
    attempt = f", attempt {wanted.attempt}" if wanted.attempt is not None else ""
    text = f"ProdRLRun {look.namespace}/{look.name}: no pod of {wanted.step}{number}{attempt} is there"
    if "pods" in look.hidden:
        return f"{text} that you may list; ask for the verb list on pods"
    this = look.round(wanted.round) if wanted.round is not None else look.current
    step = next((step for step, word in STEP_WORDS.items() if word == wanted.step), None)
    if this is None or step is None:
        return f"{text}; see kubectl prodrl status"
    tried = transitions.attempt_of(this.status, Step(step))
    said = this.status.message or this.status.gate.message
    about = f"round {this.number} is at {this.status.step}, {tried.failures} failures of {step}"
    return f"{text}; {about}{f': {said}' if said else ''}"


def show(access: PodAccess, look: Look, wanted: Wanted, write: Callable[[str], None]) -> int:
    """Write the lines; with several pods each line says whose it is. Returns the number of pods that answered."""
    found = pods(look, wanted)
    if len(found) == 1:
        return int(_stream(access, look, wanted, found[0], write))
    lines: queue.SimpleQueue[str | bool] = queue.SimpleQueue()

    def one(pod: PodLook) -> None:
        answered = False
        try:
            answered = _stream(access, look, wanted, pod, lambda line: lines.put(f"[{pod.name}] {line}"))
        finally:
            lines.put(answered)  # whatever happened: the others' lines are waited for together

    # Daemons: Ctrl-C must not wait for a log that never ends.
    for pod in found:
        threading.Thread(target=one, args=(pod,), name=f"logs-{pod.name}", daemon=True).start()
    ended = answered = 0
    while ended < len(found):
        item = lines.get()
        if isinstance(item, bool):
            ended, answered = ended + 1, answered + int(item)
        else:
            write(item)
    return answered


def _stream(access: PodAccess, look: Look, wanted: Wanted, pod: PodLook, write: Callable[[str], None]) -> bool:
    """One pod; False where it has no log to give."""
    if pod.state in LOGLESS and not wanted.follow and wanted.container is None:
        write(f"pod {pod.name} has no log yet: {pod.state}{f': {pod.message}' if pod.message else ''}")
        return False
    container = wanted.container or pod.container or None
    try:
        for line in _lines(access, look.namespace, pod.name, container, wanted):
            write(line)
    except OperatorError as exc:
        write(f"pod {pod.name} ({pod.state}{f': {pod.message}' if pod.message else ''}): {exc}")
        return False
    return True


def _lines(access: PodAccess, namespace: str, pod: str, container: str | None, wanted: Wanted) -> Iterator[str]:
    if wanted.previous:
        return access.previous_logs(namespace, pod, container, wanted.tail)
    return access.logs(namespace, pod, container, follow=wanted.follow, tail_lines=wanted.tail)
