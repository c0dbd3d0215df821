"""The model that is exported: where it comes from, and whether it is one.

Called by ``run``. :func:`check` names what a folder lacks before minutes are spent on loading it; :func:`publish_base`
copies the base model of round 0 into the store, since the first training round starts from there.
Fetching ``hf://`` and ``pvc://`` models is left to whoever prepares the folder.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from prodrl.config import ExportConfig
from prodrl.errors import DataError, UsageError
from prodrl.store import layout, open_store
from prodrl.store.folders import exists, fetch_folder, write_folder
from prodrl.store.port import Store

INDEX = "model.safetensors.index.json"
PICKLES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack"})
TOKENIZERS = frozenset({"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json"})
_KEPT_SUFFIXES = frozenset({".json", ".safetensors", ".txt", ".model", ".jinja", ".tiktoken"})
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def check(folder: Path, named: str) -> None:
    """Refuse a folder that is not a Hugging Face model with safetensors weights.

    Args:
        folder: Where the files lie.
        named: What the user calls it, for the message.

    Raises:
        UsageError: The message lists everything that is missing.
    """
    if not folder.is_dir():
        raise UsageError(f"Model {named}: no such folder, got {str(folder)!r}; correct spec.model.uri")
    names = {path.name for path in folder.iterdir() if path.is_file()}
    pickles = sorted(name for name in names if Path(name).suffix in PICKLES)
    faults = []
    if "config.json" not in names:
        faults.append("config.json is missing")
    if not any(name.endswith(".safetensors") for name in names):
        found = f" (found {', '.join(pickles)}: pickled weights are refused)" if pickles else ""
        faults.append(f"*.safetensors weights are missing{found}")
    if not names & TOKENIZERS:
        faults.append("tokenizer files (tokenizer.json or the like) are missing")
    if faults:
        remedy = "save model and tokenizer there with save_pretrained() of transformers"
        raise UsageError(f"Model {named}: not a Hugging Face model, {'; '.join(faults)}; {remedy}")
    _check_configuration(folder, named)
    _check_index(folder, named)


def _check_configuration(folder: Path, named: str) -> None:
    configuration = read_json(folder / "config.json", named)
    if "quantization_config" in configuration:
        method = configuration["quantization_config"].get("quant_method")
        raise UsageError(f"Model {named}: weights are already quantised, got {method!r}; give the unquantised model")
    if "model_type" not in configuration:
        raise UsageError(f"Model {named}: config.json has no model_type; save it with save_pretrained()")


def _check_index(folder: Path, named: str) -> None:
    if not (folder / INDEX).exists():
        return
    shards = set(read_json(folder / INDEX, named).get("weight_map", {}).values())
    absent = sorted(shard for shard in shards if not (folder / shard).is_file())
    if absent:
        raise UsageError(f"Model {named}: shards of {INDEX} are missing, {', '.join(absent)}; copy the whole model")


def read_json(path: Path, named: str) -> dict[str, Any]:
    """A JSON object of the model's folder."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise DataError(f"Model {named}: {path.name} cannot be read, {exc}; copy the model again") from exc
    if not isinstance(content, dict):
        raise DataError(f"Model {named}: {path.name} is not a JSON object; copy the model again")
    return content


def is_companion(path: Path) -> bool:
    """Whether a file belongs to the tokenizer, the chat template, the generation defaults or the processor."""
    name = path.name
    return (
        name.startswith(("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template"))
        or name in TOKENIZERS
        or name in ("generation_config.json", *_PROCESSORS)
        or path.suffix in (".jinja", ".tiktoken")
    )


def copy_companions(source: Path, target: Path) -> None:
    """Copy what quantisers leave behind: tokenizer, chat templates, generation defaults, byte for byte."""
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        if is_companion(path) and path.suffix in _KEPT_SUFFIXES:
            destination = target / path.relative_to(source)
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, destination)


def publish_base(store: Store, config: ExportConfig, work: Path) -> str:
    """Write the base model to the round's weights folder, unless it lies there already.

    Returns:
        The key of the weights.
    """
    key = layout.weights(config.round)
    if exists(store, key):
        return key
    assert config.model_uri is not None, "run() checks that there is a source"
    folder = _resolve(store, config, work / "base")
    check(folder, config.model_uri)
    staged = work / "staged"
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.suffix in _KEPT_SUFFIXES and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            _link_or_copy(path, staged / path.relative_to(folder))
    write_folder(store, key, staged, kind="weights", attributes={"source": config.model_uri})
    return key


def _resolve(store: Store, config: ExportConfig, work: Path) -> Path:
    """The folder that ``model_uri`` means, fetched where it is not local."""
    uri = config.model_uri or ""
    if uri.startswith("file:///"):
        return Path(uri.removeprefix("file://"))
    if uri.startswith("store:"):
        fetch_folder(store, uri.removeprefix("store:"), work)
        return work
    if uri.startswith("s3://"):
        remote = open_store(config.store.model_copy(update={"uri": uri}))
        for key in remote.list(""):
            if Path(key).suffix in _KEPT_SUFFIXES:
                (work / key).parent.mkdir(parents=True, exist_ok=True)
                remote.get_file(key, work / key)
        work.mkdir(parents=True, exist_ok=True)
        return work
    raise UsageError(
        f"Model {uri}: this scheme cannot be exported; use file:///folder, s3://bucket/prefix or store:KEY"
    )


def _link_or_copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path.resolve(), target)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(path, target)
