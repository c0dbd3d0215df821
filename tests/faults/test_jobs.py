"""A Job that does not start, is taken away, or says that it worked and did not. Round 0's Export stands for all."""

from __future__ import annotations

import base64
import json

import pytest

from prodrl_operator import names
from prodrl_operator.builders import job_name
from prodrl_operator.cluster import port
from prodrl_operator.cluster.port import Object
from prodrl_operator.names import Step
from tests.faults.stage import Maker, together
from tests.faults.world import FaultWorld, disrupted, is_of, waiting
from tests.support.fake_kubelet import Outcome
from tests.support.operator_harness import NAME, Script, all_well

JOB = "chess-r0000-export-a0"
NO_RETRY: Object = {"training": {"backoffLimit": 0, "startDeadlineSeconds": 120, "activeDeadlineSeconds": 3600}}


def exporting(*outcomes: Outcome | None) -> Script:
    """How the attempts of round 0's export end; the last of them for all further ones."""

    def script(number: int, step: Step, attempt: int) -> Outcome | None:
        if (number, step) == (0, Step.EXPORTING):
            return outcomes[min(attempt, len(outcomes) - 1)]
        return all_well(number, step, attempt)

    return script


def pods_of(it: FaultWorld, name: str) -> list[Object]:
    return [p for p in it.admin.list(port.POD, it.namespace) if p["metadata"]["labels"].get("job-name") == name]


def attempt_of(it: FaultWorld) -> tuple[int, int, int]:
    """Number, failures and disruptions of the export."""
    found = it.round(0).status.attempts
    return (found[0].number, found[0].failures, found[0].disruptions) if found else (0, 0, 0)


@together
def test_a_job_that_cannot_pull_its_image_fails_with_that_reason_and_frees_its_node(make: Maker) -> None:
    """trainer#2001, skypilot#2523: the pull error never surfaced while the GPUs stayed reserved."""
    it = make()
    it.pods = lambda pod, parent: waiting(pod, "ImagePullBackOff") if is_of(parent, JOB) else None
    it.pace = 10.0
    it.until(FaultWorld.stalled)
    assert it.stalled() == "ImagePullFailed"
    assert "ImagePullBackOff" in it.message("Stalled")
    it.until(lambda w: not pods_of(w, JOB))
    assert attempt_of(it)[0] == 0, "no second attempt would find another image"


@together
def test_a_quota_on_pods_is_named_and_the_round_goes_on_once_it_is_raised(make: Maker) -> None:
    """kubernetes#90124, kuberay#603: a Job without pods says why in events only."""
    it = make(NO_RETRY)
    quota: Object = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "gpus", "namespace": it.namespace},
        "spec": {"hard": {"pods": "1"}},  # the gateway's
    }
    it.apply(quota)
    it.kubectl("wait", "--for=jsonpath={.status.hard.pods}=1", "resourcequota/gpus", "--timeout=60s")
    it.pace = 10.0
    it.until(FaultWorld.stalled)
    assert it.stalled() == "QuotaExceeded"
    assert "exceeded quota: gpus" in it.message("Stalled")
    it.apply({**quota, "spec": {"hard": {"pods": "9"}}})
    it.kubectl("wait", "--for=jsonpath={.status.hard.pods}=9", "resourcequota/gpus", "--timeout=60s")
    it.pace = 0.5  # the cluster's own controllers have the wall clock
    it.edit(requests={"retryToken": "quota-raised"})
    it.until(lambda w: w.at(0, Step.CANARY_DEPLOYING) or w.stable() == 0)


@together
def test_a_quota_on_jobs_stalls_at_once_and_ends_by_itself(make: Maker) -> None:
    """kubernetes#90124: here already the Job is refused; nobody has to ask for another try."""
    it = make()
    quota: Object = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "jobs", "namespace": it.namespace},
        "spec": {"hard": {"count/jobs.batch": "0"}},
    }
    it.apply(quota)
    it.kubectl("wait", "--for=jsonpath={.status.hard.count/jobs\\.batch}=0", "resourcequota/jobs", "--timeout=60s")
    it.until(FaultWorld.stalled)
    assert it.stalled() == "QuotaExceeded"
    it.kubectl("delete", "resourcequota", "jobs")
    it.until(lambda w: w.stable() == 0 and w.stalled() is None)
    assert attempt_of(it) == (0, 0, 0)


@together
def test_preempted_drained_and_evicted_pods_cost_no_attempt(make: Maker) -> None:
    """trainer#999, skypilot#7117: a preemption or drain used up the backoff limit."""
    it = make(NO_RETRY)
    it.script = exporting(None, None, None, all_well(0, Step.EXPORTING, 0))
    taken = {"chess-r0000-export-a0": "PreemptionByScheduler", "chess-r0000-export-a2": "TerminationByKubelet"}

    def node(pod: Object, parent: Object) -> Object | None:
        reason = taken.get(parent["metadata"]["name"])
        return disrupted(pod, reason) if reason else None

    it.pods = node
    it.until(lambda w: any(p.get("status", {}).get("phase") == "Running" for p in pods_of(w, "chess-r0000-export-a1")))
    assert attempt_of(it) == (1, 0, 1)
    it.evict(pods_of(it, "chess-r0000-export-a1")[0]["metadata"]["name"])  # kubectl drain
    it.until(lambda w: w.stable() == 0)
    assert attempt_of(it) == (3, 0, 3), "with backoffLimit 0"
    assert {key[2] for key in it.jobs_seen if key[1] == Step.EXPORTING} >= {"1", "3"}, "each attempt has its own Job"


