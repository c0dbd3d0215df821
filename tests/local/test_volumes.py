"""Volumes, environment and the translation of paths and names, in real processes and as pure functions."""

from __future__ import annotations

import base64
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prodrl_operator.cluster import port
from prodrl_operator.cluster.local import podspec
from tests.support.local_cluster import eventually, finished, job, pods_of, terminated

PATHS = {"/scratch": "/here/scratch", "/etc/prodrl": "/here/config", "/scratch/deep": "/here/deep"}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("/scratch", "/here/scratch"),
        ("/scratch/", "/here/scratch/"),
        ("/scratch/a b", "/here/scratch/a b"),
        ("/scratch/deep/x", "/here/deep/x"),
        ("/scratch/deeper", "/here/scratch/deeper"),
        ("--config=/etc/prodrl/config.json", "--config=/here/config/config.json"),
        ("file:///scratch/x", "file:///here/scratch/x"),
        ('{"dir":"/scratch","n":1}', '{"dir":"/here/scratch","n":1}'),
        ("cat /scratch/a >/etc/prodrl/b", "cat /here/scratch/a >/here/config/b"),
        ("/scratch:/etc/prodrl", "/here/scratch:/here/config"),
        ("/scratchy", "/scratchy"),
        ("/data/scratch", "/data/scratch"),
        ("./scratch", "./scratch"),
        ("s3://bucket/scratch", "s3://bucket/scratch"),
        ("/scratch-2", "/scratch-2"),
        ("/scratch.old", "/scratch.old"),
        ("0.0.0.0:80", "127.64.0.1:80"),
        ("10.0.0.0", "10.0.0.0"),
        ("http://web:8000/v1", "http://127.32.0.1:8000/v1"),
        ("http://web.default:8000", "http://127.32.0.1:8000"),
        ("web.default.svc:8000", "127.32.0.1:8000"),
        ("https://web.default.svc.cluster.local/x", "https://127.32.0.1/x"),
        ("job-0.web.default.svc:29500", "127.64.0.9:29500"),
        ("http://web.example.com", "http://web.example.com"),
        ("http://other:80", "http://other:80"),
        ("s3://web/key", "s3://web/key"),
        ("web", "web"),
    ],
)
def test_translation(text, wanted):
    def resolve(service: str, namespace: str, host: str | None) -> str | None:
        if (service, namespace) != ("web", "default"):
            return None
        return {None: "127.32.0.1", "job-0": "127.64.0.9"}.get(host)

    assert podspec.Translation(PATHS, "127.64.0.1", "default", resolve).text(text) == wanted


@given(st.text(alphabet="/ab.:-= ", max_size=30))
def test_translation_changes_nothing_without_a_mount_path(text):
    paths = {"/scratch": "/here"}
    assert podspec.Translation(paths).text(text) == text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("$(A)", "1"), ("$$(A)", "$(A)"), ("$(B)", "$(B)"), ("$A", "$A"), ("x$(A)y$(A)", "x1y1"), ("$$$(A)", "$1")],
)
def test_variables_expand_as_in_kubernetes(text, wanted):
    assert podspec.expand(text, {"A": "1"}) == wanted


def test_environment_and_downward_fields(cluster):
    cluster.store.create(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"key": "from config"}}
    )
    cluster.store.create(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"key": "from secret"}}
    )
    field = lambda path: {"valueFrom": {"fieldRef": {"fieldPath": path}}}  # noqa: E731
    env = [
        {"name": "POD", **field("metadata.name")},
        {"name": "IP", **field("status.podIP")},
        {"name": "LABEL", **field("metadata.labels['job-name']")},
        {"name": "CONFIG", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "key"}}},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}},
        {"name": "MISSING", "valueFrom": {"secretKeyRef": {"name": "s", "key": "no", "optional": True}}},
        {"name": "BOTH", "value": "$(CONFIG) and $(SECRET)"},
    ]
    script = 'echo "$POD|$IP|$LABEL|$BOTH|${MISSING-unset}|$0|$HOSTNAME" > /dev/termination-log'
    cluster.store.create(job("env", "", container={"command": ["sh", "-c", script], "args": ["$(IP)"], "env": env}))
    assert finished(cluster, "env")["end"]["type"] == "Complete"
    (pod,) = pods_of(cluster, "env")
    name, address = pod["metadata"]["name"], pod["status"]["podIP"]
    wanted = f"{name}|{address}|env|from config and from secret|unset|{address}|{name}\n"
    assert terminated(pod)["message"] == wanted


def test_the_controllers_environment_stays_outside(cluster, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "private")
    cluster.store.create(job("clean", 'test -z "$AWS_SECRET_ACCESS_KEY"'))
    assert finished(cluster, "clean")["end"]["type"] == "Complete"


