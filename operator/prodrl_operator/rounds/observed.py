"""What was read of a run and its children in one look. Built by ``observing``, judged by ``decide``.

No behaviour beyond look-ups: everything that acts is elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from prodrl_operator import names
from prodrl_operator.api.judgement import Counters, Judgement
from prodrl_operator.api.round import Round
from prodrl_operator.api.run import Run
from prodrl_operator.names import Reason, Step

JobKey = tuple[int, Step, int]
"""(round, step, attempt): what names a Job."""


@dataclass(frozen=True)
class JobView:
    """One attempt at a step."""

    name: str
    uid: str
    state: Literal["Pending", "Running", "Succeeded", "Failed"]
    """Pending until all its pods ran: those of a training on several nodes wait for each other."""
    suspended: bool = False
    """``spec.suspend``: by us or by a queue."""
    is_queued: bool = False
    """Carries a queue label: ``spec.suspend`` belongs to Kueue."""
    exit_code: int | None = None
    """Of the pod that decided; None where no pod is left to tell."""
    message: str = ""
    """Termination message of that pod."""
    reason: str = ""
    """What Kubernetes says of the failure: OOMKilled, DeadlineExceeded, DisruptionTarget, Evicted ..."""
    waiting: str = ""
    """Why no pod runs: ImagePullBackOff, Unschedulable, FailedCreate, FailedMount ..."""
    waiting_message: str = ""
    """The same for people."""
    deleting: bool = False
    """Has a deletionTimestamp."""
    begun: datetime | None = None
    """When its pods could be made; a suspension ends that."""
    is_suspended_by_us: bool = False
    """``suspend`` was set by this operator; who else set it takes it back."""

    @property
    def is_active(self) -> bool:
        """Whether it holds, or will hold, hardware."""
        return self.state in ("Pending", "Running") or self.deleting

    def is_suspension_due(self, *, suspend: bool) -> bool:
        """Whether ``spec.suspend`` is ours to set, and is not what the run wants."""
        is_ours = self.state in ("Pending", "Running") and not self.deleting and not self.is_queued
        return is_ours and self.suspended != suspend and (suspend or self.is_suspended_by_us)

    def is_withdrawal_due(self, *, suspend: bool) -> bool:
        """Whether it must leave its queue: ``suspend`` is the queue's to set, so a suspended run takes the Job away."""
        return suspend and self.is_queued and self.is_active


@dataclass(frozen=True)
class LivePods:
    """Pods of one attempt that have not ended, whether their Job is still there or not."""

    name: str
    """Of the first."""
    lost: str = ""
    """One of them should be gone for long, and is not: its node does not answer."""


@dataclass(frozen=True)
class DeploymentView:
    """The servers of one policy, or the gateway's pods."""

    uid: str
    desired: int
    ready: int
    is_current: bool = True
    """The Deployment controller has seen the present spec."""
    waiting: str = ""
    """Why a pod does not start: ImagePullBackOff, CrashLoopBackOff, Unschedulable, FailedCreate, FailedMount ..."""
    waiting_message: str = ""
    """The same for people."""
    restarts: int = 0
    """Largest restart count of a container that is not ready."""
    last_exit: str = ""
    """Why a container ended last: OOMKilled, Error ..."""
    exit_code: int | None = None
    """Of that container."""
    exit_message: str = ""
    """Its termination message."""
    deleting: bool = False
    """Has a deletionTimestamp."""
    has_pods: bool = True
    """Pods exist, perhaps terminating: hardware is held."""
    created: datetime | None = None
    """When it was made."""
    unready_since: datetime | None = None
    """Since when a pod that should be ready is not; None: all are."""

    @property
    def is_ready(self) -> bool:
        """All replicas serve."""
        return self.is_current and not self.deleting and 0 < self.desired <= self.ready


@dataclass(frozen=True)
class GatewayReplica:
    """One gateway pod and what it answered; ``version`` None with ``reachable`` False: it did not."""

    url: str
    """Of its admin port."""
    reachable: bool
    version: str | None = None
    """Of the routes it applied."""
    counters: Mapping[str, Counters] = field(default_factory=dict)
    """By policy digest."""
    conversations: Mapping[str, int] = field(default_factory=dict)
    """Active ones, by policy digest."""


