"""Upcasting deployed NVFP4 weights, against the library that quantised them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prodrl.errors import DataError, UsageError
from prodrl.train import nvfp4


def test_every_code_has_its_value() -> None:
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    scale = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
    found = nvfp4.dequantise(packed, scale, torch.tensor(0.5))
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert found.tolist() == [[*values, *[-value for value in values]]]


@pytest.mark.slow
def test_it_equals_the_quantising_library() -> None:
    tensors = pytest.importorskip("modelopt.torch.quantization.qtensor")
    weight = torch.randn(8, 64) * torch.logspace(-3, 1, 8)[:, None]
    quantised, scale, scale_2 = tensors.NVFP4QTensor.quantize(weight, 16)
    expected = quantised.dequantize(dtype=torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    found = nvfp4.dequantise(quantised._quantized_data, scale, scale_2)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert (found - weight).abs().max() < 0.2 * weight.abs().max()


def folder(path: Path, algorithm: str, **tensors: torch.Tensor) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_algo": algorithm}, "a": 1}))
    save_file(tensors, path / "model.safetensors")
    return path


def test_a_folder_becomes_plain(tmp_path: Path) -> None:
    parts = {
        "x.weight": torch.full((2, 8), 0x22, dtype=torch.uint8),
        "x.weight_scale": torch.ones(2, 1).to(torch.float8_e4m3fn),
        "x.weight_scale_2": torch.tensor(3.0), "x.input_scale": torch.tensor(1.0), "norm": torch.ones(4).bfloat16(),
    }  # fmt: skip
    target = nvfp4.upcast(folder(tmp_path / "q", "NVFP4", **parts), tmp_path / "plain")
    assert json.loads((target / "config.json").read_text()) == {"a": 1}
    assert nvfp4.algorithm(target) is None
    found = load_file(target / "model.safetensors")
    assert set(found) == {"x.weight", "norm"}
    assert torch.equal(found["x.weight"], torch.full((2, 16), 3.0))


def test_other_formats_and_missing_scales_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'FP8'"):
        nvfp4.upcast(folder(tmp_path / "fp8", "FP8", x=torch.ones(1)), tmp_path / "a")
    packed = torch.zeros((1, 8), dtype=torch.uint8)
    with pytest.raises(DataError, match="has no scale"):
        nvfp4.upcast(folder(tmp_path / "holes", "NVFP4", **{"x.weight": packed}), tmp_path / "b")
