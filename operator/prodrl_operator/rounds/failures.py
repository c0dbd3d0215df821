"""Why a Job or a server does not work, and whether another attempt can help.

Called by ``attempts``, ``deploying``, ``gating``, ``promoting``, ``stalling``.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import ValidationError

from prodrl.config.results import Failure
from prodrl_operator import names
from prodrl_operator.names import Reason
from prodrl_operator.rounds.observed import DeploymentView, JobView

IMAGE_NEVER = frozenset({"InvalidImageName", "ErrImageNeverPull"})
"""Waiting reasons that no waiting cures."""
IMAGE_PULL = frozenset({"ImagePullBackOff", "ErrImagePull", "RegistryUnavailable", "ImageInspectError"}) | IMAGE_NEVER
LACKING = frozenset({"CreateContainerConfigError", "CreateContainerError", "FailedMount", "FailedAttachVolume"})
"""A Secret, a ConfigMap or a volume is not there, or something is not as it should be."""
NOT_REFUSED = ("exceeded quota", "service account", "failed calling webhook")
"""What passes: room in a quota, a namespace that is being made, a webhook that is down."""
DISRUPTIONS = frozenset({"DisruptionTarget", "Preempting", "Shutdown", "NodeLost", "NodeShutdown", "Terminated"})
SIGTERM_EXIT = 143
PREEMPTED_EXIT = 80
IMAGE_GRACE_SECONDS = 60.0
"""A registry may be away for so long; then a pod that cannot pull has failed."""
REFUSED_GRACE_SECONDS = 60.0
"""What a pod lacks may be on its way for so long; then a person is told."""
CRASH_LOOP_RESTARTS = 3
"""One crash is tolerated: the memory of the pod before may not have been free yet."""

SPECIFIC = frozenset(
    {
        Reason.ARTIFACT_MISSING,
        Reason.IMAGE_PULL,
        Reason.START_DEADLINE,
        Reason.ACTIVE_DEADLINE,
        Reason.INSUFFICIENT_CAPACITY,
        Reason.QUOTA,
        Reason.OUT_OF_MEMORY,
    }
)
"""Reasons that say more than StepBackoffExceeded once the attempts are used up."""

REMEDIES: dict[Reason, str] = {
    Reason.ARTIFACT_MISSING: "look at the pod's log",
    Reason.IMAGE_PULL: "correct the image or its pull secret",
    Reason.START_DEADLINE: "look at the pod's events, or raise startDeadlineSeconds",
    Reason.ACTIVE_DEADLINE: "raise training.activeDeadlineSeconds or give it faster hardware",
    Reason.INSUFFICIENT_CAPACITY: "add nodes, lower resources, or set serving.surge: Replace",
    Reason.INVALID_CONFIGURATION: "create or correct what it names",
    Reason.QUOTA: "raise the namespace's quota",
    Reason.OUT_OF_MEMORY: "raise the memory limit, or lower training.microBatchTokens",
    Reason.STORAGE_FULL: "free space or choose another storage",
    Reason.CREDENTIALS: "renew the Secret named by storage.secretRef",
    Reason.CRASH_LOOP: "look at the server's log",
}


@dataclass(frozen=True)
class Cause:
    """Why something failed."""

    reason: Reason
    message: str
    is_retryable: bool = True
    is_disruption: bool = False
    """Taken away by the cluster: does not count against the limit of failures."""


def job_cause(job: JobView) -> Cause:
    """Of a Job that failed."""
    message = _text(job.message) or job.reason or f"exit code {job.exit_code}"
    if job.reason == "DeadlineExceeded":  # first: a deadline ends pods by SIGTERM, which looks like a disruption
        return Cause(Reason.ACTIVE_DEADLINE, f"the Job exceeded its active deadline: {message}")
    if job.reason in DISRUPTIONS or job.exit_code in (PREEMPTED_EXIT, SIGTERM_EXIT):
        return Cause(Reason.PREEMPTED, message, is_disruption=True)
    if job.reason == "OOMKilled":
        return Cause(Reason.OUT_OF_MEMORY, message)
    return exit_cause(job.exit_code, message)


def exit_cause(exit_code: int | None, message: str) -> Cause:
    """Of a process that ended with this code."""
    named, is_retryable = names.EXIT_CODES.get(exit_code or 0, ("", True))
    reason = Reason(named) if named in {known.value for known in Reason} else Reason.STEP_FAILED
    return Cause(reason, message, is_retryable)


def pending_cause(job: JobView, elapsed: float, start_deadline: float) -> Cause | None:
    """Of a Job whose pods do not run: None while it may still come."""
    grace = min(IMAGE_GRACE_SECONDS, start_deadline)
    if job.waiting in IMAGE_NEVER or (job.waiting in IMAGE_PULL and elapsed > grace):
        return Cause(Reason.IMAGE_PULL, f"{job.waiting}: {job.waiting_message}", is_retryable=False)
    if elapsed <= start_deadline:
        return None
    return _overdue(job.waiting, job.waiting_message, start_deadline)


def serving_cause(servers: DeploymentView, elapsed: float, start_deadline: float) -> Cause | None:
    """Of servers that are not ready: None while they may still come."""
    grace = min(IMAGE_GRACE_SECONDS, start_deadline)
    if servers.waiting in IMAGE_NEVER or (servers.waiting in IMAGE_PULL and elapsed > grace):
        return Cause(Reason.IMAGE_PULL, f"{servers.waiting}: {servers.waiting_message}", is_retryable=False)
    crash = crash_cause(servers)
    if crash is not None or elapsed <= start_deadline:
        return crash
    return _overdue(servers.waiting, servers.waiting_message, start_deadline)


def crash_cause(servers: DeploymentView) -> Cause | None:
    """Of servers that crash again and again; a crash-looping server is not a busy one."""
    if servers.restarts < CRASH_LOOP_RESTARTS:
        return None
    message = _text(servers.exit_message) or f"{servers.restarts} restarts, last exit {servers.exit_code}"
    if servers.last_exit == "OOMKilled":
        return Cause(Reason.OUT_OF_MEMORY, message)
    cause = exit_cause(servers.exit_code, message)
    return cause if cause.reason is not Reason.STEP_FAILED else Cause(Reason.CRASH_LOOP, message)


def remedy(reason: Reason) -> str:
    """What a person can do about it."""
    known = REMEDIES.get(reason)
    return f"{known}; then set requests.retryToken" if known else "correct the cause, then set requests.retryToken"


def is_refused(waiting: str, message: str) -> bool:
    """Whether a pod lacks something that only a person can provide or correct; once it is there, the pod starts."""
    text = message.lower()
    if waiting == "Unschedulable":  # one that is there and not bound yet may have a slow provisioner
        return "persistentvolumeclaim" in text and "not found" in text
    if waiting == "FailedCreate":
        is_denied = any(word in text for word in ("forbidden", "invalid", "denied the request"))
        return is_denied and not any(word in text for word in NOT_REFUSED)
    return waiting in LACKING


def _overdue(waiting: str, message: str, deadline: float) -> Cause:
    detail = f"{waiting}: {message}" if waiting else "no pod was ready"
    text = f"not running within {deadline:g} s: {detail}"
    if is_refused(waiting, message):
        return Cause(Reason.INVALID_CONFIGURATION, text, is_retryable=False)
    if waiting == "Unschedulable":
        return Cause(Reason.INSUFFICIENT_CAPACITY, text)
    if waiting == "FailedCreate" and "quota" in message.lower():
        return Cause(Reason.QUOTA, text)
    return Cause(Reason.START_DEADLINE, text)


def _text(message: str) -> str:
    """A termination message for people: a :class:`Failure`, or whatever stands there."""
    try:
        failure = Failure.model_validate_json(message)
    except ValidationError:
        return message.strip()[:500]
    return f"{failure.reason}: {failure.message}"
