"""``watch``: the tree redrawn on a terminal, or a line for each change. Called by ``cli``.

An API server that does not answer is said once and asked again; only a refusal ends the watch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from prodrl_operator.errors import ClusterUnavailableError, NotFoundError
from prodrl_operator.names import Condition
from prodrl_operator.plugin import health, tree
from prodrl_operator.plugin.listing import short
from prodrl_operator.plugin.looking import Look

QUIET = frozenset({"Running", "Succeeded", "Pending", "ContainerCreating", "PodInitializing", "Terminating"})


def facts(look: Look) -> dict[str, str]:
    """What is worth a line when it changes: subject -> what is so."""
    status, found = look.status, {}
    for item in status.conditions:
        message = f": {item.message}" if item.message and item.type != Condition.PROGRESSING else ""
        found[item.type] = f"{item.status} {item.reason}{message}"
    for this in look.rounds:
        reason = f" {this.status.reason}" if this.status.reason else ""
        found[f"round {this.number}"] = f"{this.status.step}{reason}"
        if this.status.gate.verdict:
            found[f"round {this.number} gate"] = f"{this.status.gate.verdict}: {this.status.gate.message}"
    found["stable"] = f"round {status.stable.round} {short(status.stable.digest)}" if status.stable else "none yet"
    found["canary"] = f"{status.canary_weight}% of new conversations"
    for pod in look.pods:
        if pod.state not in QUIET:
            found[f"pod {pod.name}"] = f"{pod.state}: {pod.message}" if pod.message else pod.state
    return found


def first_lines(look: Look) -> list[str]:
    """Where a watch begins: the state, not the whole past."""
    judged = health.judge(look)
    current = look.current
    place = f"round {current.number} {current.status.step}" if current else "no round yet"
    return [f"{look.name}: {judged.state}, {place}{f'; {judged.message}' if judged.message else ''}"]


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """A line for each subject that is new or differs; what went away is not news."""
    return [f"{subject}: {said}" for subject, said in after.items() if before.get(subject) != said]


@dataclass
class Watch:
    """Looks again and again until the run is completed or gone."""

    look: Callable[[], Look]
    pause: Callable[[], None]
    now: Callable[[], datetime]
    console: Console
    _facts: dict[str, str] | None = field(default=None, init=False)
    _last: Look | None = field(default=None, init=False)
    _away_since: datetime | None = field(default=None, init=False)

    def turn(self) -> None:
        """Watch to the end."""
        if not self.console.is_terminal:
            while not self._step(self._say):
                self.pause()
            return
        with Live(console=self.console, auto_refresh=False, screen=False, vertical_overflow="crop") as live:
            while not self._step(lambda line: None):
                live.update(self._view(), refresh=True)
                self.pause()
            live.update(self._view(), refresh=True)

    def _step(self, say: Callable[[str], None]) -> bool:
        """One look; True at the end."""
        try:
            seen = self.look()
        except ClusterUnavailableError as exc:
            if self._away_since is None:
                self._away_since = self.now()
                say(f"the API server does not answer, asking again: {exc}")
            return False
        except NotFoundError:
            if self._last is None:
                raise
            say(f"{self._last.name}: the run was deleted")
            return True
        if self._away_since is not None:
            say("the API server answers again")
            self._away_since = None
        after = facts(seen)
        for line in first_lines(seen) if self._facts is None else changes(self._facts, after):
            say(line)
        self._facts, self._last = after, seen
        return seen.is_true(Condition.COMPLETED)

    def _say(self, line: str) -> None:
        self.console.print(f"{self.now():%Y-%m-%dT%H:%M:%SZ} {line}", soft_wrap=True)

    def _view(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._away_since is not None:
            parts.append(Text(f"the API server does not answer since {self._away_since:%H:%M:%S} UTC", style=tree.BAD))
        if self._last is not None:
            parts.append(tree.draw(self._last, health.judge(self._last), self.now()))
        return Group(*parts)