@dataclass(frozen=True)
class CanaryLook:
    """Traffic as every replica reports it; there is none (None) while one of them cannot be reached."""

    candidate: Counters
    """Totals of the candidate."""
    stable: Counters
    """Totals of stable."""
    trajectories: int = 0
    """The candidate's since the canary step began."""
    is_behind: bool = False
    """A counter is below the step's baseline: a replica started afresh."""
    interim: Judgement | None = None
    """The guards at a look; None before a canary step began."""
    final: Judgement | None = None
    """The guards at the end of a step."""


@dataclass(frozen=True)
class Hindrance:
    """Something that only a person can clear away."""

    reason: Reason
    message: str


@dataclass(frozen=True)
class Observed:
    """All that ``decide`` knows."""

    run: Run
    rounds: Mapping[int, Round] = field(default_factory=dict)
    """All ProdRLRound objects of the run, by number."""
    jobs: Mapping[JobKey, JobView] = field(default_factory=dict)
    """All Jobs of these rounds."""
    pods: Mapping[JobKey, LivePods] = field(default_factory=dict)
    """What still works, or goes away, of every attempt of the run's name; a Job can be gone before its pods are."""
    servings: Mapping[int, DeploymentView] = field(default_factory=dict)
    """The policies' Deployments, by the round that made the policy."""
    remnants: frozenset[int] = frozenset()
    """Rounds for whose servers a ConfigMap or a disruption budget is there, perhaps nothing else."""
    urls: Mapping[int, str] = field(default_factory=dict)
    """Base URLs of the policies' Services, by the round that made the policy."""
    gateway: DeploymentView | None = None
    """The gateway's Deployment."""
    endpoint: str | None = None
    """Base URL for users."""
    replicas: tuple[GatewayReplica, ...] = ()
    """The gateway's ready pods."""
    routes_version: str | None = None
    """Version of the table that the present status asks for."""
    settled_versions: frozenset[str] = frozenset()
    """Versions of the tables in which nothing new begins on the previous policy: with and without its route."""
    measured: Judgement | None = None
    """The gate on the current round's measurements; None where there are none."""
    look: CanaryLook | None = None
    """Canary traffic of the current round."""
    has_orphans: bool = False
    """Something that serves users has no owner: garbage collection will not take it."""
    is_kept_apart: bool = True
    """What would outlive the run has no owner, and nothing else is without one: garbage collection does it all."""
    hindrance: Hindrance | None = None
    """Met while acting: a foreign object of our name, a refusal of the API server."""

    @property
    def numbers(self) -> list[int]:
        """Numbers of the rounds, ascending."""
        return sorted(self.rounds)

    @property
    def last_accounted(self) -> int:
        """The newest round in the run's history; -1: none."""
        history = self.run.status.history
        return history[-1].number if history else -1

    def is_unfinished(self, number: int) -> bool:
        """Whether a round is in work, or failed and waits for a person."""
        step = Step(self.rounds[number].status.step)
        return step not in names.TERMINAL or (step is Step.FAILED and number > self.last_accounted)

    @property
    def current(self) -> Round | None:
        """The oldest unfinished round."""
        return next((self.rounds[number] for number in self.numbers if self.is_unfinished(number)), None)

    @property
    def ahead(self) -> Round | None:
        """AsyncOneRound: the round after the current one, which may collect already."""
        unfinished = [number for number in self.numbers if self.is_unfinished(number)]
        return self.rounds[unfinished[1]] if len(unfinished) > 1 else None

    @property
    def gateway_settings_of(self) -> int | None:
        """The round whose settings the gateway has: the newest while it is in work; None: the run's own.

        Between rounds a spec that the API server refuses can so be corrected before another round takes it. A
        promotion that is committed waits for the gateway: settings with which that cannot run must not be kept for it.
        """
        newest, stable = self.numbers[-1] if self.numbers else None, self.run.status.stable
        if newest is None or (stable is not None and stable.round == newest):
            return None
        return newest if self.is_unfinished(newest) else None

    @property
    def stable_round(self) -> Round | None:
        """The round that made the stable policy."""
        stable = self.run.status.stable
        return self.rounds.get(stable.round) if stable else None

    @property
    def has_converged(self) -> bool:
        """Whether every gateway replica applied the present routes."""
        return bool(self.replicas) and all(
            replica.reachable and replica.version == self.routes_version for replica in self.replicas
        )

    def remaining_conversations(self, digest: str) -> int | None:
        """Active conversations on a replaced policy; None while a replica cannot tell, or may begin new ones there."""
        if not self.replicas or not all(replica.version in self.settled_versions for replica in self.replicas):
            return None
        return sum(replica.conversations.get(digest, 0) for replica in self.replicas)
