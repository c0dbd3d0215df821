"""The object store itself: durability, the crash hook, strictness, and a model-based test of its versions."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import stat
import subprocess
import sys
import tempfile
import threading

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from prodrl_operator.cluster import port
from prodrl_operator.cluster.local.schema import load
from prodrl_operator.cluster.local.store import ObjectStore
from prodrl_operator.errors import AlreadyExistsError, ConflictError, InvalidError, UnsupportedError
from tests.support.fake_kubelet import FakeKubelet, Outcome
from tests.support.local_cluster import CRDS, ROOT, deployment, job


def config(name: str = "one", **metadata) -> port.Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name} | metadata, "data": {"a": "1"}}


class CrashError(Exception):
    pass


def test_a_file_keeps_everything(tmp_path):
    path = tmp_path / "state.db"
    first = ObjectStore(path, crds=CRDS)
    made = first.apply(config(labels={"x": "1"}, finalizers=["prodrl.dev/finalizer"]))
    first.delete(port.CONFIG_MAP, "default", "one")
    dying = first.get(port.CONFIG_MAP, "default", "one")
    first.close()
    second = ObjectStore(path, crds=CRDS)
    assert second.get(port.CONFIG_MAP, "default", "one") == dying
    after = second.apply(config(finalizers=["prodrl.dev/finalizer"]))
    assert "labels" not in after["metadata"]  # ownership of fields survives, too
    assert int(after["metadata"]["resourceVersion"]) > int(dying["metadata"]["resourceVersion"])
    assert after["metadata"]["uid"] == made["metadata"]["uid"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


WRITER = """
import pathlib, sys
from prodrl_operator.cluster.local.store import ObjectStore
store = ObjectStore(pathlib.Path(sys.argv[1]))
for number in range(100000):
    store.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"c{number}"}})
    print(number, flush=True)
