"""Puzzles and warm-started model, made once and kept. Called by ``cli`` and ``demo``.

What is made lies in a cache folder whose name is a hash of everything that decides it, this package's own source
included; it appears whole or not at all, so that two processes may prepare at once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prodrl.errors import DataError, from_os_error
from prodrl.lab import generate, puzzles
from prodrl.lab.display import Display
from prodrl.lab.warm_settings import WarmStart

_SOURCES = (
    "generate",
    "measure",
    "model",
    "model_limits",
    "prepare",
    "puzzles",
    "session",
    "text",
    "warm_settings",
    "warm_start",
)
_MEASURED = 256
_SMALLEST_PART = 16


@dataclass(frozen=True)
class Request:
    """What is to be prepared."""

    count: int = 10_000
    """Puzzles that are generated."""
    mate_in_one: float = 0.8
    """Their share of mates in one."""
    seed: int = 0
    puzzles: Path | None = None
    """A CSV in Lichess's format instead of generated puzzles."""
    limit: int = 50_000
    """Rows of that file that are used."""
    warm: WarmStart = field(default_factory=WarmStart)

    def digest(self) -> str:
        """Names the result."""
        content: dict[str, Any] = dataclasses.asdict(self) | {"puzzles": None}
        if self.puzzles is not None:
            content["puzzles"] = _hash_file(self.puzzles)
        content["sources"] = [_hash_file(Path(__file__).with_name(f"{name}.py")) for name in _SOURCES]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Prepared:
    """A finished cache folder."""

    folder: Path

    @property
    def model(self) -> Path:
        """Hugging Face folder."""
        return self.folder / "model"

    @property
    def users(self) -> Path:
        """Puzzles of the simulated users."""
        return self.folder / "users.csv"

    @property
    def held_out(self) -> Path:
        """Puzzles of evaluations."""
        return self.folder / "held_out.csv"

    @property
    def figures(self) -> dict[str, Any]:
        """Solve rate and how it came about (``lab.json``)."""
        return dict(json.loads((self.folder / "lab.json").read_text(encoding="utf-8")))


def _hash_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise from_os_error(exc, f"Puzzles {path}") from exc


def cache_folder() -> Path:
    """``PRODRL_CACHE``, else ``~/.cache/prodrl``."""
    return Path(os.environ.get("PRODRL_CACHE") or Path.home() / ".cache" / "prodrl")


def prepare(request: Request, display: Display) -> Prepared:
    """What was asked for, from the cache or made now."""
    target = cache_folder() / f"lab-{request.digest()}"
    if not (target / "lab.json").is_file():
        with _appearing(target) as folder:
            _make(request, folder, display)
    return Prepared(target)


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """A folder that takes its name when the block ends well."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as exc:
        raise from_os_error(exc, f"Cache {target.parent}") from exc
    try:
        yield folder
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _find(request: Request, display: Display) -> puzzles.Split:
    started = time.monotonic()
    if request.puzzles is not None:
        found = puzzles.read_puzzles(request.puzzles, limit=request.limit)
    else:
        display.say(f"searching {request.count} puzzles")
        found = list(generate.generate(request.count, mate_in_one=request.mate_in_one, seed=request.seed))
    parts = puzzles.split(found)
    display.say(
        f"puzzles: {len(parts.warm)} for the warm start, {len(parts.users)} for users, {len(parts.held_out)} held out "
        f"({time.monotonic() - started:.0f} s)"
    )
    smallest = min(len(parts.warm), len(parts.users), len(parts.held_out))
    if smallest < _SMALLEST_PART:
        raise DataError(
            f"Puzzles: the smallest of the three parts must have {_SMALLEST_PART}, got {smallest} of {len(found)}; "
            "give more puzzles"
        )
    return parts


def _make(request: Request, folder: Path, display: Display) -> None:
    parts = _find(request, display)
    for name in ("warm", "users", "held_out"):
        puzzles.write_puzzles(folder / f"{name}.csv", getattr(parts, name))
    display.say("loading torch")
    from prodrl.lab import measure, warm_start  # noqa: PLC0415  # seconds, needed only where nothing is cached
    from prodrl.lab import model as tiny  # noqa: PLC0415

    started = time.monotonic()
    with display.bar("warm start", request.warm.steps) as advance:
        model, tokenizer = warm_start.train(parts.warm, request.warm, lambda _, loss: advance(f"loss {loss:.2f}"))
    seconds = time.monotonic() - started
    (folder / "model").mkdir()
    tiny.save_model(model, tokenizer, folder / "model")
    display.say("measuring the solve rate")
    # The bfloat16 values, computed in float32: CPUs are slow at the former.
    chosen = parts.held_out[:_MEASURED]
    outcomes = measure.play_all(model.float(), tokenizer, chosen, request.seed)
    figures = {
        **measure.summary(chosen, outcomes),
        "warm_start_seconds": round(seconds, 1),
        "puzzles_held_out": len(parts.held_out),
        "puzzles_users": len(parts.users),
        "settings": dataclasses.asdict(request.warm),
    }
    (folder / "lab.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
