"""The controller is killed, stopped, started twice: what happens to the processes."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from prodrl_operator.cluster import port
from prodrl_operator.cluster.local import containers
from prodrl_operator.errors import InvalidError
from tests.local.test_serving import answers
from tests.support.local_cluster import (
    ROOT,
    deployment,
    eventually,
    finished,
    http_deployment,
    job,
    open_cluster,
    pods_of,
    ready_replicas,
    service,
    terminated,
)

CONTROLLER = """
import pathlib, sys, time
from tests.support.local_cluster import open_cluster
cluster = open_cluster(pathlib.Path(sys.argv[1]))
cluster.start()
print("started", flush=True)
time.sleep(1000)
"""


def start_controller(data: pathlib.Path) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", CONTROLLER, str(data)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"started\n"
    return process


@pytest.fixture
def data(tmp_path):
    yield tmp_path / "data"
    containers.kill_marked(str(tmp_path))


def test_a_killed_controller_comes_back_to_its_pods(data, tmp_path):
    first = open_cluster(data)
    first.start()
    first.store.apply(http_deployment("web", "hello"))
    first.store.apply(service("web", "web"))
    first.store.create(
        job("long", f"while ! test -e {tmp_path}/go; do sleep 0.05; done; echo m > /dev/termination-log; exit 5")
    )
    first.store.create(job("running", "sleep 100"))
    eventually(lambda: ready_replicas(first, "web") == 1)
    eventually(lambda: all(first.store.get(port.JOB, "default", n)["status"].get("ready") for n in ("long", "running")))
    host = first.store.get(port.SERVICE, "default", "web")["spec"]["clusterIP"]
    first.stop(terminate=False)

    second = start_controller(data)
    second.send_signal(signal.SIGKILL)
    second.wait()
    assert eventually(lambda: answers(host, 80)) == "hello"  # users are served while no controller runs
    before = {name: pid_of(data, name) for name in ("web", "running")}
    (tmp_path / "go").touch()
    eventually(lambda: not marked_job(data, "long"))

    third = open_cluster(data)
    gaps = []
    third.store.watch(lambda _: gaps.append(ready_replicas(third, "web") == 0))
    third.start()
    try:
        assert finished(third, "long")["end"]["type"] == "Failed"
        (pod,) = pods_of(third, "long")
        assert (terminated(pod)["exitCode"], terminated(pod)["message"]) == (5, "m\n")
        assert not any(gaps)  # it stays in its Service while it is adopted
        assert {name: pid_of(data, name) for name in ("web", "running")} == before
        for name in ("web", "running"):
            (pod,) = pods_of(third, name)
            assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
        assert answers(host, 80) == "hello"
    finally:
        third.stop(terminate=True)
    assert containers.marked(str(data)) == []


def marked_job(data: pathlib.Path, name: str) -> list[int]:
    found = []
    for pid in containers.marked(str(data)):
        try:
            if f"HOSTNAME={name}-".encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def pid_of(data: pathlib.Path, name: str) -> int:
    return min(marked_job(data, name))


def test_a_killed_shim_counts_as_a_killed_container(data):
    running = open_cluster(data)
    running.start()
    try:
        running.store.create(job("orphaned", "setsid sleep 100 & sleep 100"))
        eventually(lambda: len(marked_job(data, "orphaned")) >= 3)
        box = containers.Container(next((data / "pods").glob("*/containers/main")))
        told = eventually(lambda: containers.read_json(box.folder / "0" / "pid.json"))
        os.kill(told["shim"], signal.SIGKILL)
        assert finished(running, "orphaned")["end"]["type"] == "Failed"
        assert terminated(pods_of(running, "orphaned")[0])["exitCode"] == 137
        assert containers.marked(str(data / "pods")) == []
    finally:
        running.stop(terminate=True)


def test_stopping_ends_everything_in_time(data):
    running = open_cluster(data)
    running.start()
    running.store.create(job("stubborn", "trap '' TERM; setsid sleep 100 & sleep 100 & wait; sleep 100"))
    running.store.apply(deployment("polite", ["sleep", "100"]))
    eventually(lambda: len(containers.marked(str(data / "pods"))) >= 4)
    began = time.monotonic()
    running.stop(terminate=True)
    assert time.monotonic() - began < running.settings.stop_seconds + 20, "not the 100 s that the processes would take"
    assert containers.marked(str(data)) == []


def test_a_stopped_environment_starts_again_where_it_was(data):
    running = open_cluster(data)
    running.start()
    running.store.apply(http_deployment("web", "hello"))
    eventually(lambda: ready_replicas(running, "web") == 1)
    running.stop(terminate=True)
    again = open_cluster(data)
    again.start()
    try:
        eventually(lambda: pods_of(again, "web")[0]["status"]["containerStatuses"][0]["restartCount"] == 1)
        eventually(lambda: ready_replicas(again, "web") == 1)
    finally:
        again.stop(terminate=True)


def test_a_second_controller_is_refused(data):
    process = start_controller(data)
    try:
        with pytest.raises(InvalidError, match=f"in use by process {process.pid}.*--data"):
            open_cluster(data)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    open_cluster(data).stop(terminate=True)  # a killed one holds nothing


def test_two_environments_on_one_machine_do_not_meet(tmp_path):
    both = [open_cluster(tmp_path / name) for name in ("a", "b")]
    try:
        for running, text in zip(both, ("from a", "from b"), strict=True):
            running.start()
            running.store.apply(http_deployment("web", text))
            running.store.apply(service("web", "web"))
        for running, text in zip(both, ("from a", "from b"), strict=True):
            eventually(lambda running=running: ready_replicas(running, "web") == 1)
            host = running.store.get(port.SERVICE, "default", "web")["spec"]["clusterIP"]
            assert eventually(lambda host=host: answers(host, 80)) == text
    finally:
        for running in both:
            running.stop(terminate=True)
    assert containers.marked(str(tmp_path)) == []
