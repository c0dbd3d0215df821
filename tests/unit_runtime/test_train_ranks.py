"""Two ranks over gloo against one: losses, gradients, weights, and checkpoints that change the number of ranks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from prodrl.config import TrainConfig
from prodrl.records import Sample
from prodrl.store import layout
from prodrl.train import diagnostics
from tests.support.training import Lab, make_samples, tiny_model
from tests.unit_runtime.test_checkpoint import Crash, crash_in
from tests.unit_runtime.test_train_loop import tensors

SETTINGS: dict[str, Any] = {
    "steps": 2, "batch_size": 3, "kl": {"coefficient": 0.5}, "optimizer": {"learning_rate": 1e-3, "epsilon": 1e-3},
}  # fmt: skip
PROGRAM = """
import sys
from prodrl.config import TrainConfig
from prodrl.progress import Progress
from prodrl.train.loop import run
print(run(TrainConfig.read(sys.argv[1]), Progress()).weights_digest)
"""


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return make_samples(6, model=tiny_model(), turns=2)


def on_two_ranks(lab: Lab, config: TrainConfig) -> None:
    path = lab.folder / "config.json"
    path.write_text(config.model_dump_json())
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    shared = os.environ | {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM, str(path)]
    started = [
        subprocess.Popen(
            command, env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    assert len({out for out, _ in said}) == 1


def near(one: Lab, other: Lab) -> None:
    for left, right in zip(one.figures(), other.figures(), strict=True):
        for name in ("loss", "pg_loss", "kl", "grad_norm", "entropy", "engine_mismatch", "tokens", "tail_ratio_max"):
            assert right[name] == pytest.approx(left[name], rel=2e-5, abs=2e-6), name
    expected, found = tensors(one, layout.checkpoint(1)), whole(other)
    assert expected.keys() == found.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5, msg=name)


def whole(lab: Lab) -> dict[str, torch.Tensor]:
    """A checkpoint of any number of ranks, as one process reads it."""
    import torch.distributed.checkpoint as dcp

    folder = lab.folder / "store" / layout.checkpoint(1)
    reader = dcp.HuggingFaceStorageReader(str(folder))
    found = reader.read_metadata().state_dict_metadata
    state = {name: torch.zeros(value.size) for name, value in found.items()}  # type: ignore[union-attr]
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def test_two_ranks_train_like_one(tmp_path: Path, samples: list[Sample]) -> None:
    one, two = Lab(tmp_path / "one"), Lab(tmp_path / "two")
    one.train(one.config(samples, **SETTINGS))
    on_two_ranks(two, two.config(samples, **SETTINGS))
    near(one, two)
    assert len(list((tmp_path / "two" / "store" / layout.checkpoint(1)).glob("*.safetensors"))) == 2


def test_a_round_resumes_on_another_number_of_ranks(
    tmp_path: Path, samples: list[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = Lab(tmp_path / "one"), Lab(tmp_path / "two")
    one.train(one.config(samples, **SETTINGS))
    config = two.config(samples, **SETTINGS)
    with monkeypatch.context() as patch:
        crash_in(patch, diagnostics, "publish", 2)
        with pytest.raises(Crash):
            two.train(config)
    on_two_ranks(two, config)
    near(one, two)


def test_more_ranks_than_samples_still_run_every_collective(tmp_path: Path, samples: list[Sample]) -> None:
    alone = [samples[0].model_copy(update={"order": 0})]
    settings = SETTINGS | {"steps": 1, "batch_size": 1, "baseline": "EMA"}
    one, two = Lab(tmp_path / "one"), Lab(tmp_path / "two")
    one.train(one.config(alone, **settings))
    on_two_ranks(two, two.config(alone, **settings))
    near(one, two)