"""


def test_a_kill_loses_nothing_that_was_answered(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "state.db")], cwd=ROOT, stdout=subprocess.PIPE
    )
    for _ in range(50):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    answered = 50 + len(process.stdout.read().splitlines())
    process.wait()
    store = ObjectStore(tmp_path / "state.db")
    names = {obj["metadata"]["name"] for obj in store.list(port.CONFIG_MAP)}
    assert {f"c{number}" for number in range(answered - 1)} <= names
    assert len(names) <= answered + 1


def test_a_foreign_file_is_refused(tmp_path):
    (tmp_path / "state.db").write_text("not a database" * 100)
    with pytest.raises(InvalidError, match="choose another data folder"):
        ObjectStore(tmp_path / "state.db")


def test_the_hook_stops_a_write_before_and_after_its_commit():
    at = {"when": ""}

    def hook(when: str, mutation: port.Object) -> None:
        assert mutation["verb"] in ("create", "delete")
        assert mutation["object"]["kind"] == "ConfigMap"
        if when == at["when"]:
            raise CrashError

    store = ObjectStore(on_mutation=hook)
    at["when"] = "before"
    with pytest.raises(CrashError):
        store.create(config())
    assert store.get(port.CONFIG_MAP, "default", "one") is None
    at["when"] = "after"
    with pytest.raises(CrashError):
        store.create(config())
    assert store.get(port.CONFIG_MAP, "default", "one") is not None
    with store.as_system():
        store.delete(port.CONFIG_MAP, "default", "one")  # the system's own writes are not the controller's


def test_garbage_left_by_a_crash_is_collected_later():
    def hook(when: str, mutation: port.Object) -> None:
        if (when, mutation["verb"]) == ("after", "delete"):
            raise CrashError

    store = ObjectStore(on_mutation=hook)
    owner = store.create(config("owner"))
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"]}
    store.create(config("child", ownerReferences=[reference]))
    with pytest.raises(CrashError):
        store.delete(port.CONFIG_MAP, "default", "owner")
    assert store.get(port.CONFIG_MAP, "default", "child") is not None
    assert store.collect_garbage() == 1
    assert store.get(port.CONFIG_MAP, "default", "child") is None


def test_unknown_kinds_and_fields_are_refused():
    store = ObjectStore()
    with pytest.raises(UnsupportedError, match="StatefulSet"):
        store.create({"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": {"name": "s"}})
    with pytest.raises(UnsupportedError, match="ProdRLRun"):
        store.list(port.RUN)  # its CRD was not given
    with pytest.raises(InvalidError, match="sepc"):
        store.create(deployment("d", ["true"]) | {"sepc": {}})
    with pytest.raises(InvalidError, match="lables"):
        store.create(config(lables={}))
    with pytest.raises(UnsupportedError, match="status"):
        store.update_status(config())


@pytest.mark.parametrize("rule", ["quantity(self.x) > quantity('1')", "self.?x.hasValue()", "self.x.find('a') == 'a'"])
def test_rules_that_cannot_be_evaluated_are_refused_at_once(rule):
    crd = json.loads(json.dumps(CRDS[0]))
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["x-kubernetes-validations"] = [{"rule": rule}]
    with pytest.raises(UnsupportedError):
        load(crd)


def test_threads_see_every_conflict():
    """Many writers with optimistic concurrency lose no increment."""
    store = ObjectStore(crds=CRDS)
    store.create(job("counter", "true", suspend=True))

    def add() -> None:
        done = 0
        while done < 20:
            obj = store.get(port.JOB, "default", "counter")
            obj["status"] = {"failed": obj.get("status", {}).get("failed", 0) + 1}
            try:
                store.update_status(obj)
                done += 1
            except ConflictError:
                continue

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.get(port.JOB, "default", "counter")["status"]["failed"] == 80


def test_the_scripted_kubelet_plays_jobs_and_deployments():
    store = ObjectStore(crds=CRDS)
    outcomes = {"good": Outcome({"x": 1}), "bad": Outcome("why", 64), "busy": None}
    kubelet = FakeKubelet(store, lambda item: outcomes[item["metadata"]["name"]], lambda _: "ImagePullBackOff")
    for name in outcomes:
        store.create(job(name, "true"))
    store.create(deployment("web", ["true"]))
    kubelet.tick()
    kubelet.tick()
    ends = {}
    for item in store.list(port.JOB):
        conditions = item["status"].get("conditions", [])
        ends[item["metadata"]["name"]] = [c["type"] for c in conditions if c["type"] in ("Complete", "Failed")]
    assert ends == {"good": ["Complete"], "bad": ["Failed"], "busy": []}
    messages = {
        pod["metadata"]["labels"]["job-name"]: pod["status"]["containerStatuses"][0]["state"]
        for pod in store.list(port.POD)
        if "job-name" in pod["metadata"]["labels"]
    }
    assert json.loads(messages["good"]["terminated"]["message"]) == {"x": 1}
    assert messages["bad"]["terminated"]["exitCode"] == 64
    assert "running" in messages["busy"]
    (pod,) = store.list(port.POD, labels={"app": "web"})
    assert pod["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "ImagePullBackOff"


class Versions(RuleBasedStateMachine):
    """Against a plain model: versions only grow, stale writes never pass, a file says the same as memory."""

    names = Bundle("names")
    stale = Bundle("stale")

    @initialize()
    def begin(self) -> None:
        self.path = pathlib.Path(tempfile.mkdtemp(dir=os.environ["PRODRL_TEST_FOLDER"])) / "state.db"
        self.store = ObjectStore(self.path)
        self.model: dict[str, dict[str, str]] = {}
        self.highest = 0

    @rule(target=names, name=st.sampled_from(["a", "b", "c"]), value=st.text(max_size=3))
    def create(self, name: str, value: str) -> str:
        try:
            self._made(self.store.create(config(name) | {"data": {"v": value}}))
        except AlreadyExistsError:
            assert name in self.model
        else:
            assert name not in self.model
            self.model[name] = {"v": value}
        return name

    @rule(name=names, key=st.sampled_from("vw"), value=st.text(max_size=3))
    def apply(self, name: str, key: str, value: str) -> None:
        before = self.store.get(port.CONFIG_MAP, "default", name)
        after = self.store.apply(config(name) | {"data": {key: value}})
        self.highest = max(self.highest, int(after["metadata"]["resourceVersion"]))
        if before and before["data"] == after["data"]:
            assert before == after
        assert after["data"][key] == value
        self.model[name] = after["data"]

    @rule(target=stale, name=names)
    def read(self, name: str) -> port.Object | None:
        return self.store.get(port.CONFIG_MAP, "default", name)

    @rule(old=consumes(stale))
    def finalize_with_what_was_read(self, old: port.Object | None) -> None:
        if old is None:
            return
        name = old["metadata"]["name"]
        present = self.store.get(port.CONFIG_MAP, "default", name)
        if present is None:
            return
        try:
            after = self.store.set_finalizers(old, ["a/b"] if "finalizers" not in old["metadata"] else [])
        except ConflictError:
            assert present["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"]
        except InvalidError:
            assert "deletionTimestamp" in present["metadata"]
        else:
            assert present["metadata"]["resourceVersion"] == old["metadata"]["resourceVersion"]
            self._made(after)
            if "deletionTimestamp" in after["metadata"] and not after["metadata"].get("finalizers"):
                del self.model[name]

    @rule(name=names)
    def delete(self, name: str) -> None:
        self.store.delete(port.CONFIG_MAP, "default", name)
        left = self.store.get(port.CONFIG_MAP, "default", name)
        if left is None:
            self.model.pop(name, None)
        else:
            assert left["metadata"]["finalizers"]

    @rule()
    def reopen(self) -> None:
        before = self.store.list(port.CONFIG_MAP)
        self.store.close()
        self.store = ObjectStore(self.path)
        assert self.store.list(port.CONFIG_MAP) == before

    @invariant()
    def says_what_the_model_says(self) -> None:
        if hasattr(self, "store"):
            listed = self.store.list(port.CONFIG_MAP)
            assert {obj["metadata"]["name"]: obj["data"] for obj in listed} == self.model

    def _made(self, obj: port.Object) -> None:
        version = int(obj["metadata"]["resourceVersion"])
        assert version > self.highest
        self.highest = version

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()


def test_versions(tmp_path, monkeypatch):
    monkeypatch.setenv("PRODRL_TEST_FOLDER", str(tmp_path))
    Versions.TestCase.settings = settings(
        max_examples=30, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
    )
    Versions.TestCase("runTest").runTest()
