"""Export without quantisation, its refusals, and the identity of a policy on the way to a server."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prodrl.config import ExportConfig, FetchConfig, PolicyRef, StoreConfig
from prodrl.errors import DataError, NumericsError, UsageError
from prodrl.export import fetch, identity, source, verify
from prodrl.export.run import run
from prodrl.progress import Progress
from prodrl.records import ManifestFile
from prodrl.store import layout, open_store
from prodrl.store.folders import read_manifest, write_folder
from tests.support.tiny_qwen import save_tiny_qwen


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_qwen(tmp_path_factory.mktemp("model") / "base")


@pytest.fixture
def store_config(tmp_path):
    return StoreConfig(uri=f"file://{tmp_path}/store")


def export_config(store: StoreConfig, **changes) -> ExportConfig:
    values = {"store": store, "run": "chess", "round": 0, "quantization": "None", **changes}
    return ExportConfig(**values)


def exported(store: StoreConfig, model: Path, **changes):
    return run(export_config(store, model_uri=f"file://{model}", **changes), Progress(unit="stages"))


def test_base_model_is_published_and_exported_with_the_same_weights(store_config, model, tmp_path):
    result = exported(store_config, model)
    assert (result.policy_key, result.weights_key) == (layout.policy(0), layout.weights(0))
    files = tmp_path / "store" / result.policy_key
    want, got = load_file(model / "model.safetensors"), load_file(files / "model.safetensors")
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) and got[name].dtype == torch.bfloat16 for name in want)
    weights = tmp_path / "store" / result.weights_key
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (files / name).read_bytes() == (weights / name).read_bytes() == (model / name).read_bytes()
    manifest = read_manifest(open_store(store_config), result.policy_key)
    assert manifest.kind == "policy"
    assert manifest.attributes["policy_digest"] == result.policy_digest
    assert result.size_bytes == sum(file.size for file in manifest.files)


def test_float32_weights_are_rounded_to_bfloat16(store_config, tmp_path):
    wide = save_tiny_qwen(tmp_path / "wide", dtype="float32")
    result = exported(store_config, wide)
    want = load_file(wide / "model.safetensors")
    got = load_file(tmp_path / "store" / result.policy_key / "model.safetensors")
    assert all(torch.equal(want[name].bfloat16(), got[name]) for name in want)


def test_trained_weights_are_exported_from_the_store(store_config, model, tmp_path):
    write_folder(open_store(store_config), layout.weights(3), model, "weights", {})
    result = run(export_config(store_config, round=3, weights_key=layout.weights(3)), Progress())
    assert (result.policy_key, result.weights_key) == (layout.policy(3), layout.weights(3))
    assert not open_store(store_config).exists(layout.manifest_of(layout.weights(0)))


def test_same_input_gives_the_same_digest_in_another_store(model, tmp_path):
    results = [exported(StoreConfig(uri=f"file://{tmp_path}/{name}"), model) for name in ("a", "b")]
    assert results[0].policy_digest == results[1].policy_digest


def test_digest_depends_on_weights_and_engine_arguments(model, tmp_path):
    other = save_tiny_qwen(tmp_path / "other", seed=1)
    digests = {
        exported(StoreConfig(uri=f"file://{tmp_path}/a"), model).policy_digest,
        exported(StoreConfig(uri=f"file://{tmp_path}/b"), other).policy_digest,
        exported(StoreConfig(uri=f"file://{tmp_path}/c"), model, engine_args=("--kv-cache-dtype=fp8",)).policy_digest,
    }
    assert len(digests) == 3


def test_second_run_returns_what_the_first_wrote(store_config, model, tmp_path):
    first = exported(store_config, model)
    shard = tmp_path / "store" / first.policy_key / "model.safetensors"
    before = shard.stat().st_mtime_ns
    assert exported(store_config, model) == first
    assert shard.stat().st_mtime_ns == before


def test_second_run_with_other_settings_is_refused(store_config, model):
    exported(store_config, model)
    with pytest.raises(DataError, match="engine_args"):
        exported(store_config, model, engine_args=("--seed=1",))


def test_policy_digest_is_the_documented_hash():
    """Computed by hand, so that a change of the rule is seen: recorded data refers to these digests."""
    files = [ManifestFile(path="b", size=1, sha256="0" * 64), ManifestFile(path="a", size=2, sha256="1" * 64)]
    listed = f'{{"path":"a","sha256":"{"1" * 64}","size":2}},{{"path":"b","sha256":"{"0" * 64}","size":1}}'
    inner = hashlib.sha256(f'{{"attributes":{{}},"files":[{listed}],"kind":"policy"}}'.encode()).hexdigest()
    outer = hashlib.sha256(f'{{"engine_args":["--x"],"files":"sha256:{inner}"}}'.encode()).hexdigest()
    assert identity.policy_digest(files, ["--x"]) == f"sha256:{outer}"


@pytest.mark.parametrize(
    ("removed", "named"),
    [("config.json", "config.json"), ("model.safetensors", r"\*\.safetensors"), ("tokenizer.json", "tokenizer")],
)
def test_folder_that_is_not_a_model_is_refused(store_config, model, tmp_path, removed, named):
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / removed).unlink()
    with pytest.raises(UsageError, match=named) as caught:
        exported(store_config, broken)
    assert str(broken) in str(caught.value)
    assert not open_store(store_config).exists(layout.manifest_of(layout.weights(0)))


def test_missing_folder_and_unknown_scheme_are_refused(store_config, tmp_path):
    with pytest.raises(UsageError, match="no such folder"):
        exported(store_config, tmp_path / "nowhere")
    with pytest.raises(UsageError, match="scheme"):
        run(export_config(store_config, model_uri="hf://org/model"), Progress())
    with pytest.raises(UsageError, match="exactly one"):
        run(export_config(store_config), Progress())


def test_base_model_may_lie_in_a_store(store_config, model, tmp_path, monkeypatch):
    want = exported(StoreConfig(uri=f"file://{tmp_path}/other"), model).policy_digest
    write_folder(open_store(store_config), "models/base", model, "model", {})
    assert run(export_config(store_config, model_uri="store:models/base"), Progress()).policy_digest == want

    def bucket(config):
        assert config.uri == "s3://models/base"
        return open_store(StoreConfig(uri=f"file://{model}"))

    monkeypatch.setattr(source, "open_store", bucket)
    elsewhere = export_config(StoreConfig(uri=f"file://{tmp_path}/third"), model_uri="s3://models/base")
    assert run(elsewhere, Progress()).policy_digest == want


def test_pickled_weights_are_refused(store_config, model, tmp_path):
    broken = shutil.copytree(model, tmp_path / "broken")
    (broken / "model.safetensors").rename(broken / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pytorch_model\.bin: pickled weights are refused"):
        exported(store_config, broken)


def test_pickles_beside_safetensors_are_not_published(store_config, model, tmp_path):
    mixed = shutil.copytree(model, tmp_path / "mixed")
    (mixed / "optimizer.pt").write_bytes(b"x")
    (mixed / "modeling_evil.py").write_text("raise SystemExit")
    result = exported(store_config, mixed)
    names = {file.path for file in read_manifest(open_store(store_config), result.weights_key).files}
    assert not names & {"optimizer.pt", "modeling_evil.py"}


def test_shard_that_the_index_names_must_be_there(store_config, model, tmp_path):
    broken = shutil.copytree(model, tmp_path / "broken")
    index = {"metadata": {}, "weight_map": {"x": "model-00002-of-00002.safetensors"}}
    (broken / source.INDEX).write_text(json.dumps(index))
    with pytest.raises(UsageError, match="model-00002-of-00002"):
        exported(store_config, broken)


def test_missing_tensor_is_refused(store_config, model, tmp_path):
    broken = shutil.copytree(model, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match="up_proj"):
        exported(store_config, broken)


def test_weight_that_is_not_finite_is_named(store_config, model, tmp_path):
    broken = shutil.copytree(model, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(NumericsError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        exported(store_config, broken)
    assert not open_store(store_config).exists(layout.manifest_of(layout.policy(0)))


def test_dequantised_reads_the_format():
    """E2M1: 0x2 is 1.0, 0x7 is 6.0, 0xA is -1.0, 0x1 is 0.5; the low nibble first."""
    packed = torch.tensor([[0x72, 0x1A] + [0] * 6], dtype=torch.uint8)
    scale = torch.tensor([[2.0]], dtype=torch.float8_e4m3fn)
    values = verify.dequantised(packed, scale, torch.tensor(0.25))
    assert values[0, :4].tolist() == [0.5, 3.0, -0.5, 0.25]
    assert values.shape == (1, 16)


def fetch_config(store: StoreConfig, result) -> FetchConfig:
    return FetchConfig(store=store, policy=PolicyRef(round=0, digest=result.policy_digest, key=result.policy_key))


def test_fetch_brings_the_policy_and_marks_it_last(store_config, model, tmp_path):
    result = exported(store_config, model)
    dest = tmp_path / "served"
    fetch.run(fetch_config(store_config, result), dest)
    assert json.loads((dest / ".prodrl-policy").read_text()) == {"digest": result.policy_digest, "round": 0}
    assert load_file(dest / "model.safetensors").keys() == load_file(model / "model.safetensors").keys()


def test_second_fetch_does_nothing(store_config, model, tmp_path):
    config = fetch_config(store_config, exported(store_config, model))
    fetch.run(config, tmp_path / "served")
    before = (tmp_path / "served" / "model.safetensors").stat().st_mtime_ns
    fetch.run(config, tmp_path / "served")
    assert (tmp_path / "served" / "model.safetensors").stat().st_mtime_ns == before


def test_damaged_local_copy_is_fetched_again(store_config, model, tmp_path):
    config, shard = fetch_config(store_config, exported(store_config, model)), tmp_path / "served/model.safetensors"
    fetch.run(config, tmp_path / "served")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    fetch.run(config, tmp_path / "served")
    assert shard.read_bytes() == whole


def test_tampered_policy_is_refused_and_leaves_no_marker(store_config, model, tmp_path):
    config = fetch_config(store_config, exported(store_config, model))
    shard = tmp_path / "store" / config.policy.key / "model.safetensors"
    data = shard.read_bytes()
    shard.chmod(0o644)
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(DataError, match=r"model\.safetensors"):
        fetch.run(config, tmp_path / "served")
    assert not (tmp_path / "served" / fetch.MARKER).exists()


def test_other_digest_than_asked_for_is_refused(store_config, model, tmp_path):
    config = fetch_config(store_config, exported(store_config, model))
    asked = config.policy.model_copy(update={"digest": "sha256:" + "0" * 64})
    with pytest.raises(DataError, match="expected digest sha256:0000"):
        fetch.run(config.model_copy(update={"policy": asked}), tmp_path / "served")
    assert not (tmp_path / "served").exists()


def test_changed_engine_arguments_in_the_manifest_are_noticed(store_config, model, tmp_path):
    config = fetch_config(store_config, exported(store_config, model))
    path = tmp_path / "store" / layout.manifest_of(config.policy.key)
    manifest = json.loads(path.read_text())
    manifest["attributes"]["engine_args"] = '["--dtype=float16"]'
    path.chmod(0o644)
    path.write_text(json.dumps(manifest))
    with pytest.raises(DataError, match="expected digest"):
        fetch.run(config, tmp_path / "served")


def test_folder_of_another_policy_is_replaced_whole(store_config, model, tmp_path):
    first = fetch_config(store_config, exported(store_config, model))
    fetch.run(first, tmp_path / "served")
    (tmp_path / "served" / "model-00002-of-00002.safetensors").write_bytes(b"of an older policy")
    fetch.run(first, tmp_path / "served")
    assert not (tmp_path / "served" / "model-00002-of-00002.safetensors").exists()


def test_folder_with_foreign_files_is_left_alone(store_config, model, tmp_path):
    config = fetch_config(store_config, exported(store_config, model))
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"thesis\.txt"):
        fetch.run(config, tmp_path / "served")
    assert (tmp_path / "served" / "thesis.txt").read_text() == "years of work"


def test_interrupted_fetch_is_taken_up(store_config, model, tmp_path):
    config = fetch_config(store_config, exported(store_config, model))
    dest = tmp_path / "served"
    dest.mkdir()
    (dest / fetch.STARTED).touch()
    (dest / "model.safetensors").write_bytes(b"half")
    fetch.run(config, dest)
    assert fetch.read_marker(dest)["digest"] == config.policy.digest
    assert not (dest / fetch.STARTED).exists()
