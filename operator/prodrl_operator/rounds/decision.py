"""What ``decide`` answers: new statuses, and intents that the controller turns into manifests and calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from prodrl.config.serving import Route
from prodrl_operator.api.round import RoundStatus, SourcePolicy
from prodrl_operator.api.run import RunStatus
from prodrl_operator.names import Reason, Step


@dataclass(frozen=True)
class AddFinalizer:
    """Keep the run until its traffic is safe."""


@dataclass(frozen=True)
class RemoveFinalizer:
    """Let the run go."""


@dataclass(frozen=True)
class CreateRound:
    """Begin a round."""

    number: int
    source: SourcePolicy | None
    lineage_round: int


@dataclass(frozen=True)
class DeleteRound:
    """Remove a finished round's object; its Jobs go with it."""

    number: int


@dataclass(frozen=True)
class EnsureGateway:
    """ConfigMap, Service, Deployment and disruption budget, under the settings of a round (None: the run's)."""

    settings_of: int | None


@dataclass(frozen=True)
class EnsureRoutes:
    """The ConfigMap with the routes that a restarted replica starts from."""

    routes: tuple[Route, ...]


@dataclass(frozen=True)
class EnsureServing:
    """ConfigMap, Service and Deployment of the policy that a round made. Created when missing, never changed."""

    number: int


@dataclass(frozen=True)
class DeleteServing:
    """Remove them again."""

    number: int
    only_deployment: bool = False
    """Keep the address: the Deployment comes back (surge Replace)."""


@dataclass(frozen=True)
class EnsureJob:
    """One attempt at a step: ConfigMap and Job."""

    number: int
    step: Step
    attempt: int
    source: int | None = None
    """The round that made the source policy."""
    lineage: int | None = None
    """The round whose checkpoint is the start."""
    stable: int | None = None
    """The round that made the policy to compare with; None: nothing to compare with."""
    spent: tuple[int, ...] = ()
    """Rounds whose weights the step may let go."""


@dataclass(frozen=True)
class DeleteJob:
    """Stop an attempt that is not wanted any more, or not now."""

    number: int
    step: Step
    attempt: int


@dataclass(frozen=True)
class SuspendJob:
    """Set ``spec.suspend`` of a Job that no queue manages."""

    number: int
    step: Step
    attempt: int
    suspend: bool


@dataclass(frozen=True)
class OrphanServing:
    """Take the owner from what serves users: it outlives the run."""

    number: int


@dataclass(frozen=True)
class DeleteOrphans:
    """Remove what serves and has no owner, save the gateway and the servers of a round that outlive the run."""

    kept: int | None


Intent = (
    AddFinalizer
    | RemoveFinalizer
    | CreateRound
    | DeleteRound
    | EnsureGateway
    | EnsureRoutes
    | EnsureServing
    | DeleteServing
    | EnsureJob
    | DeleteJob
    | SuspendJob
    | OrphanServing
    | DeleteOrphans
)


@dataclass(frozen=True)
class Note:
    """An event to be: one a transition, however often the transition is decided."""

    reason: Reason | str
    message: str
    number: int | None = None
    """The round it is about; None: the run only."""
    type: Literal["Normal", "Warning"] = "Normal"
    key: str = ""
    """What tells this occurrence from others of the same reason and round."""


@dataclass(frozen=True)
class Outcome:
    """What one step file answers: the statuses after it looked."""

    round: RoundStatus
    changes: dict[str, object] = field(default_factory=dict)
    """Fields of the run's status."""
    notes: tuple[Note, ...] = ()
    requeue_after_seconds: float | None = None


@dataclass(frozen=True)
class Decision:
    """The whole answer."""

    run_status: RunStatus
    intents: tuple[Intent, ...] = ()
    """In order: the controller carries out the first that is not fulfilled yet, and none of the rest."""
    routes: tuple[Route, ...] | None = None
    """What the gateway's replicas shall apply; None: leave them alone."""
    round_number: int | None = None
    round_status: RoundStatus | None = None
    """Written before the run's status; None: unchanged."""
    events: tuple[Note, ...] = ()
    """Emitted when the statuses are written."""
    requeue_after_seconds: float | None = None
    """None: only when something changes, or at the next resync."""
