"""The step ``prodrl export``: quantise a copy, check it, give it an identity, write it. Called by ``prodrl.cli``.

Running it again is safe: a policy that lies in the store and was made from the same weights with the same settings
is the result; anything else under its key is an error, since policies are immutable.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch

from prodrl.config import ExportConfig, ExportResult
from prodrl.errors import DataError, OutOfMemoryError, UsageError, from_os_error
from prodrl.export import calibration, identity, quantise, source, verify
from prodrl.progress import Progress, check_stop
from prodrl.records import Manifest
from prodrl.store import layout, open_store
from prodrl.store.folders import exists, fetch_folder, file_entry, read_manifest, write_folder
from prodrl.store.port import Store

STAGES = 5
"""Fetched, loaded, quantised, verified, written."""


def run(config: ExportConfig, progress: Progress) -> ExportResult:
    """Export the weights of a round, or in round 0 the base model.

    Raises:
        UsageError: There is nothing to export, or the source is not a model.
        NumericsError: A scale or a weight cannot be served.
        DataError: A stored input does not verify, or another policy lies under the round's key.
    """
    if (config.weights_key is None) == (config.model_uri is None):
        raise UsageError("Export configuration: exactly one of weights_key and model_uri is needed; set one of them")
    store = open_store(config.store)
    try:
        with tempfile.TemporaryDirectory(prefix="prodrl-export-") as folder:
            return _export(store, config, progress, Path(folder))
    except OSError as exc:
        raise from_os_error(exc, f"Export of round {config.round}") from exc
    except (torch.OutOfMemoryError, MemoryError) as exc:
        raise OutOfMemoryError(f"Export of round {config.round}: out of memory, {exc}; raise the pod's limits") from exc


def _export(store: Store, config: ExportConfig, progress: Progress, work: Path) -> ExportResult:
    progress.set(0, total=STAGES, message="fetching weights")
    weights_key = config.weights_key or source.publish_base(store, config, work)
    weights_digest = read_manifest(store, weights_key).digest()
    attributes = {
        "quantization": config.quantization,
        "round": str(config.round),
        "source_weights_digest": weights_digest,
        identity.ENGINE_ARGS: json.dumps(list(config.engine_args)),
    }
    if exists(store, layout.policy(config.round)):
        return _existing(store, config, attributes, weights_key)
    weights, exported = work / "weights", work / "exported"
    fetch_folder(store, weights_key, weights, expect_digest=weights_digest)
    source.check(weights, weights_key)
    _stage(progress, 1, "loading a copy")
    _write_model(store, config, progress, weights, exported)
    source.copy_companions(weights, exported)
    verify.check_export(exported, weights, quantised=config.quantization != "None")
    _stage(progress, 4, "writing the policy")
    files = [file_entry(exported, path) for path in exported.rglob("*") if path.is_file()]
    attributes[identity.POLICY_DIGEST] = identity.policy_digest(files, config.engine_args)
    manifest = write_folder(store, layout.policy(config.round), exported, kind=identity.KIND, attributes=attributes)
    progress.set(STAGES, message="written")
    return _result(config, manifest, weights_key)


def _write_model(store: Store, config: ExportConfig, progress: Progress, weights: Path, exported: Path) -> None:
    """Load, calibrate where needed, and write the model's own files."""
    exported.mkdir()
    model = quantise.load_copy(weights, config.weights_key or config.model_uri or "")
    _stage(progress, 2, f"quantising to {config.quantization}")
    if config.quantization == "None":
        quantise.write_bfloat16(model, exported)
    else:
        if config.dataset_key is not None:
            dataset = weights.parent / "dataset"
            fetch_folder(store, config.dataset_key, dataset)
            samples = calibration.recorded(dataset, config.calibration_samples, config.seed)
        else:
            with quantise.computing_in_float32(model):
                samples = calibration.generated(model, config.calibration_samples, config.seed)
        quantise.write_nvfp4(model, samples, exported)
    _stage(progress, 3, "verifying")


def _existing(store: Store, config: ExportConfig, attributes: dict[str, str], weights_key: str) -> ExportResult:
    """The result of an earlier attempt.

    Raises:
        DataError: It was made from other weights or settings.
    """
    key = layout.policy(config.round)
    manifest = read_manifest(store, key)
    for name, value in attributes.items():
        if manifest.attributes.get(name) != value:
            raise DataError(
                f"Policy {key}: exists with another {name}, got {manifest.attributes.get(name)!r} and {value!r};"
                " policies are immutable: use another storage.uri or round"
            )
    return _result(config, manifest, weights_key)


def _result(config: ExportConfig, manifest: Manifest, weights_key: str) -> ExportResult:
    key = layout.policy(config.round)
    digest = identity.of_manifest(manifest, key)
    if manifest.attributes.get(identity.POLICY_DIGEST) != digest:
        stated = manifest.attributes.get(identity.POLICY_DIGEST)
        raise DataError(f"Policy {key}: its digest is {digest}, its manifest says {stated!r}; export the round again")
    return ExportResult(
        policy_key=key,
        policy_digest=digest,
        size_bytes=sum(file.size for file in manifest.files),
        quantization=config.quantization,
        weights_key=weights_key,
    )


def _stage(progress: Progress, done: int, message: str) -> None:
    check_stop(f"Export, before {message}")
    progress.set(done, message=message)
