"""CEL rules of the CRDs, by path. Used by ``crd``.

An API server reports a broken rule with the field's path and value; the message adds what is wrong and the remedy.
Rules keep to core CEL with ``matches``, ``startsWith``, ``size``, ``double`` and the macros, so that they can be
evaluated without a server too. An immutable field is compared at its parent: a rule on an optional field itself is not
evaluated when the field is added or removed.
"""

from __future__ import annotations

from typing import Any

from prodrl_operator import names
from prodrl_operator.api.model import DECIMAL, MESSAGE
from prodrl_operator.api.run import PLACE

Rules = list[dict[str, str]]

POD_SETTINGS = ("serving", "gateway", "collect", "training", "export", "evaluate")
"""Parts of the spec that describe pods."""


def _rule(rule: str, message: str, at: str = "") -> dict[str, str]:
    """A rule; ``at`` is the field below the rule's own that is to be reported."""
    return {"rule": rule, "message": message, **({"fieldPath": at} if at else {})}


def _between(low: str, high: str, remedy: str) -> Rules:
    """A decimal string within limits; ``low`` and ``high`` carry their operator, for example ``>= 0``."""
    bounds = [f"double(self) {bound if '.' in bound else bound + '.0'}" for bound in (low, high)]
    rule = " && ".join([f"self.matches('{DECIMAL}')", *bounds])
    return [_rule(rule, f"must be {low} and {high}, written like 0.5 or 5e-1: {remedy}")]


def worded(schema: dict[str, Any]) -> Rules:
    """The rule of a type that says in words what its pattern asks for."""
    return [_rule(f"self.matches('{schema['pattern']}')", schema[MESSAGE])]


def _place(remedy: str) -> Rules:
    """A folder, or a bucket and a prefix, that every implementation of a store reads alike."""
    return [
        _rule(f"self.matches('{PLACE}')", f"must be file:///folder or s3://bucket/prefix{remedy}"),
        _rule(
            "!self.startsWith('s3://') || self.matches('^s3://[a-z0-9][-a-z0-9.]{1,61}[a-z0-9](/[^?#]*)?$')",
            "must be s3://bucket/prefix; a bucket's name has 3 to 63 lower-case letters, digits, dots and hyphens",
        ),
        _rule(
            "!self.matches('[[:cntrl:]]') && !self.matches('^[a-z0-9]+://.*(/[.]{0,2}/|/[.]{1,2}$)')",
            "must be one plain path: remove '..', '.', '//' and line breaks or other control characters",
        ),
    ]


def _immutable(path: str, remedy: str) -> dict[str, str]:
    return _rule(f"self.{path} == oldSelf.{path}", f"spec.{path} is immutable: {remedy}", f".{path}")


NAME = _rule(
    f"size(self.metadata.name) <= {names.MAX_RUN_NAME} && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
    f"metadata.name must be a DNS label of at most {names.MAX_RUN_NAME} characters that starts with a letter: "
    "names of Jobs and Deployments are derived from it; choose another name",
)

SPEC: Rules = [
    _immutable("mode", "create another ProdRLRun"),
    _immutable("model.uri", "create another ProdRLRun for another base model"),
    _immutable(
        "model.servedName",
        "users send it, and stable and candidate answer to it side by side; create another ProdRLRun",
    ),
    _immutable("storage.uri", "records, datasets and checkpoints lie there; create another ProdRLRun"),
    _rule(
        "has(self.storage.endpointUrl) == has(oldSelf.storage.endpointUrl)",
        "spec.storage.endpointUrl can be changed, but not added or removed: with it the bucket would be another one",
        ".storage.endpointUrl",
    ),
    _rule(
        "self.serving.surge != 'Replace' || size(self.gate.canary.steps) == 0",
        "spec.gate.canary.steps must be empty with spec.serving.surge Replace, because stable does not run beside the "
        "candidate: remove the steps, or use Surge",
        ".gate.canary.steps",
    ),
    _rule(
        "self.training.correction.type != 'ScoreCentering' || self.recording.metadata == 'ScoreCentering'",
        "spec.training.correction.type ScoreCentering needs the recorded head of the distribution: set "
        "spec.recording.metadata to ScoreCentering, or choose another correction",
        ".recording.metadata",
    ),
    _rule(
        "self.rounds.batchSize > 1 || (self.training.baseline == 'RoundMean' && self.rounds.steps > 1) || "
        "self.training.baseline == 'EMA'",
        "spec.rounds.batchSize must be at least 2: a trajectory alone has nothing to be compared with, and nothing "
        "would be learnt; raise it, or set spec.training.baseline to EMA, or to RoundMean with several steps",
        ".rounds.batchSize",
    ),
    _rule(
        "has(self.gateway.apiKeysSecretRef) || has(self.gateway.authentication)",
        "spec.gateway.apiKeysSecretRef is missing: everyone who reaches the gateway would be served and could post "
        "rewards; name a Secret with one key a customer, or say spec.gateway.authentication: Anonymous",
        ".gateway.apiKeysSecretRef",
    ),
]

