"""Prove that an exported folder can be served: every tensor opens, is finite, and agrees with the weights it came from.

Called by ``run`` before anything is written to the store. What it cannot see (kernels, batching) is the gate's:
agreement on recorded prompts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open

from prodrl.errors import DataError, NumericsError
from prodrl.export.source import INDEX

BLOCK = 16
"""Weights that share one FP8 scale."""
SCALES = ("weight_scale", "weight_scale_2", "input_scale")
MAX_WEIGHT_ERROR = 0.25
"""Largest relative error (Frobenius) of a dequantised weight. Rounding to four bits costs some 0.1 for Gaussian
weights and stays below 0.2 for any; above it, nibbles or scales are in the wrong place."""
FUSED = (("gate_proj", "up_proj"), ("w1", "w3"), ("q_proj", "k_proj", "v_proj"))
"""Linears that engines run as one and that therefore share their second scale."""
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Tensors:
    """The tensors of a folder by name, opened lazily. Use as a context manager.

    Raises:
        DataError: A file cannot be opened, a name is there twice, or the index and the files disagree.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Tensors:
        for path in sorted(self.folder.glob("*.safetensors")):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as exc:
                raise DataError(f"Weights {path.name}: cannot be opened, {exc}; export the round again") from exc
            for name in file.keys():  # noqa: SIM118  # not a mapping
                if name in self._files:
                    raise DataError(f"Weights {path.name}: tensor {name} lies in two files; export the round again")
                self._files[name] = file
        if not self._files:
            raise DataError(f"Weights {self.folder.name}: no tensor; export the round again")
        self._check_index()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._files))

    def __getitem__(self, name: str) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._files[name].get_tensor(name)
        except SafetensorError as exc:
            raise DataError(f"Tensor {name}: cannot be read, {exc}; export the round again") from exc
        return tensor

    def _check_index(self) -> None:
        index = self.folder / INDEX
        if not index.exists():
            return
        listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        if odd := sorted(listed ^ set(self._files)):
            raise DataError(f"Weights {self.folder.name}: {INDEX} and the files disagree on {odd[:4]!r}; export again")


def check_export(exported: Path, source: Path, *, quantised: bool) -> None:
    """Check the folder against the weights it was made from.

    Raises:
        NumericsError: A scale is not finite and positive, a weight is not finite or far from its original.
        DataError: Tensors or files are missing or do not load.
    """
    configuration = _loadable(exported)
    algorithm = (configuration.get("quantization_config") or {}).get("quant_algo")
    if algorithm != ("NVFP4" if quantised else None):
        raise DataError(f"Export {exported.name}: quant_algo does not fit the request, got {algorithm!r}; export again")
    with Tensors(exported) as tensors, Tensors(source) as originals:
        packed = [name for name in tensors if is_packed(name, tensors)]
        if quantised != bool(packed):
            raise DataError(f"Export {exported.name}: {len(packed)} weights are quantised; check spec.export")
        for name in tensors:
            _check_tensor(name, tensors[name])
        for name in packed:
            _check_packed(name, tensors, originals)
        _check_fused(packed, tensors)
        _check_complete(tensors, originals)


def is_packed(name: str, tensors: Tensors) -> bool:
    """Whether a tensor holds two 4-bit values a byte."""
    return name.endswith(".weight") and f"{name.removesuffix('weight')}weight_scale_2" in tensors


def dequantised(packed: torch.Tensor, scale: torch.Tensor, scale_2: torch.Tensor) -> torch.Tensor:
    """The float32 weight that NVFP4 stands for: E2M1 value x FP8 scale of its block x the tensor's scale.

    The low nibble comes first; bit 3 of a nibble is the sign.
    """
    nibbles = torch.stack((packed & 0x0F, packed >> 4), dim=-1).flatten(-2).long()
    values = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])[nibbles]
    per_value = scale.float().repeat_interleave(BLOCK, dim=-1)
    return values * per_value * scale_2.float()


def _loadable(exported: Path) -> dict[str, Any]:
    """Build configuration and tokenizer as an engine does; returns the raw configuration."""
    try:
        transformers.AutoConfig.from_pretrained(exported, local_files_only=True, trust_remote_code=False)
        transformers.AutoTokenizer.from_pretrained(exported, local_files_only=True, trust_remote_code=False)
        configuration: dict[str, Any] = json.loads((exported / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise DataError(
            f"Export {exported.name}: configuration or tokenizer does not load, {exc}; export again"
        ) from exc
    return configuration


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_floating_point():
        return
    wide = tensor.float()
    if not torch.isfinite(wide).all():
        raise NumericsError(f"Tensor {name}: not finite; look at the training round's figures, its weights diverged")
    if name.endswith(SCALES) and not (wide > 0).all():
        raise NumericsError(
            f"Tensor {name}: scales must be > 0, got {wide.min().item()!r}; raise spec.export.calibrationSamples"
            " (an expert that no token reached has no scale)"
        )


def _check_packed(name: str, tensors: Tensors, originals: Tensors) -> None:
    prefix = name.removesuffix("weight")
    absent = [scale for scale in SCALES if prefix + scale not in tensors]
    if absent:
        raise NumericsError(
            f"Tensor {name}: quantised without {', '.join(absent)}; raise spec.export.calibrationSamples"
        )
    if name not in originals:
        return
    original = originals[name].float()
    try:
        restored = dequantised(tensors[name], tensors[prefix + "weight_scale"], tensors[prefix + "weight_scale_2"])
        error = (
            torch.linalg.vector_norm(restored - original) / torch.linalg.vector_norm(original).clamp_min(1e-30)
        ).item()
    except RuntimeError as exc:
        raise NumericsError(f"Tensor {name}: shapes of weight and scales do not fit, {exc}; export again") from exc
    if not error <= MAX_WEIGHT_ERROR:
        raise NumericsError(f"Tensor {name}: dequantised weight is off by {error!r} of its norm; do not deploy it")


def _check_fused(packed: list[str], tensors: Tensors) -> None:
    """Engines run gate and up (and q, k, v) as one matrix with one second scale: a difference serves garbage."""
    names = set(packed)
    for first, *others in FUSED:
        for name in sorted(n for n in names if re.search(rf"\.{first}\.weight$", n)):
            for other in (name.replace(f".{first}.", f".{item}.") for item in others):
                if other in names and not torch.equal(_scale_2(name, tensors), _scale_2(other, tensors)):
                    raise NumericsError(
                        f"Tensor {other}: weight_scale_2 must equal that of {name}, got"
                        f" {_scale_2(other, tensors).item()!r} and {_scale_2(name, tensors).item()!r}; do not deploy it"
                    )


def _scale_2(name: str, tensors: Tensors) -> torch.Tensor:
    return tensors[f"{name.removesuffix('weight')}weight_scale_2"]


def _check_complete(tensors: Tensors, originals: Tensors) -> None:
    """No tensor of the source is lost, save the tied head and extra prediction layers that transformers skips."""
    lost = [n for n in originals if n not in tensors and not n.startswith(("lm_head.", "mtp.", "model.mtp."))]
    if lost:
        raise DataError(f"Export {tensors.folder.name}: tensors of the source are missing, {lost[:4]!r}; export again")
