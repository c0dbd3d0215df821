"""NVFP4 export of a tiny Qwen3 with the real quantiser; importing it takes a quarter of a minute."""

from __future__ import annotations

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from prodrl.config import ExportConfig, StoreConfig
from prodrl.errors import DataError, NumericsError
from prodrl.export import verify
from prodrl.export.run import run
from prodrl.progress import Progress
from prodrl.records import Sample, arrow_schema
from prodrl.store import layout, open_store
from prodrl.store.folders import write_folder
from tests.support.tiny_qwen import save_tiny_qwen

pytestmark = pytest.mark.slow

GATE = "model.layers.0.mlp.gate_proj."
UP = "model.layers.0.mlp.up_proj."


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_qwen(tmp_path_factory.mktemp("model") / "base", layers=2)


def exported(folder, model, **changes):
    store = StoreConfig(uri=f"file://{folder}")
    values = {"store": store, "run": "chess", "round": 0, "model_uri": f"file://{model}", "calibration_samples": 4}
    return run(ExportConfig(**{**values, **changes}), Progress())


@pytest.fixture(scope="module")
def policy(model, tmp_path_factory):
    """Folder of an exported policy, and its digest."""
    root = tmp_path_factory.mktemp("store")
    result = exported(root, model)
    return root / result.policy_key, result.policy_digest


def test_linears_are_packed_and_the_rest_is_bfloat16(policy, model):
    tensors, originals = load_file(policy[0] / "model.safetensors"), load_file(model / "model.safetensors")
    for name, original in originals.items():
        if name.endswith("proj.weight"):
            assert tensors[name].dtype == torch.uint8
            assert tensors[name].shape == (original.shape[0], original.shape[1] // 2)
            assert tensors[name.replace("weight", "weight_scale")].shape == (original.shape[0], original.shape[1] // 16)
        else:
            assert torch.equal(tensors[name], original)
            assert tensors[name].dtype == torch.bfloat16
    scales = [tensor for name, tensor in tensors.items() if "scale" in name]
    assert len(scales) == 2 * 7 * 3
    assert all((scale.float() > 0).all() and scale.float().isfinite().all() for scale in scales)


def test_configuration_names_the_quantisation_and_tokenizer_files_come_along(policy, model):
    configuration = json.loads((policy[0] / "config.json").read_text())
    assert configuration["quantization_config"]["quant_algo"] == "NVFP4"
    assert configuration["quantization_config"]["quant_method"] == "modelopt"
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (policy[0] / name).read_bytes() == (model / name).read_bytes()


def test_source_is_not_touched(policy, model):
    published = policy[0].parent / "weights" / "model.safetensors"
    assert published.read_bytes() == (model / "model.safetensors").read_bytes()


def test_dequantised_weights_agree_with_the_quantisers_own_reading(policy, model):
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    tensors = load_file(policy[0] / "model.safetensors")
    packed, scale, scale_2 = (tensors[GATE + part] for part in ("weight", "weight_scale", "weight_scale_2"))
    ours = verify.dequantised(packed, scale, scale_2)
    theirs = NVFP4QTensor(torch.Size((256, 128)), torch.float32, packed).dequantize(
        torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16}
    )
    assert torch.allclose(ours, theirs, rtol=1e-6)
    original = load_file(model / "model.safetensors")[GATE + "weight"].float()
    assert 0.05 < (ours - original).norm() / original.norm() < 0.15


def test_same_input_gives_the_same_bytes(policy, model, tmp_path):
    assert exported(tmp_path, model).policy_digest == policy[1]


def test_recorded_prompts_calibrate(policy, model, tmp_path):
    row = {
        "trajectory_id": "t-1", "index": 0, "num_samples": 1, "order": 0, "reward": 1.0, "trajectory_tokens": 2,
        "policy_digest": "", "ids": [5, 6, 7, 8], "loss_positions": [2, 3], "logprobs": [-1.0, -1.0], "head_ids": [],
        "head_logprobs": [], "head_offsets": [0, 0, 0], "support_complete": False, "temperatures": [1.0, 1.0],
        "record_ids": ["t-1.a:0"],
    }  # fmt: skip
    (tmp_path / "dataset").mkdir()
    pq.write_table(pa.Table.from_pylist([row], schema=arrow_schema(Sample)), tmp_path / "dataset" / "0.parquet")
    store = open_store(StoreConfig(uri=f"file://{tmp_path}/store"))
    write_folder(store, layout.dataset(1), tmp_path / "dataset", "dataset", {})
    result = exported(tmp_path / "store", model, dataset_key=layout.dataset(1))
    got = load_file(tmp_path / "store" / result.policy_key / "model.safetensors")
    want = load_file(policy[0] / "model.safetensors")
    assert torch.equal(got[GATE + "weight"], want[GATE + "weight"])
    assert not torch.equal(got[GATE + "input_scale"], want[GATE + "input_scale"])


def _zero_scale(tensors):
    scale = tensors[GATE + "weight_scale"].float()
    scale[0, 0] = 0.0
    tensors[GATE + "weight_scale"] = scale.to(torch.float8_e4m3fn)


def _infinite_input_scale(tensors):
    tensors[UP + "input_scale"] = torch.tensor(float("inf"))


def _unequal_fused(tensors):
    tensors[UP + "weight_scale_2"] = tensors[UP + "weight_scale_2"] * 1.01


def _swapped_nibbles(tensors):
    packed = tensors[UP + "weight"]
    tensors[UP + "weight"] = (packed >> 4) | (packed << 4)


def _no_input_scale(tensors):
    del tensors[GATE + "input_scale"]


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_zero_scale, GATE + "weight_scale"),
        (_infinite_input_scale, UP + "input_scale"),
        (_unequal_fused, UP + "weight"),
        (_swapped_nibbles, UP + "weight"),
        (_no_input_scale, GATE + "weight"),
    ],
)
def test_damage_is_named(policy, model, tmp_path, damage, named):
    verify.check_export(policy[0], model, quantised=True)
    broken = shutil.copytree(policy[0], tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    damage(tensors)
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(NumericsError, match=f"Tensor {named}:"):
        verify.check_export(broken, model, quantised=True)


def test_lost_tensors_and_lost_configuration_are_refused(policy, model, tmp_path):
    broken = shutil.copytree(policy[0], tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(DataError, match=r"model\.norm\.weight"):
        verify.check_export(broken, model, quantised=True)
    shutil.copyfile(model / "config.json", broken / "config.json")
    with pytest.raises(DataError, match="quant_algo"):
        verify.check_export(broken, model, quantised=True)
