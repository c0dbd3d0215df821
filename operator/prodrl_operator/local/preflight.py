"""What can be refused before anything starts. Each message names the thing, the value and the remedy."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

from prodrl_operator.api.run import Run
from prodrl_operator.errors import InvalidError

MODEL_FILES = ("config.json", "tokenizer.json")
CHECKPOINTS_KEPT = 8
"""Copies of the model (float32 master and Adam are three) that a round may need at once."""


def folder(uri: str) -> Path | None:
    """The folder of a ``file:///`` URI; None for another scheme."""
    return Path(uri.removeprefix("file://")) if uri.startswith("file://") else None


def check_model(run: Run) -> None:
    """A local model folder must be a Hugging Face model."""
    path = folder(run.spec.model.uri)
    if path is None:
        return
    field = f"spec.model.uri {run.spec.model.uri!r}"
    if not path.is_dir():
        raise InvalidError(f"{field}: no such folder; give a folder with config.json, safetensors and a tokenizer")
    missing = [name for name in MODEL_FILES if not (path / name).is_file()]
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise InvalidError(
            f"{field}: is not a Hugging Face model folder, {', '.join(missing)} missing; save the model there with "
            "save_pretrained (safetensors) and its tokenizer"
        )
    try:
        json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise InvalidError(f"{field}: config.json is not readable JSON, {exc}; save the model again") from exc


def check_store(run: Run) -> None:
    """A local store must be writable and have room for a round's checkpoints."""
    path = folder(run.spec.storage.uri)
    if path is None:
        return
    field = f"spec.storage.uri {run.spec.storage.uri!r}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as exc:
        raise InvalidError(f"{field}: cannot be written, {exc.strerror}; choose a folder that you may write") from exc
    model = folder(run.spec.model.uri)
    if model is None:
        return
    needed = CHECKPOINTS_KEPT * sum(file.stat().st_size for file in model.glob("*.safetensors"))
    free = shutil.disk_usage(path).free
    if free < needed:
        raise InvalidError(
            f"{field}: {free / 2**30:.1f} GiB free, a round's checkpoints need {needed / 2**30:.1f} GiB; free space or "
            "choose another folder"
        )


def check_port(port: int, option: str) -> None:
    """A fixed port must be free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as exc:
            raise InvalidError(
                f"{option} {port}: the port is in use ({exc.strerror}); stop what listens there or choose another"
            ) from exc


def check_platform() -> None:
    """Process groups, /proc and loopback addresses of Linux are needed."""
    if not sys.platform.startswith("linux"):
        raise InvalidError(f"local runs need Linux, this is {sys.platform}; use a cluster, or a Linux machine")
    if not os.access("/proc/self/stat", os.R_OK):
        raise InvalidError("local runs need /proc; mount it")
