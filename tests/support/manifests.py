"""Runs and rounds for tests, in any stage."""

from __future__ import annotations

from typing import Any

from prodrl_operator.api import Round, Run

DIGEST = "sha256:" + "a" * 64
OTHER = "sha256:" + "b" * 64


def make_run(**spec: Any) -> Run:
    """A valid run; keyword arguments replace parts of its spec."""
    base: dict[str, Any] = {
        "model": {"uri": "file:///models/base", "servedName": "chess"},
        "storage": {"uri": "file:///store"},
    }
    metadata = {"name": "chess", "namespace": "default", "uid": "uid-run", "generation": 1}
    return Run(metadata=metadata, spec={**base, **spec})


def make_round(number: int, run: Run | None = None, **status: Any) -> Round:
    """A round of ``run`` with whatever status; its source is round 0's policy."""
    run = run or make_run()
    spec: dict[str, Any] = {"run": run.metadata["name"], "number": number, "settings": run.spec}
    if number:
        spec["source"] = {"round": 0, "digest": DIGEST}
    metadata = {"name": f"chess-r{number:04d}", "namespace": "default", "uid": f"uid-{number}"}
    return Round(metadata=metadata, spec=spec, status=status)


def exported(number: int, digest: str = DIGEST) -> dict[str, Any]:
    """Status of a round that has a policy."""
    folder = f"rounds/{number:04d}"
    policy = {"key": f"{folder}/policy", "digest": digest, "sizeBytes": 1, "weightsKey": f"{folder}/weights"}
    return {"policy": policy}


def trained(number: int) -> dict[str, Any]:
    """Status of a round that has a dataset and a checkpoint too."""
    folder = f"rounds/{number:04d}"
    dataset = {"key": f"{folder}/dataset", "digest": OTHER, "trajectories": 4, "tokens": 9, "rewardMean": "0.5"}
    checkpoint = {
        "key": f"{folder}/checkpoint",
        "weightsKey": f"{folder}/weights",
        "weightsDigest": OTHER,
        "steps": 2,
    }
    return {"dataset": dataset, "checkpoint": checkpoint, **exported(number)}
