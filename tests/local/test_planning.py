"""The controllers' plans as tables: rollouts, deadlines, Job rules that take long in real time."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta

import pytest

from prodrl_operator.cluster.local import admission, containers, deployments, jobs, services
from prodrl_operator.cluster.local.store import timestamp
from tests.support.local_cluster import deployment, job, service

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NO_WAIT = jobs.BackOff(0.0, 0.0)


def stored(manifest: dict, **status) -> dict:
    obj = copy.deepcopy(manifest)
    obj["metadata"] |= {"namespace": "default", "uid": "u", "generation": 1}
    admission.fill_defaults(obj)
    return obj | ({"status": status} if status else {})


def ready(pod: dict, *, since: datetime = NOW, is_ready: bool = True) -> dict:
    condition = {"type": "Ready", "status": str(is_ready), "lastTransitionTime": timestamp(since)}
    pod["metadata"].setdefault("creationTimestamp", timestamp(NOW))
    return pod | {"status": {"phase": "Running", "podIP": "127.64.0.1", "conditions": [condition]}}


def ended(pod: dict, code: int, *, at: datetime = NOW) -> dict:
    terminated = {"exitCode": code, "finishedAt": timestamp(at)}
    status = {"name": "main", "restartCount": 0, "state": {"terminated": terminated}}
    return pod | {"status": {"phase": "Failed" if code else "Succeeded", "containerStatuses": [status]}}


@pytest.mark.parametrize(
    ("strategy", "num_old", "num_new_ready", "creates", "deletes"),
    [
        ({"maxSurge": 1, "maxUnavailable": 0}, 2, 0, 1, 0),
        ({"maxSurge": 1, "maxUnavailable": 0}, 2, 1, 0, 1),
        ({"maxSurge": 0, "maxUnavailable": 1}, 2, 0, 0, 1),
        ({"maxSurge": 0, "maxUnavailable": 1}, 1, 0, 1, 0),
        ({"maxSurge": "100%", "maxUnavailable": 0}, 2, 0, 2, 0),
        ({"maxSurge": "25%", "maxUnavailable": "25%"}, 2, 0, 1, 0),
        ({"maxSurge": 0, "maxUnavailable": 0}, 2, 0, 0, 1),
    ],
)
def test_rolling_update(strategy, num_old, num_new_ready, creates, deletes):
    rolling = {"type": "RollingUpdate", "rollingUpdate": strategy}
    obj = stored(deployment("d", ["true"], replicas=2, strategy=rolling))
    stamp = deployments.template_hash(obj)
    pods = [ready(deployments.pod_of(obj, "old")) for _ in range(num_old)]
    pods += [ready(deployments.pod_of(obj, stamp)) for _ in range(num_new_ready)]
    plan = deployments.plan(obj, pods, NOW)
    assert (len(plan.create), len(plan.delete)) == (creates, deletes)
    assert all(pod["metadata"]["labels"]["pod-template-hash"] == "old" for pod in plan.delete)


def test_old_pods_that_serve_nobody_go_first():
    obj = stored(deployment("d", ["true"], replicas=2))
    broken = ready(deployments.pod_of(obj, "old"), is_ready=False)
    serving = ready(deployments.pod_of(obj, "old"))
    assert deployments.plan(obj, [serving, broken], NOW).delete == [broken]


def test_the_progress_deadline_counts_from_the_last_progress():
    obj = stored(deployment("d", ["true"], progressDeadlineSeconds=60))
    pod = ready(deployments.pod_of(obj, deployments.template_hash(obj)), is_ready=False)
    obj["status"] = deployments.plan(obj, [pod], NOW).status
    for seconds, wanted in ((59, "ReplicaSetUpdated"), (61, "ProgressDeadlineExceeded")):
        status = deployments.plan(obj, [pod], NOW + timedelta(seconds=seconds)).status
        assert {c["type"]: c["reason"] for c in status["conditions"]}["Progressing"] == wanted


def test_available_means_ready_for_long_enough():
    obj = stored(deployment("d", ["true"], minReadySeconds=10))
    pod = ready(deployments.pod_of(obj, deployments.template_hash(obj)))
    assert deployments.plan(obj, [pod], NOW + timedelta(seconds=9)).status["availableReplicas"] == 0
    assert deployments.plan(obj, [pod], NOW + timedelta(seconds=10)).status["availableReplicas"] == 1


def test_a_failed_pod_is_replaced_after_a_back_off():
    obj = stored(job("j", "true", backoffLimit=3))
    failed = [ended(jobs.pod_of(obj, None), 1) for _ in range(3)]
    slow = jobs.BackOff(base=1.0, limit=60.0)
    assert jobs.plan(obj, failed, NOW + timedelta(seconds=3.9), slow).create == []
    assert len(jobs.plan(obj, failed, NOW + timedelta(seconds=4), slow).create) == 1


def test_a_failing_job_ends_its_pods_before_it_is_failed():
    obj = stored(job("j", "true", completions=2, parallelism=2))
    alive, failed = ready(jobs.pod_of(obj, None)), ended(jobs.pod_of(obj, None), 1)
    first = jobs.plan(obj, [alive, failed], NOW, NO_WAIT)
    assert first.delete == [alive]
    assert [c["type"] for c in first.status["conditions"]] == ["FailureTarget"]
    obj["status"] = first.status
    second = jobs.plan(obj, [failed], NOW, NO_WAIT)
    assert [c["type"] for c in second.status["conditions"]] == ["FailureTarget", "Failed"]
    assert second.status["failed"] == 1


@pytest.mark.parametrize(
    ("rule", "code", "wanted"),
    [
        ({"operator": "In", "values": [64, 65]}, 64, "FailJob"),
        ({"operator": "In", "values": [64, 65]}, 1, "Count"),
        ({"operator": "NotIn", "values": [1]}, 64, "FailJob"),
        ({"operator": "NotIn", "values": [1]}, 1, "Count"),
        ({"operator": "In", "values": [64], "containerName": "other"}, 64, "Count"),
    ],
)
def test_failure_policy(rule, code, wanted):
    obj = stored(job("j", "true", podFailurePolicy={"rules": [{"action": "FailJob", "onExitCodes": rule}]}))
    assert jobs.failure_action(obj, ended(jobs.pod_of(obj, None), code)) == wanted


def test_a_finished_job_is_left_alone_and_expires():
    complete = {"type": "Complete", "status": "True", "lastTransitionTime": timestamp(NOW)}
    obj = stored(job("j", "true", ttlSecondsAfterFinished=60), conditions=[complete])
    plan = jobs.plan(obj, [], NOW + timedelta(seconds=59), NO_WAIT)
    assert (plan.create, plan.status, plan.is_expired) == ([], None, False)
    assert jobs.plan(obj, [], NOW + timedelta(seconds=60), NO_WAIT).is_expired


def test_more_pods_than_completions_are_never_made():
    obj = stored(job("j", "true", completions=3, parallelism=2))
    done = [ended(jobs.pod_of(obj, None), 0) for _ in range(2)]
    assert len(jobs.plan(obj, [], NOW, NO_WAIT).create) == 2
    assert len(jobs.plan(obj, done, NOW, NO_WAIT).create) == 1
    assert jobs.plan(obj, [*done, ready(jobs.pod_of(obj, None))], NOW, NO_WAIT).create == []


@pytest.mark.parametrize(
    ("durations", "wanted"),
    [
        ([], 0.0),
        ([0.0], 1.0),
        ([0.0, 0.0, 0.0], 4.0),
        ([0.0] * 20, 60.0),
        ([0.0, 120.0, 0.0], 1.0),
        ([0.0, 500.0], 0.0),
    ],
)
def test_back_off_doubles_and_starts_over_after_a_long_run(durations, wanted):
    history = [containers.State("ended", started=0.0, finished=seconds) for seconds in durations]
    assert containers.back_off_seconds(history, base=1.0, limit=60.0) == wanted


def test_endpoints_are_ready_pods_of_the_selector():
    web = stored(deployment("web", ["true"]))
    pods = [ready(deployments.pod_of(web, "a")), ready(deployments.pod_of(web, "a"), is_ready=False)]
    dying = ready(deployments.pod_of(web, "a"))
    dying["metadata"]["deletionTimestamp"] = timestamp(NOW)
    other = ready(deployments.pod_of(stored(deployment("other", ["true"])), "a"))
    obj = stored(service("web", "web"))
    obj["spec"]["clusterIP"] = "127.32.0.1"
    found = services.listeners([obj], [*pods, dying, other], {"web": 9999})
    targets = [["127.64.0.1", 8000]]
    assert found == [
        {"host": "127.32.0.1", "port": 80, "targets": targets},
        {"host": "127.0.0.1", "port": 9999, "targets": targets},
    ]
