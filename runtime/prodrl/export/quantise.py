"""Load a copy of the weights and write it as NVFP4 or as bfloat16. Called by ``run``; ``verify`` checks the output.

The trainer's master weights are never touched, and training never continues from what is written here.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from prodrl.errors import DataError, UsageError
from prodrl.progress import check_stop


def load_copy(folder: Path, named: str) -> Any:
    """Load the weights in bfloat16 on the accelerator, or on the host where there is none.

    Raises:
        UsageError: transformers does not know the architecture.
        DataError: A tensor is missing or has another shape than the configuration says.
    """
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, output_loading_info=True, local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError) as exc:
        raise UsageError(f"Model {named}: transformers cannot build it, {exc}; use an architecture it ships") from exc
    broken = [*sorted(info["missing_keys"]), *(str(item) for item in info["mismatched_keys"])]
    if broken:
        raise DataError(f"Model {named}: tensors are missing or misshapen, got {broken[:4]!r}; save the weights again")
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def write_bfloat16(model: Any, target: Path) -> None:
    """Save as it was loaded; parameters that the architecture keeps in float32 stay so."""
    model.save_pretrained(target)


def write_nvfp4(model: Any, calibration: Sequence[Sequence[int]], target: Path) -> None:
    """Calibrate with ``calibration`` and export weights, scales and the quantisation's description.

    Activation scales come from the largest absolute value seen (the ``max`` algorithm): quantisers only observe
    while it runs, so that no quantised forward pass, and hence no CUDA kernel, is needed.
    """
    import modelopt.torch.quantization as mtq  # noqa: PLC0415  # seconds of import, and only this branch needs it
    from modelopt.torch.export import export_hf_checkpoint  # noqa: PLC0415

    def observe(calibrated: Any) -> None:
        with torch.inference_mode():
            for ids in calibration:
                check_stop("Export, calibration")
                calibrated(input_ids=torch.tensor([list(ids)], device=calibrated.device), use_cache=False)

    with computing_in_float32(model):
        mtq.quantize(model, copy.deepcopy(mtq.NVFP4_DEFAULT_CFG), forward_loop=observe)
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=target)


@contextlib.contextmanager
def computing_in_float32(model: Any) -> Iterator[None]:
    """On the host, widen bfloat16 parameters for the time of the block.

    Most hosts have no bfloat16 matrix product and emulate it tens of times slower; widening and narrowing again
    loses nothing.
    """
    narrow = [p for p in model.parameters() if p.dtype == torch.bfloat16 and p.device.type == "cpu"]
    for parameter in narrow:
        parameter.data = parameter.data.float()
    try:
        yield
    finally:
        for parameter in narrow:
            parameter.data = parameter.data.bfloat16()
