"""Jobs as real processes: success, failure, exit codes, messages, deadlines, suspension."""

from __future__ import annotations

import pytest

from prodrl_operator.cluster import port
from prodrl_operator.cluster.local import containers
from prodrl_operator.errors import UnsupportedError
from tests.support.local_cluster import eventually, finished, job, pods_of, terminated


def test_a_job_that_exits_zero_is_complete(cluster):
    cluster.store.create(job("good", "echo hello; echo '{\"x\": 1}' > /dev/termination-log"))
    status = finished(cluster, "good")
    assert status["end"]["type"] == "Complete"
    assert (status["succeeded"], status["failed"], status["active"]) == (1, 0, 0)
    assert status["completionTime"] >= status["startTime"]
    (pod,) = pods_of(cluster, "good")
    assert pod["status"]["phase"] == "Succeeded"
    assert terminated(pod)["message"] == '{"x": 1}\n'
    assert cluster.log_path("default", pod["metadata"]["name"], "main").read_text() == "hello\n"


def test_a_failing_job_is_tried_as_often_as_its_limit_says(cluster):
    cluster.store.create(job("bad", "exit 3", backoffLimit=2))
    status = finished(cluster, "bad")
    assert (status["end"]["type"], status["end"]["reason"]) == ("Failed", "BackoffLimitExceeded")
    assert status["failed"] == 3
    assert [terminated(pod)["exitCode"] for pod in pods_of(cluster, "bad")] == [3, 3, 3]


def test_the_failure_policy_ends_a_job_at_once(cluster):
    rules = [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [64, 65]}}]
    cluster.store.create(job("usage", "exit 64", backoffLimit=5, podFailurePolicy={"rules": rules}))
    status = finished(cluster, "usage")
    assert (status["end"]["reason"], status["failed"]) == ("PodFailurePolicy", 1)


def test_an_ignored_exit_code_does_not_count(cluster, tmp_path):
    rules = [{"action": "Ignore", "onExitCodes": {"operator": "In", "values": [80]}}]
    script = f"mkdir {tmp_path}/once || exit 0; exit 80"
    cluster.store.create(job("preempted", script, backoffLimit=0, podFailurePolicy={"rules": rules}))
    status = finished(cluster, "preempted")
    assert (status["end"]["type"], status["failed"], status["succeeded"]) == ("Complete", 0, 1)


def test_a_deadline_ends_the_job_and_its_process(cluster):
    cluster.store.create(job("slow", "trap '' TERM; sleep 100 & wait; sleep 100", activeDeadlineSeconds=1))
    status = finished(cluster, "slow")
    assert (status["end"]["type"], status["end"]["reason"]) == ("Failed", "DeadlineExceeded")
    assert eventually(lambda: containers.marked(str(cluster.data / "pods")) == [])


def test_suspending_stops_and_resuming_starts_again(cluster):
    manifest = job("pause", "sleep 100")
    cluster.store.apply(manifest)
    eventually(lambda: cluster.store.get(port.JOB, "default", "pause").get("status", {}).get("ready"))
    manifest["spec"]["suspend"] = True
    cluster.store.apply(manifest)
    eventually(lambda: not pods_of(cluster, "pause"))
    status = cluster.store.get(port.JOB, "default", "pause")["status"]
    assert "startTime" not in status
    assert status["conditions"][0]["type"] == "Suspended"
    manifest["spec"]["suspend"] = False
    cluster.store.apply(manifest)
    eventually(lambda: cluster.store.get(port.JOB, "default", "pause")["status"].get("ready"))


def test_an_indexed_job_runs_each_index(cluster, tmp_path):
    script = f"echo $JOB_COMPLETION_INDEX > {tmp_path}/$JOB_COMPLETION_INDEX"
    cluster.store.create(job("nodes", script, completions=3, parallelism=2, completionMode="Indexed"))
    status = finished(cluster, "nodes")
    assert (status["succeeded"], status["completedIndexes"]) == (3, "0-2")
    assert [(tmp_path / str(index)).read_text() for index in range(3)] == ["0\n", "1\n", "2\n"]


def test_restart_on_failure_happens_in_the_same_pod(cluster, tmp_path):
    script = f"mkdir {tmp_path}/first && exit 1; mkdir {tmp_path}/second && exit 1; exit 0"
    cluster.store.create(job("again", script, backoffLimit=5, pod={"restartPolicy": "OnFailure"}))
    assert finished(cluster, "again")["end"]["type"] == "Complete"
    (pod,) = pods_of(cluster, "again")
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 2
    assert pod["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 1


def test_init_containers_run_first_and_their_failure_fails_the_pod(cluster, tmp_path):
    volumes = [{"name": "work", "emptyDir": {}}]
    mount = {"volumeMounts": [{"name": "work", "mountPath": "/room"}]}
    init = [{"name": "fetch", "command": ["sh", "-c", "echo data > /room/file"], **mount}]
    pod = {"initContainers": init, "volumes": volumes}
    cluster.store.create(job("init", "test $(cat /room/file) = data", container=mount, pod=pod))
    assert finished(cluster, "init")["end"]["type"] == "Complete"
    bad = [{"name": "fetch", "command": ["false"]}]
    cluster.store.create(job("bad-init", f"touch {tmp_path}/ran", pod={"initContainers": bad}))
    assert finished(cluster, "bad-init")["end"]["type"] == "Failed"
    assert not (tmp_path / "ran").exists()


def test_a_missing_command_or_program_is_named(cluster):
    cluster.store.create(job("image", "", container={"command": []}))
    assert finished(cluster, "image")["end"]["type"] == "Failed"
    assert "explicit command" in pods_of(cluster, "image")[0]["status"]["message"]
    cluster.store.create(job("typo", "", container={"command": ["no-such-program"]}))
    finished(cluster, "typo")
    assert terminated(pods_of(cluster, "typo")[0])["exitCode"] == 127


def test_a_log_stands_in_for_the_message_when_asked(cluster):
    policy = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    cluster.store.create(job("loud", "echo because; exit 1", container=policy))
    finished(cluster, "loud")
    assert terminated(pods_of(cluster, "loud")[0])["message"] == "because\n"


def test_deleting_a_job_ends_its_processes(cluster):
    ready = cluster.data / "deaf"
    cluster.store.create(job("gone", f"trap '' TERM; touch {ready}; sleep 100"))
    eventually(ready.exists)
    cluster.store.delete(port.JOB, "default", "gone", propagation="Foreground")
    assert cluster.store.get(port.JOB, "default", "gone")["metadata"]["deletionTimestamp"]
    eventually(lambda: cluster.store.get(port.JOB, "default", "gone") is None)
    assert containers.marked(str(cluster.data / "pods")) == []


def test_children_that_left_the_process_group_die_with_the_container(cluster):
    script = "setsid sleep 100 & setsid sh -c 'sleep 100 & sleep 100' & sleep 0.3"
    cluster.store.create(job("orphans", script))
    finished(cluster, "orphans")
    assert containers.marked(str(cluster.data / "pods")) == []


def test_what_is_not_implemented_is_refused(cluster):
    with pytest.raises(UnsupportedError, match="backoffLimitPerIndex"):
        cluster.store.create(job("no", "true", backoffLimitPerIndex=1))
    with pytest.raises(UnsupportedError, match="downwardAPI"):
        cluster.store.create(job("no", "true", pod={"volumes": [{"name": "d", "downwardAPI": {}}]}))