@together
def test_a_job_that_kueue_suspends_is_left_to_kueue_and_no_deadline_runs(make: Maker) -> None:
    """kueue#14811: evicted by its queue, and never admitted again because two controllers fought over suspend."""
    it = make({"export": {"queueName": "gpus"}, "training": NO_RETRY["training"]})
    it.script = exporting(None)
    it.until(lambda w: w.is_there(port.JOB, JOB))

    def kueue(suspend: bool) -> None:
        it.admin.merge_patch(port.JOB, it.namespace, JOB, {"spec": {"suspend": suspend}}, field_manager="kueue")

    def check_left_alone(suspend: bool) -> None:
        generation = it.get(port.JOB, JOB)["metadata"]["generation"]
        it.steps(4, 50_000.0)  # far past both deadlines
        job = it.get(port.JOB, JOB)
        assert job["spec"]["suspend"] is suspend
        assert job["metadata"]["generation"] == generation, "nobody but Kueue wrote it"
        assert it.condition("Suspended") == ("True", "Queued")
        assert it.stalled() is None

    assert it.get(port.JOB, JOB)["spec"]["suspend"] is True, "Kueue admits it"
    it.until(lambda w: w.get(port.DEPLOYMENT, "chess-gateway")["status"].get("readyReplicas"))
    check_left_alone(True)
    kueue(False)
    it.until(lambda w: w.condition("Suspended")[0] == "False" and pods_of(w, JOB))
    kueue(True)  # evicted: the Job controller stops the pods
    it.until(lambda w: not pods_of(w, JOB) and w.is_true("Suspended"))
    check_left_alone(True)
    assert attempt_of(it) == (0, 0, 0)
    it.script = all_well
    kueue(False)
    it.until(lambda w: w.stable() == 0)
    assert it.get(port.JOB, JOB)["metadata"]["labels"][names.LABEL_QUEUE] == "gpus"


@together
def test_success_without_an_artifact_is_a_failure(make: Maker) -> None:
    """fms-hf-tuning#217: the disk was full, and the Job reported success."""
    it = make(NO_RETRY, exporting(Outcome("", exit_code=0)))
    it.until(FaultWorld.stalled)
    assert it.stalled() == "ArtifactMissing"
    assert it.round(0).status.policy is None


@together
def test_a_full_disk_is_not_filled_again(make: Maker) -> None:
    """sagemaker-training-toolkit#204: every retry filled the same disk once more."""
    full = json.dumps({"reason": "StorageFull", "message": "No space left on device: /cache"})
    it = make(None, exporting(Outcome(full, exit_code=74)))
    it.until(FaultWorld.stalled)
    assert it.stalled() == "StorageFull"
    assert "No space left" in it.message("Stalled")
    it.steps(5, 600.0)
    assert len(it.jobs(Step.EXPORTING)) == 1, "backoffLimit is 3, and another attempt cannot help"


@together
def test_rejected_credentials_say_so_and_a_rotated_secret_cures_the_next_pod(make: Maker) -> None:
    """k8sgpt-operator#137, helm#16: the operator had to be restarted by hand to see a rotated key."""
    told = json.dumps({"reason": "CredentialsRejected", "message": "s3://store: InvalidAccessKeyId"})
    it = make({"storage": {"uri": "s3://store/chess", "secretRef": {"name": "s3"}}})

    def rotate(key: str) -> None:
        metadata = {"name": "s3", "namespace": it.namespace}
        data = {"accessKeyId": key, "secretAccessKey": key}
        it.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data})

    def script(number: int, step: Step, attempt: int) -> Outcome | None:
        """A pod reads the Secret as it is when it starts."""
        key = base64.b64decode(it.get(port.SECRET, "s3")["data"]["accessKeyId"]).decode()
        return Outcome(told, exit_code=77) if key == "expired" else all_well(number, step, attempt)

    rotate("expired")
    it.script = script
    it.until(FaultWorld.stalled)
    assert it.stalled() == "CredentialsRejected"
    assert "storage.secretRef" in it.message("Stalled")
    rotate("new")
    it.edit(requests={"retryToken": "rotated"})
    it.until(lambda w: w.stable() == 0)
    it.until(lambda w: w.round(1) is not None)
    pods = it.uids(port.POD)
    for key in ("one", "two"):
        rotate(key)
        it.until(lambda w: not w.at(1, Step.PENDING))
        it.steps(3)
    kept = it.uids(port.POD)
    assert all(kept[name] == uid for name, uid in pods.items() if "serve" in name), "no server restarts for it"
    template = it.get(port.DEPLOYMENT, "chess-r0000-serve")["spec"]["template"]["spec"]
    assert [v["secret"]["secretName"] for v in template["volumes"] if "secret" in v] == ["s3"], "kubelets renew it"
    variables = [e for c in template["containers"] + template["initContainers"] for e in c["env"]]
    assert not [e for e in variables if "secretKeyRef" in e.get("valueFrom", {})], "a variable is never renewed"