STORAGE: Rules = [
    _rule(
        "self.uri.startsWith('s3://') || (!has(self.endpointUrl) && !has(self.region) && !has(self.secretRef))",
        "endpointUrl, region and secretRef belong to an s3:// uri: remove them, or use s3://bucket/prefix",
    ),
    _rule(
        "!has(self.endpointUrl) || self.endpointUrl.matches('^https?://[^/?#]+/?$')",
        "endpointUrl must be http://host[:port] or https://host[:port] without a path",
        ".endpointUrl",
    ),
]

GATEWAY: Rules = [
    _rule(
        "!has(self.authentication) || (self.authentication == 'ApiKeys') == has(self.apiKeysSecretRef)",
        "authentication ApiKeys goes with apiKeysSecretRef, and Anonymous without: set or remove the one or the other",
        ".authentication",
    )
]

RECORDING: Rules = [
    _rule(
        "self.metadata != 'ScoreCentering' || self.topLogprobs > 0",
        "topLogprobs must be at least 1 with metadata ScoreCentering: 20 is usual; or use metadata SampledLogprob",
        ".topLogprobs",
    )
]

TRAINING: Rules = [
    _rule(
        "self.startDeadlineSeconds <= self.activeDeadlineSeconds",
        "startDeadlineSeconds must not be larger than activeDeadlineSeconds: a Job would end before "
        "its start is judged",
        ".startDeadlineSeconds",
    )
]

CORRECTION: Rules = [
    _rule(
        "self.type == 'ScoreCentering' || self.weighting == 'None'",
        "weighting composes with type ScoreCentering only: ImportanceSampling and ReferenceModel weigh by themselves; "
        "set weighting to None",
        ".weighting",
    )
]

CANARY: Rules = [
    _rule(
        "[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18].all(i, i + 1 >= size(self.steps) || "
        "self.steps[i].weight < self.steps[i + 1].weight)",
        "weights of steps must increase: order the steps, or remove the one that adds nothing",
        ".steps",
    )
]

EVALUATION: Rules = [
    _rule(
        "(has(self.minItems) ? self.minItems : 100) <= (has(self.maxItems) ? self.maxItems : 1000)",
        "minItems must not be larger than maxItems (absent they are 100 and 1000): no verdict could be reached",
        ".minItems",
    ),
    _rule(
        "self.suite.matches('^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$')",
        "suite must be module:function, for example prodrl.lab.suite:chess_puzzles",
        ".suite",
    ),
    _rule(
        "!has(self.suiteUri) || (!self.suiteUri.matches('(^|/)[.]{0,2}(/|$)|[[:cntrl:]]') && "
        "!self.suiteUri.contains('\\\\') && !self.suiteUri.startsWith('.prodrl-tmp/'))",
        "suiteUri must be a folder of the run's store, for example suites/puzzles, without a scheme, '..', '//' or a "
        "'/' at an end: copy the items there",
        ".suiteUri",
    ),
]

ENV: Rules = [
    _rule(
        "!(has(self.value) && has(self.valueFrom))", "value and valueFrom exclude each other: remove one", ".valueFrom"
    ),
    _rule(
        "!self.name.startsWith('PRODRL_') && !self.name.startsWith('POD_')",
        "names that begin with PRODRL_ or POD_ are set by the operator: choose another, or use the field of the spec",
        ".name",
    ),
]

