"""Every label, annotation, condition type, reason, finalizer and exit code, in one place. Constants only."""

from __future__ import annotations

from enum import StrEnum

GROUP = "prodrl.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
FIELD_MANAGER = "prodrl-operator"
FINALIZER = f"{GROUP}/finalizer"

LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "prodrl-operator"
LABEL_NAME = "app.kubernetes.io/name"
"""Of the operator's own pods, with the value of ``MANAGED_BY``."""
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_RUN = f"{GROUP}/run"
LABEL_ROUND = f"{GROUP}/round"
LABEL_STEP = f"{GROUP}/step"
LABEL_ATTEMPT = f"{GROUP}/attempt"
LABEL_JOB_NAME = "batch.kubernetes.io/job-name"
LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
"""A Job with this label is admitted by Kueue: its ``spec.suspend`` is not ours."""
ANNOTATION_SUSPENDED = f"{GROUP}/suspended"
"""On a Job that ``spec.suspend`` of its run suspended."""
ANNOTATION_MANIFEST = f"{GROUP}/manifest"
"""On our children only: hash of the manifest that was applied."""

MAX_RUN_NAME = 40
"""Longest run name: names of children append at most 23 characters and must stay DNS labels (63)."""

SERVING_PORT = 8000
GATEWAY_PORT = 8080
GATEWAY_ADMIN_PORT = 8081
PROGRESS_PORT = 9100


class Step(StrEnum):
    """Where a round stands. The first six work; the others end it."""

    PENDING = "Pending"
    COLLECTING = "Collecting"
    TRAINING = "Training"
    EXPORTING = "Exporting"
    CANARY_DEPLOYING = "CanaryDeploying"
    GATING = "Gating"
    PROMOTING = "Promoting"
    PROMOTED = "Promoted"
    BLOCKED = "Blocked"
    FAILED = "Failed"
    ABORTED = "Aborted"
    SUPERSEDED = "Superseded"


TERMINAL = frozenset({Step.PROMOTED, Step.BLOCKED, Step.FAILED, Step.ABORTED, Step.SUPERSEDED})


class Condition(StrEnum):
    """Condition types of a ProdRLRun (Ready, Stalled and Reconciling as kstatus reads them)."""

    READY = "Ready"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    PROGRESSING = "Progressing"
    STABLE_AVAILABLE = "StableAvailable"
    SUSPENDED = "Suspended"
    COMPLETED = "Completed"


class Verdict(StrEnum):
    """What a gate says, written once."""

    PASS = "Pass"  # noqa: S105  (a verdict, not a password)
    FAIL = "Fail"
    INCONCLUSIVE = "Inconclusive"
    ERROR = "Error"


class Reason(StrEnum):
    """Reasons of conditions, rounds and events."""

    LOOP_RUNNING = "LoopRunning"
    STARTING = "Starting"
    SUSPENDED = "Suspended"
    USER_REQUESTED = "UserRequested"
    NOT_SUSPENDED = "NotSuspended"
    COMPLETED = "MaxRoundsReached"
    RUNNING = "Running"
    INVALID_SPEC = "InvalidSpec"
    STABLE_UNAVAILABLE = "StableUnavailable"
    STABLE_AVAILABLE = "StableAvailable"
    NO_STABLE = "NoStableYet"
    APPLYING_GENERATION = "ApplyingGeneration"
    GENERATION_IN_FORCE = "GenerationInForce"
    NOT_STALLED = "NotStalled"
    GATE_BLOCKED = "GateBlocked"
    GATE_INCONCLUSIVE = "GateInconclusive"
    GATE_PASSED = "GatePassed"
    AWAITING_APPROVAL = "AwaitingApproval"
    CONSECUTIVE_BLOCKS = "ConsecutiveBlocksExceeded"
    STEP_BACKOFF = "StepBackoffExceeded"
    STEP_FAILED = "StepFailed"
    ARTIFACT_MISSING = "ArtifactMissing"
    START_DEADLINE = "StartDeadlineExceeded"
    ACTIVE_DEADLINE = "ActiveDeadlineExceeded"
    IMAGE_PULL = "ImagePullFailed"
    NODE_LOST = "NodeLost"
    QUOTA = "QuotaExceeded"
    INSUFFICIENT_CAPACITY = "InsufficientCapacity"
    CRASH_LOOP = "CrashLoop"
    OUT_OF_MEMORY = "OutOfMemory"
    STORAGE_FULL = "StorageFull"
    CREDENTIALS = "CredentialsRejected"
    INVALID_CONFIGURATION = "InvalidConfiguration"
    INVALID_DATA = "InvalidData"
    NUMERICS = "Numerics"
    PREEMPTED = "Preempted"
    ABORTED = "AbortRequested"
    SUPERSEDED = "Superseded"
    FOREIGN_OBJECT = "ForeignObject"
    BASELINE_UNAVAILABLE = "BaselineUnavailable"
    NO_DATA = "NoData"
    FORBIDDEN = "Forbidden"
    QUEUED = "Queued"
    APPROVED = "Approved"
    ATTEMPT_FAILED = "AttemptFailed"
    REQUEST_IGNORED = "RequestIgnored"
    RETRY_REQUESTED = "RetryRequested"
    ROUND_MISSING = "RoundMissing"
    ARTIFACTS_DELETED = "ArtifactsDeleted"
    RETENTION_FAILED = "RetentionFailed"


EXIT_CODES: dict[int, tuple[str, bool]] = {
    1: ("InternalError", True),
    64: ("InvalidConfiguration", False),
    65: ("InvalidData", False),
    69: ("PeerUnavailable", True),
    74: ("StorageFull", False),
    77: ("CredentialsRejected", False),
    78: ("OutOfMemory", True),
    79: ("Numerics", False),
    80: ("Preempted", True),
}
"""Exit code of a step -> (reason, whether another attempt can help). Preempted does not count as a failure."""
