"""One look at one round: what every step file is given."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from prodrl_operator.api.round import Round, RoundStatus
from prodrl_operator.api.run import Run, RunSpec
from prodrl_operator.names import Reason, Step
from prodrl_operator.rounds import times, transitions
from prodrl_operator.rounds.decision import Note, Outcome
from prodrl_operator.rounds.observed import Observed

LOOK_SECONDS = 5.0
"""Between two looks at something that tells nobody when it changes (counters of the gateway)."""


@dataclass(frozen=True)
class Turn:
    """A round, all that was observed, and the time."""

    observed: Observed
    round: Round
    now: datetime

    @property
    def run(self) -> Run:
        """The run."""
        return self.observed.run

    @property
    def number(self) -> int:
        """The round's number."""
        return self.round.spec.number

    @property
    def status(self) -> RoundStatus:
        """The round's stored status."""
        return self.round.status

    @property
    def settings(self) -> RunSpec:
        """The run's spec as frozen when the round began."""
        return self.round.spec.settings

    @property
    def elapsed_seconds(self) -> float:
        """How long the present step, or attempt, has had; pauses do not count."""
        return times.elapsed_seconds(self.status.since, self.now, self.status.paused_since)

    def seconds_of(self, created: datetime | None) -> float:
        """The same of an object that may be younger: a step can wait for long before anything could be made for it."""
        age = self.elapsed_seconds if created is None else max((self.now - created).total_seconds(), 0.0)
        return min(self.elapsed_seconds, age)

    def stay(self, reason: Reason | None = None, message: str = "", requeue: float | None = None) -> Outcome:
        """Nothing changes but what is said of it."""
        update = {"reason": reason.value if reason else None, "message": message}
        return Outcome(self.status.model_copy(update=update), requeue_after_seconds=requeue)

    def go(
        self, step: Step, *, status: RoundStatus | None = None, reason: Reason | None = None, message: str = ""
    ) -> Outcome:
        """On to another step of work."""
        status = transitions.enter(
            status or self.status, step, times.stamp(self.now), reason.value if reason else None, message
        )
        note = Note(reason=f"Step{step}", message=f"round {self.number}: {step}", number=self.number, key=self.key)
        return Outcome(status, notes=(note,), requeue_after_seconds=0.0)

    def end(self, step: Step, reason: Reason, message: str, *, status: RoundStatus | None = None) -> Outcome:
        """The round ends here: Failed, Blocked, Aborted or Superseded."""
        status = transitions.enter(status or self.status, step, times.stamp(self.now), reason.value, message)
        note = Note(
            reason=reason,
            message=f"round {self.number}: {step}: {message}",
            number=self.number,
            type="Warning",
            key=self.key,
        )
        return Outcome(status, notes=(note,), requeue_after_seconds=0.0)

    @property
    def key(self) -> str:
        """Tells one stay in a step from the next."""
        return f"{self.status.step}/{self.status.since}"
