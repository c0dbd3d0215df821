"""Two ranks over gloo against one: losses, gradients, weights, and checkpoints that change the number of ranks."""

from __future__ import annotations

import contextlib
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
from tests.unit_runtime.test_checkpoint import CrashError, crash_in
from tests.unit_runtime.test_train_loop import tensors

SETTINGS: dict[str, Any] = {
    "steps": 2, "batch_size": 3, "kl": {"coefficient": 0.5}, "optimizer": {"learning_rate": 1e-3, "epsilon": 1e-3},
}  # fmt: skip
PROGRAM = """
import os, sys
from prodrl.cli import leave
from prodrl.config import TrainConfig
from prodrl.progress import Progress
from prodrl.train.loop import run
for path, os.environ["MASTER_PORT"] in zip(sys.argv[1::2], sys.argv[2::2]):
    print(run(TrainConfig.read(path), Progress()).weights_digest)
leave(0)
"""

pytestmark = pytest.mark.timeout(600)  # importing torch twice at once, and three trainings


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return make_samples(6, model=tiny_model(), turns=2)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def on_two_ranks(folder: Path, configs: list[TrainConfig]) -> None:
    """One pair of processes for all of them: starting it is what takes the time."""
    paths = [folder / f"{at}.json" for at in range(len(configs))]
    for path, config in zip(paths, configs, strict=True):
        path.write_text(config.model_dump_json())
    ports = [str(port) for port in free_ports(len(paths))]  # one a config: the last one's store may still close
    shared = os.environ | {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        *(word for pair in zip(paths, ports, strict=True) for word in map(str, pair)),
    ]
    logs = [folder / f"rank-{rank}.log" for rank in range(2)]  # a pipe that nobody reads would stop a rank
    started = []
    for rank, log in enumerate(logs):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
        with log.open("w") as file:
            started.append(subprocess.Popen(command, env=shared | own, stdout=file, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(timeout=500) for process in started]
    finally:
        for process in started:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)


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


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, samples: list[Sample]) -> dict[str, tuple[Lab, Lab]]:
    """Each case trained by one rank and by two; ``resumed`` began on one rank and ended on two."""
    folder = tmp_path_factory.mktemp("ranks")
    single = [
        s.model_copy(update={"order": at}) for at, s in enumerate(s for s in samples if s.num_samples == 1)
    ][:2]  # fmt: skip
    cases = {
        "plain": (samples, SETTINGS),
        "resumed": (samples, SETTINGS),
        "idle": (single, SETTINGS | {"batch_size": 1, "baseline": "RoundMean"}),
    }
    made: dict[str, tuple[Lab, Lab]] = {}
    configs = []
    for name, (rows, settings) in cases.items():
        one, two = Lab(folder / name / "one"), Lab(folder / name / "two")
        one.train(one.config(rows, **settings))
        configs.append(two.config(rows, **settings))
        made[name] = (one, two)
        if name == "resumed":
            with pytest.MonkeyPatch.context() as patch:
                crash_in(patch, diagnostics, "publish", 2)
                with pytest.raises(CrashError):
                    two.train(configs[-1])
    on_two_ranks(folder, configs)
    return made


def test_two_ranks_train_like_one(pairs: dict[str, tuple[Lab, Lab]]) -> None:
    near(*pairs["plain"])
    assert len(list((pairs["plain"][1].folder / "store" / layout.checkpoint(1)).glob("*.safetensors"))) == 2


def test_a_round_resumes_on_another_number_of_ranks(pairs: dict[str, tuple[Lab, Lab]]) -> None:
    near(*pairs["resumed"])


def test_a_rank_without_samples_still_runs_every_collective(pairs: dict[str, tuple[Lab, Lab]]) -> None:
    near(*pairs["idle"])
    assert pairs["idle"][0].figures()[0]["grad_norm"] > 0