def test_a_missing_object_is_waited_for(cluster):
    env = [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "later", "key": "key"}}}]
    cluster.store.create(job("waits", "true", container={"env": env}))

    def reason() -> str | None:
        for pod in pods_of(cluster, "waits"):
            for status in pod.get("status", {}).get("containerStatuses", ()):
                return status["state"].get("waiting", {}).get("message")
        return None

    assert "later" in eventually(reason)
    cluster.store.create(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "later"}, "stringData": {"key": "x"}}
    )
    assert finished(cluster, "waits")["end"]["type"] == "Complete"


def test_volumes_of_all_kinds(cluster, tmp_path):
    data = {"a.json": '{"url": "http://svc.default.svc:80"}', "b": "/cfg/b"}
    cluster.store.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": data})
    secret = {"key": base64.b64encode(b"hidden").decode()}
    cluster.store.create({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": secret})
    volumes = [
        {"name": "config", "configMap": {"name": "c", "items": [{"key": "a.json", "path": "sub/x.json"}]}},
        {"name": "plain", "configMap": {"name": "c"}},
        {"name": "secret", "secret": {"secretName": "s"}},
        {"name": "host", "hostPath": {"path": str(tmp_path)}},
        {"name": "claim", "persistentVolumeClaim": {"claimName": "kept"}},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts = [
        {"name": "config", "mountPath": "/items"},
        {"name": "plain", "mountPath": "/cfg"},
        {"name": "plain", "mountPath": "/one", "subPath": "b"},
        {"name": "secret", "mountPath": "/secret"},
        {"name": "host", "mountPath": "/host"},
        {"name": "claim", "mountPath": "/claim", "subPath": "part"},
        {"name": "tmp", "mountPath": "/tmp/room"},
    ]
    script = (
        "set -e; cat /items/sub/x.json > /host/items; cat /cfg/b > /host/plain; cat /one > /host/one; "
        "cat /secret/key > /host/secret; echo kept > /claim/file; echo x > /tmp/room/file; test -f $WORK/file"
    )
    container = {"volumeMounts": mounts, "env": [{"name": "WORK", "value": "/tmp/room"}]}
    cluster.store.create(job("volumes", script, container=container, pod={"volumes": volumes}))
    assert finished(cluster, "volumes")["end"]["type"] == "Complete"
    assert (tmp_path / "items").read_text() == data["a.json"]
    assert (tmp_path / "plain").read_text() == "/cfg/b"
    assert (tmp_path / "one").read_text() == "/cfg/b"
    assert (tmp_path / "secret").read_text() == "hidden"
    assert (cluster.data / "volumes" / "default" / "kept" / "part" / "file").read_text() == "kept\n"
    cluster.store.delete(port.JOB, "default", "volumes")
    eventually(lambda: not os.listdir(cluster.data / "pods"))
    assert (cluster.data / "volumes" / "default" / "kept" / "part" / "file").exists()


def test_a_changed_config_map_reaches_a_running_pod_at_once_or_not_at_all(cluster, tmp_path):
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a": "1\n", "b": "1\n"}}
    cluster.store.create(config)
    script = f"""
    while ! test -e {tmp_path}/stop; do
      set -- $(cd /cfg/..data && cat a b); test "$1" = "$2" || exit 9; cat /cfg/a > {tmp_path}/seen
    done"""
    pod = {"volumes": [{"name": "c", "configMap": {"name": "c"}}]}
    mounts = {"volumeMounts": [{"name": "c", "mountPath": "/cfg"}]}
    cluster.store.create(job("reader", script, container=mounts, pod=pod))
    eventually((tmp_path / "seen").exists)
    cluster.store.apply(config | {"data": {"a": "2\n", "b": "2\n"}})
    eventually(lambda: (tmp_path / "seen").read_text() == "2\n")
    (tmp_path / "stop").touch()
    assert finished(cluster, "reader")["end"]["type"] == "Complete"


def test_an_ended_pod_leaves_no_scratch_behind(cluster):
    volumes = [{"name": "disk", "emptyDir": {}}, {"name": "memory", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "disk", "mountPath": "/disk"}, {"name": "memory", "mountPath": "/memory"}]
    script = "touch /disk/x /memory/x && echo /disk /memory > /dev/termination-log"
    cluster.store.create(job("scratch", script, container={"volumeMounts": mounts}, pod={"volumes": volumes}))
    assert finished(cluster, "scratch")["end"]["type"] == "Complete"
    folders = terminated(pods_of(cluster, "scratch")[0])["message"].split()
    assert len(folders) == 2
    eventually(lambda: not any(os.path.exists(folder) for folder in folders))


def test_a_path_cannot_leave_its_volume(cluster, tmp_path):
    mounts = {"volumeMounts": [{"name": "t", "mountPath": "/t", "subPath": "../../../x"}]}
    cluster.store.create(job("escape", "true", container=mounts, pod={"volumes": [{"name": "t", "emptyDir": {}}]}))
    assert finished(cluster, "escape")["end"]["type"] == "Failed"
    assert "subPath" in pods_of(cluster, "escape")[0]["status"]["message"]