@together
def test_an_object_of_our_name_that_is_still_going_away_is_waited_for(make: Maker) -> None:
    """skypilot#8752, trainer#1306: the old object was still Terminating under the name that the retry wanted."""
    it = make()
    it.is_operated = False
    template = {"spec": {"restartPolicy": "Never", "containers": [{"name": "x", "image": "x:1"}]}}
    old = {"name": JOB, "namespace": it.namespace, "finalizers": ["test.local/hold"]}
    it.apply(
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": old, "spec": {"suspend": True, "template": template}}
    )
    it.kubectl("delete", "job", JOB, "--wait=false")
    it.is_operated = True
    it.until(lambda w: w.at(0, Step.EXPORTING))
    it.steps(5)
    assert it.stalled() is None, "it goes by itself"
    assert attempt_of(it) == (0, 0, 0)
    it.admin.merge_patch(port.JOB, it.namespace, JOB, {"metadata": {"finalizers": None}}, field_manager="somebody")
    it.until(lambda w: w.stable() == 0)
    assert attempt_of(it) == (0, 0, 0)
    owner = it.get(port.JOB, JOB)["metadata"]["ownerReferences"][0]
    assert (owner["kind"], owner["name"]) == ("ProdRLRound", f"{NAME}-r0000")


HOLD = "test.local/hold"


def held(it: FaultWorld) -> str:
    """The pod of the first attempt, which runs and does not stop when it is told to."""
    it.is_stopping = lambda pod: False
    it.until(lambda w: any(p.get("status", {}).get("phase") == "Running" for p in pods_of(w, JOB)))
    pod = pods_of(it, JOB)[0]
    it.admin.set_finalizers(pod, [*pod["metadata"].get("finalizers", []), HOLD])
    return str(pod["metadata"]["name"])


def let_go(it: FaultWorld, name: str) -> None:
    """As told for a lost node, or as a node that comes back does."""
    pod = it.get(port.POD, name)
    it.admin.set_finalizers(pod, [item for item in pod["metadata"].get("finalizers", []) if item != HOLD])
    it.kubectl("delete", "pod", name, "--force", "--grace-period=0", "--ignore-not-found")
    it.is_stopping = lambda pod: True


def check_alone(it: FaultWorld, cascade: str) -> None:
    pod = held(it)
    it.kubectl("delete", "job", JOB, f"--cascade={cascade}")
    it.until(lambda w: w.round(0).status.message == f"waits for pod {pod}: it has not ended yet")
    it.steps(5)
    assert not it.is_there(port.JOB, JOB)
    it.script = all_well
    let_go(it, pod)
    it.until(lambda w: w.stable() == 0)
    assert it.node.most_at_once["Exporting"] == 1
    assert attempt_of(it) == (0, 0, 0)


@together
def test_a_job_that_somebody_deletes_is_not_made_again_beside_its_pod(make: Maker) -> None:
    """trainer#1306: the pods of a deleted Job go on for as long as they need, on a lost node for ever."""
    check_alone(make(NO_RETRY, exporting(None)), "background")


@together
def test_a_pod_that_an_orphaning_deletion_left_has_no_other_beside_it(make: Maker) -> None:
    """trainer#1306: with ``--cascade=orphan`` nobody tells it to stop."""
    check_alone(make(NO_RETRY, exporting(None)), "orphan")


@together
def test_an_attempt_that_ran_too_long_ends_before_the_next_one_begins(make: Maker) -> None:
    """skypilot#8752: the retry's pause is shorter than the time that a pod has to end."""
    it = make({"training": {"backoffLimit": 1, "startDeadlineSeconds": 60, "activeDeadlineSeconds": 600}})
    it.script = exporting(None, all_well(0, Step.EXPORTING, 0))
    pod = held(it)
    it.jump(seconds=3600)
    it.until(lambda w: attempt_of(w)[0] == 1)
    it.steps(10)
    assert not it.is_there(port.JOB, "chess-r0000-export-a1"), "its pause is over for long"
    let_go(it, pod)
    it.until(lambda w: w.stable() == 0)
    assert it.node.most_at_once["Exporting"] == 1


@pytest.mark.parametrize("step", [Step.COLLECTING, Step.TRAINING, Step.EXPORTING, Step.GATING])
def test_every_attempt_has_a_name_of_its_own(step: Step) -> None:
    """skypilot#8752: a retry that reuses a name meets the old object."""
    made = {job_name("a" * names.MAX_RUN_NAME, 1, step, attempt) for attempt in range(100)}
    assert len(made) == 100
