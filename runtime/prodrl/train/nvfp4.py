"""Upcasting ModelOpt's NVFP4 checkpoints to plain weights. Called by ``weights`` for the ReferenceModel correction.

A quantised ``X.weight`` holds two E2M1 numbers a byte (the first in the low half), ``X.weight_scale`` an E4M3 scale for
every 16 of them, ``X.weight_scale_2`` one float32 scale. Activation and KV-cache scales are dropped: the reference is
the upcast of the weights, no more. Other formats are refused.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from prodrl.errors import DataError, UsageError

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_BLOCK = 16
_DROPPED = (".weight_scale", ".weight_scale_2", ".input_scale", ".k_scale", ".v_scale", ".k_proj.output_scale")


def algorithm(folder: Path) -> str | None:
    """``quant_algo`` of an exported folder; None for plain weights."""
    try:
        quantization = _quantization(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError) as exc:
        raise DataError(f"Weights {folder.name}: config.json cannot be read, {exc}; export them again") from exc
    beside = folder / "hf_quant_config.json"
    if not quantization and beside.exists():
        quantization = json.loads(beside.read_text(encoding="utf-8")).get("quantization", {})
    found = quantization.get("quant_algo") or quantization.get("quant_method")
    return str(found) if found else None


def _quantization(configuration: dict[str, object]) -> dict[str, object]:
    found = configuration.get("quantization_config") or {}
    assert isinstance(found, dict)
    return found


def dequantise(packed: Tensor, scale: Tensor, scale_2: Tensor) -> Tensor:
    """[out, in/2] bytes, [out, in/16] block scales and one scale -> [out, in] float32."""
    low, high = packed & 0x0F, packed >> 4
    codes = torch.stack([low, high], dim=-1).flatten(-2).long()
    values = _E2M1[codes].unflatten(-1, (-1, _BLOCK))
    return (values * (scale.float() * scale_2.float())[..., None]).flatten(-2)


def upcast(folder: Path, target: Path) -> Path:
    """Write the folder's plain float32 equivalent to ``target``.

    Raises:
        UsageError: The format is another one than NVFP4.
        DataError: A scale is missing, or a file cannot be read.
    """
    found = algorithm(folder)
    if found != "NVFP4":
        raise UsageError(f"Reference {folder.name}: cannot upcast its weights, got {found!r}; supported is 'NVFP4'")
    target.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_file() and path.suffix in {".json", ".txt", ".model", ".jinja"} and "index" not in path.name:
            shutil.copy(path, target / path.name)
    configuration = json.loads((target / "config.json").read_text(encoding="utf-8"))
    configuration.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(configuration), encoding="utf-8")
    (target / "hf_quant_config.json").unlink(missing_ok=True)
    weights = _read(folder)
    plain = {name: _plain(name, weights) for name in weights if not name.endswith(_DROPPED)}
    save_file(plain, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _read(folder: Path) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
        except SafetensorError as exc:
            raise DataError(f"Reference {path.name}: cannot be read, {exc}; export it again") from exc
    return weights


def _plain(name: str, weights: dict[str, Tensor]) -> Tensor:
    tensor = weights[name]
    if name.endswith("pre_quant_scale"):
        raise UsageError(f"Reference {name}: AWQ scales are folded into activations, and cannot be upcast")
    if tensor.dtype != torch.uint8:
        return tensor.float()
    try:
        return dequantise(tensor, weights[f"{name}_scale"], weights[f"{name}_scale_2"])
    except KeyError as exc:
        raise DataError(f"Reference {name}: is packed and has no scale {exc}; export it again") from exc
