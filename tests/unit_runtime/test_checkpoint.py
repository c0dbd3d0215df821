"""Crashes, damaged and foreign checkpoints, full disks: nothing half written is used, and resuming changes no bit."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from prodrl import progress
from prodrl.errors import DataError, PreemptedError, StorageFullError
from prodrl.records import Sample
from prodrl.store import layout
from prodrl.train import checkpoint, diagnostics, loop
from tests.support.training import Lab, make_samples, tiny_model, write_model

STEPS = 3
SETTINGS: dict[str, Any] = {"steps": STEPS, "batch_size": 2, "kl": {"coefficient": 1.0}, "baseline": "EMA"}


class CrashError(Exception):
    """What a killed process looks like from inside."""


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return make_samples(6, model=tiny_model(), turns=2)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, samples: list[Sample]) -> tuple[dict[str, str], dict[str, str]]:
    lab = Lab(tmp_path_factory.mktemp("straight"))
    lab.train(lab.config(samples, **SETTINGS))
    return lab.digests()


def crash_in(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int) -> None:
    """Raise at the ``call``-th call of ``module.name``, before it does anything."""
    made, seen = getattr(module, name), []

    def crashing(*args: Any, **kwargs: Any) -> Any:
        seen.append(None)
        if len(seen) == call:
            raise CrashError
        return made(*args, **kwargs)

    monkeypatch.setattr(module, name, crashing)


@pytest.mark.parametrize(
    "crash",
    [
        (diagnostics, "publish", 1),  # after step 1, before its checkpoint
        (diagnostics, "publish", 3),
        (checkpoint, "publish", 1),  # before the frozen log probabilities are stored
        (checkpoint, "publish", 2),
        (checkpoint, "publish", 4),  # the final one
        (loop, "_finish", 1),  # before the weights
        (checkpoint, "discard", 2),  # while tidying up
    ],
)
def test_resuming_gives_the_same_bits(
    tmp_path: Path, samples: list[Sample], straight: Any, monkeypatch: pytest.MonkeyPatch, crash: Any
) -> None:
    lab = Lab(tmp_path)
    config = lab.config(samples, **SETTINGS)
    with monkeypatch.context() as patch:
        crash_in(patch, *crash)
        with pytest.raises(CrashError):
            lab.train(config)
    result = lab.train(config)
    assert lab.digests() == straight
    assert (result.steps, result.global_step) == (STEPS, STEPS)
    assert [row["step"] for row in lab.figures()] == [1, 2, 3]
    assert not list(lab.store.list("rounds/0001/steps/"))
    assert lab.train(config) == result  # a third attempt has nothing to do


def interrupted(lab: Lab, samples: list[Sample], monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """A round that died after step 2 was stored."""
    config = lab.config(samples, **(SETTINGS | changes))
    with monkeypatch.context() as patch:
        crash_in(patch, diagnostics, "publish", 3)
        with pytest.raises(CrashError):
            lab.train(config)
    return config


def first_step_made(lab: Lab, monkeypatch: pytest.MonkeyPatch, config: Any) -> int:
    """Where the next attempt began."""
    made, seen = loop._optimizer_step, []

    def watching(current: Any, frozen: Any, step: int) -> Any:
        seen.append(step)
        return made(current, frozen, step)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "_optimizer_step", watching)
        lab.train(config)
    return seen[0]


def test_a_damaged_checkpoint_is_passed_over(
    tmp_path: Path, samples: list[Sample], straight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path)
    config = interrupted(lab, samples, monkeypatch)
    (shard,) = (tmp_path / "store" / layout.step_checkpoint(1, 2)).glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    assert first_step_made(lab, monkeypatch, config) == 1
    assert lab.digests() == straight


def test_a_checkpoint_without_a_manifest_does_not_exist(
    tmp_path: Path, samples: list[Sample], straight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path)
    config = interrupted(lab, samples, monkeypatch)
    lab.store.delete(layout.manifest_of(layout.step_checkpoint(1, 2)))
    assert first_step_made(lab, monkeypatch, config) == 1
    assert lab.digests() == straight


def test_checkpoints_of_another_configuration_are_not_resumed(
    tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path)
    config = interrupted(lab, samples, monkeypatch)
    other = config.model_copy(update={"seed": 8})
    assert first_step_made(lab, monkeypatch, other) == 0
    packed = config.model_copy(update={"micro_batch_tokens": 77, "round": 1})
    assert first_step_made(lab, monkeypatch, packed) == 0  # the other one tidied up; its result is not taken for ours


def test_without_the_frozen_log_probabilities_the_round_begins_again(
    tmp_path: Path, samples: list[Sample], straight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path)
    config = interrupted(lab, samples, monkeypatch)
    (tmp_path / "store" / layout.step_checkpoint(1, 0) / "frozen.safetensors").write_bytes(b"")
    assert first_step_made(lab, monkeypatch, config) == 0
    assert lab.digests() == straight


def test_sigterm_leaves_a_checkpoint_of_the_finished_step(
    tmp_path: Path, samples: list[Sample], straight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(tmp_path)
    config = lab.config(samples, **SETTINGS, checkpoint_every_steps=100)
    made = diagnostics.publish

    def stopping(*args: Any) -> None:
        made(*args)
        progress.stop_requested.set()

    try:
        with monkeypatch.context() as patch:
            patch.setattr(diagnostics, "publish", stopping)
            with pytest.raises(PreemptedError, match="after step 1 of 3"):
                lab.train(config)
    finally:
        progress.stop_requested.clear()
    assert first_step_made(lab, monkeypatch, config) == 1
    assert lab.digests() == straight


@pytest.mark.parametrize("where", ["local disk", "store"])
def test_a_full_disk_is_named_and_leaves_nothing_that_is_used(
    tmp_path: Path, samples: list[Sample], straight: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    lab = Lab(tmp_path)
    config = lab.config(samples, **SETTINGS)

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        if where == "store":
            from prodrl.store import local

            patch.setattr(local, "_flush", full)
        else:
            from torch.distributed.checkpoint import filesystem

            patch.setattr(filesystem, "_write_item", full)
            patch.setattr(filesystem.os, "fsync", full)
            patch.setattr("safetensors.torch.save", full)
        with pytest.raises(StorageFullError):
            lab.train(config)
    assert not lab.store.exists(layout.manifest_of(layout.step_checkpoint(1, 1)))
    lab.train(config)
    assert lab.digests() == straight


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, samples: list[Sample]) -> None:
    lab = Lab(tmp_path)
    result = lab.train(lab.config(samples, **SETTINGS))
    write_model(lab.store, tmp_path / "wide", tiny_model(intermediate_size=64), "wide")
    lineage = {"init_checkpoint_key": result.checkpoint_key, "init_weights_key": "wide"}
    with pytest.raises(DataError, match="does not fit the model"):
        lab.train(lab.config(samples, 2, **SETTINGS, **lineage))


def test_the_lineage_brings_adam_counters_and_rng(tmp_path: Path, samples: list[Sample]) -> None:
    lab = Lab(tmp_path)
    first = lab.train(lab.config(samples, **SETTINGS))
    lineage = {"init_checkpoint_key": first.checkpoint_key, "init_weights_key": first.weights_key}
    torch.manual_seed(999)
    second = lab.train(lab.config(samples, 2, **SETTINGS, **lineage))
    assert second.global_step == 2 * STEPS
    assert [row["global_step"] for row in lab.figures(2)] == [4, 5, 6]
    assert lab.figures(2)[0]["kl"] == 0.0