ENV_SOURCE: Rules = [
    _rule(
        "(has(self.secretKeyRef) ? 1 : 0) + (has(self.configMapKeyRef) ? 1 : 0) + (has(self.fieldRef) ? 1 : 0) == 1",
        "exactly one of secretKeyRef, configMapKeyRef and fieldRef must be set",
    )
]

TOLERATION: Rules = [
    _rule(
        "has(self.key) || (has(self.operator) && self.operator == 'Exists')",
        "operator must be Exists without a key: it then tolerates every taint",
    ),
    _rule(
        "!has(self.operator) || self.operator != 'Exists' || !has(self.value)",
        "value must be absent with operator Exists: use Equal, or remove the value",
        ".value",
    ),
    _rule(
        "!has(self.tolerationSeconds) || (has(self.effect) && self.effect == 'NoExecute')",
        "tolerationSeconds needs effect NoExecute: no other taint removes a running pod",
        ".tolerationSeconds",
    ),
]

_KEY = "^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"

LABEL_KEYS: Rules = [
    _rule(
        f"self.all(key, size(key) <= 317 && key.matches('{_KEY}'))",
        "every key must be a name of letters, digits, '-', '_' and '.', perhaps after a DNS prefix and '/': correct it",
    )
]

ARGS: Rules = [
    _rule(
        "self.all(arg, !arg.matches('^--(model|served[-_]model[-_]name|host|port|uds|api[-_]key|ssl[-_].*|"
        "logprobs[-_]mode|max[-_]logprobs)(=.*)?$'))",
        "--model, --served-model-name, --host, --port, --uds, --api-key, --ssl-*, --logprobs-mode and --max-logprobs "
        "are the operator's: remove them; users and keys are the gateway's, and the recorder needs processed log "
        "probabilities",
    )
]

CLAIMS: Rules = [
    _rule(
        "!has(self.resources) || !has(self.resources.claims) || self.resources.claims.all(used, "
        "has(self.resourceClaims) && self.resourceClaims.exists(claim, claim.name == used.name))",
        "resources.claims must name entries of resourceClaims: add the claim there, or correct the name",
        ".resources.claims",
    )
]

POD_KEYS: Rules = [
    *LABEL_KEYS,
    _rule(
        "self.all(key, !key.startsWith('prodrl.dev/') && !key.startsWith('app.kubernetes.io/') && "
        "!key.startsWith('batch.kubernetes.io/') && key != 'kueue.x-k8s.io/queue-name')",
        "keys that begin with prodrl.dev/, app.kubernetes.io/ or batch.kubernetes.io/ are set by the operator, and "
        "kueue.x-k8s.io/queue-name belongs to a Job: remove them, or use queueName",
    ),
]

CACHE: Rules = [
    _rule(
        "(has(self.emptyDir) ? 1 : 0) + (has(self.persistentVolumeClaim) ? 1 : 0) + (has(self.hostPath) ? 1 : 0) <= 1",
        "at most one of emptyDir, persistentVolumeClaim and hostPath can be set: remove the others",
    )
]

POD_CLAIM: Rules = [
    _rule(
        "has(self.resourceClaimName) != has(self.resourceClaimTemplateName)",
        "exactly one of resourceClaimName and resourceClaimTemplateName must be set",
    )
]

QUANTITY: Rules = [
    # Beside the pattern, which before Kubernetes 1.33 costs more than a server allows, for what may be a number.
    _rule(
        "type(self) == int || !(self.endsWith('B') || self.endsWith('b') || self.endsWith('g') || self.endsWith('K'))",
        "must be an amount such as 2, 500m, 16G or 16Gi: what others call 16 GB is 16G here",
    )
]

_NEVER = "beyond that the limit could never block; 0.02 is usual"
_RATE = "a rate cannot rise by 1 or more, so the guard could never block; 0.02 is usual"

