"""Bad input to a local run: each refusal names the thing, the value and the remedy, before anything starts."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from prodrl_operator.api import Run, crd
from prodrl_operator.cluster.local.store import ObjectStore
from prodrl_operator.errors import InvalidError
from prodrl_operator.local import manifests, preflight
from tests.support.manifests import make_run


def document(**spec: Any) -> dict[str, Any]:
    base = {"model": {"uri": "file:///m", "servedName": "chess"}, "storage": {"uri": "file:///s"}}
    return {
        "apiVersion": "prodrl.dev/v1alpha1",
        "kind": "ProdRLRun",
        "metadata": {"name": "chess"},
        "spec": {**base, **spec},
    }


def run_at(folder: Path, **spec: Any) -> Run:
    return make_run(
        model={"uri": f"file://{folder}/model", "servedName": "chess"},
        storage={"uri": f"file://{folder}/store"},
        **spec,
    )


def written(path: Path, *documents: Any) -> Path:
    path.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    return path


def test_all_faults_of_a_spec_are_named_at_once() -> None:
    with pytest.raises(InvalidError) as caught:
        manifests.parse_run(document(mode="Sometimes", rounds={"steps": 0, "stepz": 3}))
    text = str(caught.value)
    assert "mode" in text
    assert "got 'Sometimes'" in text
    assert "rounds.steps" in text
    assert "rounds.stepz" in text


def test_a_local_gateway_asks_for_keys_only_where_the_run_names_them(tmp_path: Path) -> None:
    """It listens on loopback; on a cluster the same run would have to say that everyone is served."""

    def read(**spec: Any) -> Any:
        return manifests.read(written(tmp_path / "run.yaml", document(**spec)))[1]["spec"]["gateway"]

    keys = {"apiKeysSecretRef": {"name": "keys"}}
    assert read() == {"authentication": "Anonymous"}
    ObjectStore(crds=list(crd.crds().values())).create(manifests.read(tmp_path / "run.yaml")[1])
    assert read(gateway={"replicas": 2}) == {"replicas": 2, "authentication": "Anonymous"}
    assert read(gateway=keys) == keys
    assert read(gateway={"authentication": "ApiKeys"}) == {"authentication": "ApiKeys"}, "is refused when it is stored"


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([], "holds 0 ProdRLRuns"),
        ([document(), document()], "holds 2 ProdRLRuns"),
        ([document(), {"kind": "Deployment", "metadata": {"name": "x"}}], "kind 'Deployment' cannot run locally"),
        ([{"kind": "ProdRLRun", "metadata": {}}], "no metadata.name"),
    ],
    ids=["none", "two", "another kind", "no name"],
)
def test_a_local_run_takes_one_run_with_its_secrets(tmp_path: Path, documents: list[Any], said: str) -> None:
    with pytest.raises(InvalidError, match=said):
        manifests.read(written(tmp_path / "run.yaml", *documents))


def test_secrets_come_before_the_run(tmp_path: Path) -> None:
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3"}, "stringData": {"a": "b"}}
    others, run = manifests.read(written(tmp_path / "run.yaml", document(), secret))
    assert [other["kind"] for other in others] == ["Secret"]
    assert run["metadata"] == {"name": "chess", "namespace": "default"}


def test_a_file_that_is_not_yaml_or_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [", encoding="utf-8")
    with pytest.raises(InvalidError, match="is not YAML"):
        manifests.read(tmp_path / "bad.yaml")
    with pytest.raises(InvalidError, match="No such file"):
        manifests.read(tmp_path / "none.yaml")


def test_a_folder_that_is_no_model_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InvalidError, match="no such folder"):
        preflight.check_model(run_at(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InvalidError, match=r"tokenizer.json, \*.safetensors missing"):
        preflight.check_model(run_at(tmp_path))
    (tmp_path / "model" / "tokenizer.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    preflight.check_model(run_at(tmp_path))
    (tmp_path / "model" / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(InvalidError, match="not readable JSON"):
        preflight.check_model(run_at(tmp_path))


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("", encoding="utf-8")
    with pytest.raises(InvalidError, match=r"storage.uri .*: cannot be written, .*; choose a folder"):
        preflight.check_store(run_at(tmp_path))


def test_too_little_space_for_a_round_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"x" * 1000)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(InvalidError, match="a round's checkpoints need"):
        preflight.check_store(run_at(tmp_path))


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidError, match=f"--page-port {port}: the port is in use"):
            preflight.check_port(port, "--page-port")
