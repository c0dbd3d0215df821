"""Specs that the CRDs accept and refuse, as one table for the local store and for a real API server.

A case changes a minimal ProdRLRun by dotted paths (None removes a field); a case with ``before`` is an update.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from prodrl_operator import names
from prodrl_operator.cluster.port import Cluster

Changes = dict[str, Any]

MINIMAL: dict[str, Any] = {
    "model": {"uri": "file:///models/base", "servedName": "chess"},
    "storage": {"uri": "file:///store"},
    "gateway": {"authentication": "Anonymous"},
}
KEYS: Changes = {"gateway": {"apiKeysSecretRef": {"name": "keys"}}}
S3: Changes = {"storage.uri": "s3://bucket/chess", **KEYS}
SUITE = {"name": "puzzles", "suite": "prodrl.lab.suite:chess_puzzles", "metric": "solved"}


@dataclass(frozen=True)
class Case:
    """One manifest, or one update of an accepted manifest."""

    name: str
    """What the case shows."""
    changes: Changes = field(default_factory=dict)
    """Of the minimal spec."""
    message: str = ""
    """Part of the refusal; empty: accepted."""
    before: Changes | None = None
    """The spec that is replaced; None: the object is created."""
    run_name: str = "chess"
    """metadata.name."""

    def __str__(self) -> str:
        return self.name


def spec(changes: Changes) -> dict[str, Any]:
    """The minimal spec with changes."""
    result = copy.deepcopy(MINIMAL)
    for path, value in changes.items():
        *parents, last = path.split(".")
        node = result
        for name in parents:
            node = node.setdefault(name, {})
        if value is None:
            node.pop(last, None)
        else:
            node[last] = copy.deepcopy(value)
    return result


def manifest(changes: Changes, name: str = "chess", namespace: str = "default") -> dict[str, Any]:
    """A ProdRLRun."""
    return {
        "apiVersion": names.API_VERSION,
        "kind": "ProdRLRun",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec(changes),
    }


def submit(cluster: Cluster, case: Case) -> dict[str, Any]:
    """Create the object, or apply it twice; gives what is stored.

    Server-side apply answers 500 to a list with a key twice, before it validates; create says what is wrong.
    """
    if case.before is None:
        return cluster.create(manifest(case.changes, case.run_name))
    cluster.apply(manifest(case.before, case.run_name))
    return cluster.apply(manifest(case.changes, case.run_name))


def _suite(**changes: Any) -> Changes:
    return {"gate.evaluations": [{**SUITE, **changes}]}


def _steps(*weights: int) -> Changes:
    return {"gate.canary.steps": [{"weight": weight, "minTrajectories": 10} for weight in weights]}


def _env(*variables: dict[str, Any], part: str = "serving") -> Changes:
    return {f"{part}.env": list(variables)}


def _toleration(**fields: Any) -> Changes:
    return {"training.tolerations": [fields]}


def _claims(made: str, used: str) -> Changes:
    claims = [{"name": made, "resourceClaimTemplateName": "h200"}]
    return {"serving.resourceClaims": claims, "serving.resources": {"claims": [{"name": used}]}}


def _requests(*amounts: Any) -> Changes:
    return {"export.resources": {"requests": {f"example.com/{n}": amount for n, amount in enumerate(amounts)}}}


def _suites(count: int) -> Changes:
    return {"gate.evaluations": [{**SUITE, "name": f"suite-{number}"} for number in range(count)]}


def _cache(path: str) -> Changes:
    return {"serving.cache": {"hostPath": {"path": path}}}


OPEN = "apiKeysSecretRef is missing"
AT_BOTH_ENDS = "'-' and '.', with a letter or digit at both ends"
SECRET = {"secretKeyRef": {"name": "wandb", "key": "token"}}

ACCEPTED: list[Case] = [
    Case("the minimal run"),
    Case("a name of 40 characters", run_name="a" * 40),
    Case("s3 with keys", S3),
    Case("s3 that says that nobody needs a key", {"storage.uri": "s3://b-1/x"}),
    Case("a folder with keys", KEYS),
    Case("keys that are said twice", {"gateway": {"authentication": "ApiKeys", "apiKeysSecretRef": {"name": "keys"}}}),
    Case("a prefix with a slash at its end", {**S3, "storage.uri": "s3://bucket/my.runs/..chess/"}),
    Case("a model in a bucket", {"model.uri": "s3://models/base...v2/.cache"}),
    Case("a model's name with an organisation", {"model.servedName": "org/Model_1.5-7B@v2:chat+x"}),
    Case("a batch of one against an average", {"rounds.batchSize": 1, "training.baseline": "EMA"}),
    Case("a batch of one against its round", {"rounds.batchSize": 1, "training.baseline": "RoundMean"}),
    Case("s3 elsewhere", {**S3, "storage.endpointUrl": "https://minio:9000", "storage.secretRef": {"name": "s3"}}),
    Case("a bucket without a prefix", {**S3, "storage.uri": "s3://bucket"}),
    Case("canary weights that increase", _steps(1, 5, 50, 99)),
    Case("one canary step", _steps(50)),
    Case("as many canary steps as allowed", _steps(*range(1, 21))),
    Case("surge Replace without canary", {"serving.surge": "Replace"}),
    Case("an evaluation with defaults", _suite()),
    Case("a margin of zero", _suite(margin="0")),
    Case("as many items at least as at most", _suite(minItems=5, maxItems=5)),
    Case("two evaluations", {"gate.evaluations": [SUITE, {**SUITE, "name": "games"}]}),
    Case("score centering with a weight", {"training.correction": {"type": "ScoreCentering", "weighting": "MIS"}}),
    Case("a reference model", {"training.correction": {"type": "ReferenceModel"}}),
    Case(
        "importance sampling on sampled logprobs",
        {
            "training.correction.type": "ImportanceSampling",
            "recording": {"metadata": "SampledLogprob", "topLogprobs": 0},
        },
    ),
    Case("a coefficient of zero", {"training.kl.coefficient": "0"}),
    Case("a number with an exponent", {"training.optimizer.learningRate": "1e-6"}),
    Case("an exponent with a plus", {"training.optimizer.learningRate": "1E+0"}),
    Case("a suite's folder", _suite(suiteUri="suites/..puzzles/v1.2")),
    Case("no momentum", {"training.optimizer": {"beta1": "0", "beta2": "0.0"}}),
    Case("all limits", {"gate.agreement": {"maxP99AbsLogprobDiff": "1.5", "maxRatioToStable": "3"}}),
    Case("all guards", {"gate.canary.guards": {"maxUnscoredRateIncrease": "0.2", "maxRewardDrop": "0.1"}}),
    Case("a sampling policy", {"recording.samplingPolicy": {"temperature": "1.0", "topP": "1", "topK": 0}}),
    Case(
        "variables of every kind", _env({"name": "A"}, {"name": "B", "value": "1"}, {"name": "C", "valueFrom": SECRET})
    ),
    Case("a variable from the pod", _env({"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})),
    Case("quantities as numbers and as text", {"serving.resources": {"limits": {"nvidia.com/gpu": 1, "cpu": "500m"}}}),
    Case(
        "quantities of every kind",
        _requests("2", "0.5", "1.", "12e3", "5E", "1u", "1n", "3k", "4M", "16G", "1T", "1P", "1Ki"),
    ),
    Case("tolerate everything", _toleration(operator="Exists")),
    Case("tolerate one taint", _toleration(key="gpu", operator="Equal", value="h200", effect="NoSchedule")),
    Case("tolerate for a while", _toleration(key="down", operator="Exists", effect="NoExecute", tolerationSeconds=60)),
    Case(
        "labels and notes of the pods", {"serving.podLabels": {"team": "games"}, "training.podAnnotations": {"a": "b"}}
    ),
    Case("a cache on the node", {"serving.cache": {"hostPath": {"path": "/var/cache/prodrl"}}}),
    Case("a device by claim", {"serving.resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "h200"}]}),
    Case(
        "a patch of the pod", {"serving.podSpecPatch": {"hostIPC": True, "containers": [{"name": "server", "x": [1]}]}}
    ),
    Case("engine arguments", {"serving.args": ["--max-model-len", "4096", "--enforce-eager", "--port-range=x"]}),
    Case("a claim that the container uses", _claims("gpu", "gpu")),
    Case("a Secret with dots", {**S3, "gateway": {"apiKeysSecretRef": {"name": "1.prod.keys"}}}),
    Case("a queue with a dot", {"training.queueName": "team-a.gpus"}),
    Case("kilobytes", {"serving.shmSize": "512k"}),
    Case("a node label with a prefix", {"serving.nodeSelector": {"nvidia.com/gpu.product": "H200", "disk": ""}}),
    Case("few items at most", _suite(minItems=5, maxItems=50)),
    Case("an update of what may change", {"suspend": True, "rounds.max": 7}, before={}),
    Case("a mode that is written out", {"mode": "Sync"}, before={}),
    Case("a default that is left out again", {}, before={"mode": "Sync"}),
    Case(
        "another address of the same bucket",
        {**S3, "storage.endpointUrl": "https://new:9000"},
        before={**S3, "storage.endpointUrl": "http://old:9000"},
    ),
    Case("a Secret for the store later", {**S3, "storage.secretRef": {"name": "s3"}}, before=S3),
    Case("an evaluation more", _suite(), before={}),
]

REFUSED: list[Case] = [
    # Names and places.
    Case("a name that is too long", message="at most 40 characters", run_name="a" * 41),
    Case("a name with a dot", message="DNS label", run_name="chess.v2"),
    Case("a name that starts with a digit", message="DNS label", run_name="2chess"),
    Case("no model", {"model": None}, "model"),
    Case("no storage", {"storage": None}, "storage"),
    Case("a model on the hub", {"model.uri": "hf://org/model"}, "copy the model's folder"),
    Case("a model on a claim", {"model.uri": "pvc://claim/model"}, "copy the model's folder"),
    Case("a relative folder", {"model.uri": "file://models/base"}, "uri"),
    Case("a store over http", {"storage.uri": "https://bucket"}, "uri"),
    Case("a bucket in capitals", {**S3, "storage.uri": "s3://Bucket/x"}, "lower-case"),
    Case("a bucket of two letters", {**S3, "storage.uri": "s3://ab"}, "3 to 63"),
    Case("a region for a folder", {"storage.region": "eu-west-1"}, "belong to an s3:// uri"),
    Case("a Secret for a folder", {"storage.secretRef": {"name": "s3"}}, "belong to an s3:// uri"),
    Case("an endpoint for a folder", {"storage.endpointUrl": "http://minio:9000"}, "belong to an s3:// uri"),
    Case("an endpoint without a scheme", {**S3, "storage.endpointUrl": "minio:9000"}, "http://host"),
    Case("an endpoint with a path", {**S3, "storage.endpointUrl": "http://minio:9000/bucket"}, "without a path"),
    Case("a gateway open to everyone, unsaid", {"storage.uri": "s3://bucket/x", "gateway": None}, OPEN),
    Case("a folder's gateway open to everyone, unsaid", {"gateway": None}, OPEN),
    Case("keys without a Secret", {"gateway.authentication": "ApiKeys"}, "goes with apiKeysSecretRef"),
    Case(
        "a Secret that nobody needs",
        {"gateway.apiKeysSecretRef": {"name": "keys"}, "gateway.authentication": "Anonymous"},
        "goes with apiKeysSecretRef",
    ),
    Case("a gateway with a cache", {"gateway.cache": {"emptyDir": {}}}, "cache"),
    *(
        Case(f"a model at {place!r}", {"model.uri": place}, message)
        for place, message in (
            ("s3:///x", "a bucket's name has 3 to 63"),
            ("s3://Bad_Bucket/x", "a bucket's name has 3 to 63"),
            ("s3://bucket/a\nb", "remove '..', '.', '//' and line breaks"),
            ("file:///a/../b", "remove '..', '.', '//' and line breaks"),
        )
    ),
    *(
        Case(f"a store at {place!r}", {**S3, "storage.uri": place}, "remove '..', '.', '//' and line breaks")
        for place in (
            "s3://bucket/../x",
            "s3://bucket/x/..",
            "s3://bucket//x",
            "s3://bucket/x//",
            "s3://bucket/./x",
            "s3://bucket/x\ty",
            "s3://bucket/x\n",
            "file:////x",
            "file:///x/.",
        )
    ),
    *(
        Case(f"a model called {name!r}", {"model.servedName": name}, "beginning with a letter or digit")
        for name in ("--trust-remote-code", "chess\n", "$(POD_IP)", "my model", "/models/x", "")
    ),
    Case("a Secret in capitals", {"gateway": {"apiKeysSecretRef": {"name": "Keys"}}}, AT_BOTH_ENDS),
    Case("a Secret without a name", {**S3, "storage.secretRef": {"name": ""}}, AT_BOTH_ENDS),
    # What never changes.
    Case("another mode", {"mode": "AsyncOneRound"}, "spec.mode is immutable", before={}),
    Case("a mode that is dropped", {}, "spec.mode is immutable", before={"mode": "AsyncOneRound"}),
    Case("another model", {"model.uri": "file:///other"}, "spec.model.uri is immutable", before={}),
    Case("another served name", {"model.servedName": "go"}, "spec.model.servedName is immutable", before={}),
    Case("another store", {"storage.uri": "file:///other"}, "spec.storage.uri is immutable", before={}),
    Case("an endpoint added", {**S3, "storage.endpointUrl": "http://m:9000"}, "not added or removed", before=S3),
    Case("an endpoint removed", S3, "not added or removed", before={**S3, "storage.endpointUrl": "http://m:9000"}),
    # The gate.
    Case("canary weights that fall", _steps(50, 5), "weights of steps must increase"),
    Case("a canary weight twice", _steps(5, 50, 50), "weights of steps must increase"),
    Case("the last of 20 weights falls", _steps(*range(2, 21), 1), "weights of steps must increase"),
    Case("a canary step of everything", _steps(100), "weight"),
    Case("too many canary steps", _steps(*range(1, 22)), "steps"),
    Case("canary without stable", {"serving.surge": "Replace", **_steps(5)}, "stable does not run beside"),
    Case("the same evaluation twice", {"gate.evaluations": [SUITE, SUITE]}, "uplicate"),
    Case("more items at least than at most", _suite(minItems=6, maxItems=5), "minItems must not be larger"),
    Case("more items at least than the default at most", _suite(minItems=5000), "minItems must not be larger"),
    Case("a suite without a function", _suite(suite="prodrl.lab.suite"), "module:function"),
    *(
        Case(f"a suite's folder at {place!r}", _suite(suiteUri=place), "suiteUri must be a folder of the run's store")
        for place in (
            "s3://other/x",
            "../../x",
            "a/..",
            "a/./b",
            "/suites",
            "suites/",
            "a//b",
            "a\\b",
            "a\nb",
            "",
            ".prodrl-tmp/x",
        )
    ),
    Case("an evaluation in capitals", _suite(name="Puzzles"), "beginning with a letter and not ending with '-'"),
    Case("a negative margin", _suite(margin="-0.1"), "must be >= 0"),
    Case("certainty", _suite(confidence="1"), "must be > 0.5 and < 1"),
    Case("a coin's confidence", _suite(confidence="0.5"), "must be > 0.5 and < 1"),
    Case("confidence in percent", _suite(confidence="95"), "must be > 0.5 and < 1"),
    Case("an agreement limit of zero", {"gate.agreement.maxMeanAbsLogprobDiff": "0"}, "must be > 0"),
    Case("an agreement limit that nothing reaches", {"gate.agreement.maxMeanAbsLogprobDiff": "100"}, "never block"),
    Case("a tail limit that nothing reaches", {"gate.agreement.maxP99AbsLogprobDiff": "1e3"}, "never block"),
    Case("a ratio of zero", {"gate.agreement.maxRatioToStable": "0.0"}, "must be > 0"),
    Case("a guard that never blocks", {"gate.canary.guards.maxErrorRateIncrease": "1"}, "never block"),
    Case("a guard in percent", {"gate.canary.guards.maxAbortRateIncrease": "10"}, "never block"),
    Case("a negative guard", {"gate.canary.guards.maxUnscoredRateIncrease": "-0.1"}, "must be >= 0"),
    Case("a negative reward drop", {"gate.canary.guards.maxRewardDrop": "-1"}, "must be >= 0"),
    # Training.
    Case(
        "a weight on importance sampling",
        {"training.correction": {"type": "ImportanceSampling", "weighting": "TIS"}},
        "set weighting to None",
    ),
    Case(
        "a weight on a reference model",
        {"training.correction": {"type": "ReferenceModel", "weighting": "MIS"}},
        "set weighting to None",
    ),
    Case("a weight on nothing", {"training.correction": {"type": "None", "weighting": "TIS"}}, "set weighting to None"),
    Case("centering without a head", {"recording.metadata": "SampledLogprob"}, "needs the recorded head"),
    Case("an empty head", {"recording.topLogprobs": 0}, "topLogprobs must be at least 1"),
    Case("a cap of zero", {"training.correction.cap": "0"}, "must be > 0"),
    Case("a lower clip of one", {"training.correction.clipLow": "1.0"}, "< 1"),
    Case("an upper clip of zero", {"training.correction.clipHigh": "0"}, "must be > 0"),
    Case("a negative coefficient", {"training.kl.coefficient": "-0.5"}, "must be >= 0"),
    Case("a number that is too large", {"training.kl.coefficient": "1e999"}, "training.kl.coefficient"),
    *(
        Case(f"a coefficient of {text!r}", {"training.kl.coefficient": text}, "written like 0.5 or 5e-1")
        for text in ("one", ".5", "5.", "NaN", "inf", "0x1p-2", "1_0", " 1", "")
    ),
    Case("a coefficient as a float", {"training.kl.coefficient": 0.5}, "string"),
    Case("a learning rate above one", {"training.optimizer.learningRate": "3"}, "1e-6 is usual"),
    Case("a moment of one", {"training.optimizer.beta2": "1"}, "0.95 is usual"),
    Case("a negative decay", {"training.optimizer.weightDecay": "-1e-3"}, "must be >= 0"),
    Case("no gradient at all", {"training.optimizer.maxGradNorm": "0"}, "must be > 0"),
    Case("a temperature of zero", {"recording.samplingPolicy.temperature": "0"}, "must be > 0"),
    Case("more than all tokens", {"recording.samplingPolicy.topP": "1.1"}, "<= 1"),
    Case(
        "a start after the end",
        {"training": {"startDeadlineSeconds": 600, "activeDeadlineSeconds": 60}},
        "must not be larger than activeDeadlineSeconds",
    ),
    Case("too many steps", {"rounds.steps": 10_001}, "steps"),
    Case("a batch of nobody", {"rounds.batchSize": 0}, "batchSize"),
    Case("a batch of one", {"rounds.batchSize": 1}, "batchSize must be at least 2"),
    Case(
        "a batch of one without itself",
        {"rounds.batchSize": 1, "training.baseline": "LeaveOneOut"},
        "set spec.training.baseline to EMA",
    ),
    Case(
        "a round of one",
        {"rounds": {"steps": 1, "batchSize": 1}, "training.baseline": "RoundMean"},
        "or to RoundMean with several steps",
    ),
    Case("an unknown field", {"training.learningRate": "1e-6"}, "learningRate"),
    Case("an unknown correction", {"training.correction.type": "GRPO"}, "type"),
    # Pods.
    Case("a value and its source", _env({"name": "A", "value": "1", "valueFrom": SECRET}), "exclude each other"),
    Case("a source of nothing", _env({"name": "A", "valueFrom": {}}), "exactly one of"),
    Case(
        "two sources",
        _env({"name": "A", "valueFrom": {**SECRET, "configMapKeyRef": SECRET["secretKeyRef"]}}),
        "exactly one of",
    ),
    Case(
        "the operator's variable",
        _env({"name": "PRODRL_SPOOL_DIR", "value": "/x"}, part="gateway"),
        "set by the operator",
    ),
    Case("a variable twice", _env({"name": "A", "value": "1"}, {"name": "A", "value": "2"}), "uplicate"),
    Case("a number as a variable", _env({"name": "A", "value": 1}), "value"),
    Case("a variable with an equals sign", _env({"name": "A=B"}), "'-' and '.', not beginning with a digit"),
    Case(
        "a Secret's key with a slash",
        _env({"name": "A", "valueFrom": {"secretKeyRef": {"name": "a", "key": "b/c"}}}),
        "must be letters, digits, '-', '_' and '.'",
    ),
    Case("a folder of the node by a relative path", _cache("var/x"), "must begin with '/' and hold no ':'"),
    Case("a variable from a file", _env({"name": "A", "valueFrom": {"file": "/x"}}), "file"),
    Case("a taint without a key", _toleration(operator="Equal", value="x"), "must be Exists without a key"),
    Case("any value and this one", _toleration(key="gpu", operator="Exists", value="x"), "value must be absent"),
    Case("a while without eviction", _toleration(key="a", operator="Exists", tolerationSeconds=5), "NoExecute"),
    Case("an unknown effect", _toleration(key="a", operator="Exists", effect="Evict"), "effect"),
    Case("a label of the operator", {"serving.podLabels": {"prodrl.dev/run": "other"}}, "are set by the operator"),
    Case("a queue for a pod", {"training.podAnnotations": {"kueue.x-k8s.io/queue-name": "q"}}, "or use queueName"),
    Case("two caches", {"serving.cache": {"emptyDir": {}, "hostPath": {"path": "/x"}}}, "at most one of emptyDir"),
    Case("a claim of nothing", {"serving.resourceClaims": [{"name": "gpu"}]}, "exactly one of resourceClaimName"),
    Case("a claim that nobody makes", _claims("gpu", "gpus"), "add the claim there"),
    Case("a claim without any", {"training.resources": {"claims": [{"name": "gpu"}]}}, "add the claim there"),
    *(
        Case(f"an argument of the operator's, {argument[0]}", {"serving.args": list(argument)}, "are the operator's")
        for argument in (
            ("--logprobs-mode", "raw_logprobs"),
            ("--logprobs_mode=raw_logprobs",),
            ("--max-model-len", "512", "--port=9"),
            ("--host", "::"),
            ("--served-model-name", "other"),
            ("--api-key", "sesame"),
            ("--ssl-keyfile=/x",),
            ("--max-logprobs", "5"),
        )
    ),
    Case(
        "a label's value with a space", {"training.podLabels": {"owner": "team a"}}, "must be empty, or letters, digits"
    ),
    Case("a queue with a space", {"training.queueName": "Team A"}, AT_BOTH_ENDS),
    Case("a claim's name in capitals", _claims("GPU", "GPU"), "beginning with a letter and not ending with '-'"),
    Case("a label's key with a space", {"training.podLabels": {"the owner": "a"}}, "every key must be a name"),
    Case("an annotation without a name", {"serving.podAnnotations": {"example.com/": "a"}}, "every key must be a name"),
    Case("a node label with a long value", {"collect.nodeSelector": {"disk": "x" * 64}}, "nodeSelector"),
    Case("a node label with a bad key", {"collect.nodeSelector": {"-disk": "x"}}, "every key must be a name"),
    Case("a priority class in capitals", {"serving.priorityClassName": "Bad Name"}, AT_BOTH_ENDS),
    Case("kilobytes that Kubernetes does not know", {"serving.shmSize": "512K"}, "for example 512k, 16G or 16Gi"),
    *(
        Case(f"an amount of {amount!r}", _requests(amount), "must be an amount such as 2, 500m, 16G or 16Gi")
        for amount in ("16GB", "16gb", "16GiB", "16 Mb", "16g", "16K")
    ),
    Case("more evaluations than one Job can report", _suites(11), "evaluations"),
    Case("a negative quantity", {"serving.resources": {"limits": {"cpu": "-1"}}}, "cpu"),
    Case("more resources than a rule can afford", _requests(*range(17)), "requests"),
    Case("an amount with a space", _requests("16 G"), "resources.requests"),
    Case("a resource list of another name", {"serving.resources": {"maximum": {"cpu": 1}}}, "maximum"),
]