DECIMALS: dict[str, Rules] = {
    "spec.recording.samplingPolicy.temperature": _between("> 0", "<= 10", "it is the serving temperature"),
    "spec.recording.samplingPolicy.topP": _between("> 0", "<= 1", "it is a share of the probability; 1 keeps all"),
    "spec.training.correction.cap": _between("> 0", "<= 1000", "it caps importance weights; 2.0 is usual"),
    "spec.training.correction.clipLow": _between("> 0", "< 1", "ratios are clipped at 1 - clipLow; 0.2 is usual"),
    "spec.training.correction.clipHigh": _between("> 0", "<= 1000", "ratios are clipped at 1 + clipHigh; 0.2 is usual"),
    "spec.training.kl.coefficient": _between(">= 0", "<= 1000", "it weighs a penalty; 0 turns it off"),
    "spec.training.optimizer.learningRate": _between(">= 0", "<= 1", "1e-6 is usual"),
    "spec.training.optimizer.beta1": _between(">= 0", "< 1", "0.9 is usual"),
    "spec.training.optimizer.beta2": _between(">= 0", "< 1", "0.95 is usual"),
    "spec.training.optimizer.weightDecay": _between(">= 0", "<= 1", "0 turns it off"),
    "spec.training.optimizer.maxGradNorm": _between("> 0", "<= 1000000", "gradients are clipped to it; 1.0 is usual"),
    "spec.gate.agreement.maxMeanAbsLogprobDiff": _between("> 0", "<= 5", _NEVER.replace("0.02", "0.05")),
    "spec.gate.agreement.maxP99AbsLogprobDiff": _between("> 0", "<= 20", _NEVER.replace("0.02", "1.0")),
    "spec.gate.agreement.maxRatioToStable": _between("> 0", "<= 1000", _NEVER.replace("0.02", "2.0")),
    "spec.gate.evaluations[].margin": _between(">= 0", "<= 1000000", "the candidate may be worse by it; 0.02 is usual"),
    "spec.gate.evaluations[].confidence": _between("> 0.5", "< 1", "it is the interval's; 0.95 is usual"),
    "spec.gate.canary.guards.maxErrorRateIncrease": _between(">= 0", "< 1", _RATE),
    "spec.gate.canary.guards.maxAbortRateIncrease": _between(">= 0", "< 1", _RATE),
    "spec.gate.canary.guards.maxUnscoredRateIncrease": _between(">= 0", "< 1", _RATE),
    "spec.gate.canary.guards.maxRewardDrop": _between(">= 0", "<= 1000000", "it is in units of the reward"),
}
"""Every decimal string of the spec has its range."""

ROUND_RULES: Rules = [
    _rule("self == oldSelf", "a ProdRLRound's spec is frozen when the round begins: edit the ProdRLRun instead"),
    _rule("has(self.source) == (self.number > 0)", "source must be set from round 1 on, and absent in round 0"),
]
"""Of ProdRLRound's spec. Its settings were checked when they were the run's."""

RULES: dict[str, Rules] = {
    "": [NAME],
    "spec": SPEC,
    "spec.model.uri": _place(", because steps have no way out to other places: copy the model's folder to one of them"),
    "spec.storage": STORAGE,
    "spec.storage.uri": _place(": records, datasets and checkpoints lie there"),
    **{f"spec.{part}": CLAIMS for part in POD_SETTINGS},
    "spec.gateway": GATEWAY + CLAIMS,
    "spec.recording": RECORDING,
    "spec.training": TRAINING + CLAIMS,
    "spec.serving.args": ARGS,
    "spec.training.correction": CORRECTION,
    "spec.gate.canary": CANARY,
    "spec.gate.evaluations[]": EVALUATION,
    **{f"spec.{part}.env[]": ENV for part in POD_SETTINGS},
    **{f"spec.{part}.env[].valueFrom": ENV_SOURCE for part in POD_SETTINGS},
    **{f"spec.{part}.tolerations[]": TOLERATION for part in POD_SETTINGS},
    **{f"spec.{part}.podLabels": POD_KEYS for part in POD_SETTINGS},
    **{f"spec.{part}.podAnnotations": POD_KEYS for part in POD_SETTINGS},
    **{f"spec.{part}.nodeSelector": LABEL_KEYS for part in POD_SETTINGS},
    **{f"spec.{part}.cache": CACHE for part in POD_SETTINGS if part != "gateway"},
    **{f"spec.{part}.resourceClaims[]": POD_CLAIM for part in POD_SETTINGS},
    **{f"spec.{part}.resources.{amounts}{{}}": QUANTITY for part in POD_SETTINGS for amounts in ("requests", "limits")},
    **DECIMALS,
}
"""Path -> rules; ``[]`` stands for the items of a list, the empty path for the whole object."""
