"""The ProdRLRun of the demo, as a document. Pure; called by ``demo``. ``examples/01-chess`` explains its fields.

The operator's API is spelled here as a user spells it, in YAML's terms: the runtime imports nothing of the operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prodrl.lab import model_limits

NAME = "chess"
SUITE_KEY = "suites/chess-puzzles"
"""Folder of the held-out puzzles in the run's store."""
_ENGINE_ARGS = (
    "--max-model-len", str(model_limits.CONTEXT), "--max-num-seqs", "16", "--enforce-eager",
    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    "--kv-cache-memory-bytes", "67108864", "--disable-uvicorn-access-log",
)  # fmt: skip
_ONE_THREAD = [{"name": "OMP_NUM_THREADS", "value": "1"}]
_ENGINE_ENV = [
    *_ONE_THREAD,
    {"name": "VLLM_ENABLE_V1_MULTIPROCESSING", "value": "0"},
    {"name": "VLLM_WORKER_MULTIPROC_METHOD", "value": "fork"},
    {"name": "VLLM_CPU_OMP_THREADS_BIND", "value": "nobind"},
    {"name": "DO_NOT_TRACK", "value": "1"},
    {"name": "TORCHDYNAMO_DISABLE", "value": "1"},
]
"""Two engines and a trainer share two cores: one thread each, none bound to a core, and one import of the engine's
code instead of three (docs/log.md: a start takes 15 s instead of 60)."""


def _engine_env(options: Options) -> list[dict[str, str]]:
    """The engines of one demo share a cache: what the first one learns about the model's class, the others read."""
    return [*_ENGINE_ENV, {"name": "VLLM_CACHE_ROOT", "value": str(options.data / "cache" / "vllm")}]


@dataclass(frozen=True)
class Options:
    """What the demo's command line decides."""

    data: Path
    """Absolute."""
    rounds: int = 3
    steps: int = 8
    batch_size: int = 32
    learning_rate: str = "1e-4"
    is_harmful: bool = False
    on_blocked: str = "HaltForHuman"
    quantization: str = "NVFP4"
    eval_items: int = 192


_HARMFUL_RATE = "2e-3"
"""High enough that a round of descending the reward does visible harm."""


def run_document(options: Options) -> dict[str, Any]:
    """The object that ``prodrl-operator local`` takes."""
    optimizer = {"learningRate": options.learning_rate, "beta2": "0.95", "maximise": True}
    if options.is_harmful:
        optimizer |= {"learningRate": _HARMFUL_RATE, "maximise": False}
    return {
        "apiVersion": "prodrl.dev/v1alpha1",
        "kind": "ProdRLRun",
        "metadata": {"name": NAME},
        "spec": {
            "rounds": {"max": options.rounds, "steps": options.steps, "batchSize": options.batch_size},
            "model": {"uri": f"file://{options.data / 'model'}", "servedName": NAME},
            "storage": {"uri": f"file://{options.data / 'store'}"},
            "gateway": {"authentication": "Anonymous"},
            "serving": {
                "args": list(_ENGINE_ARGS),
                "env": _engine_env(options),
                "startDeadlineSeconds": 900,
                "drainSeconds": 5,
            },
            "recording": {
                "metadata": "ScoreCentering",
                "topLogprobs": 20,
                "rewardDeadlineSeconds": 600,
                "flushSeconds": 2,
                "settleSeconds": 5,
                "samplingPolicy": {"temperature": "1.0", "topP": "1.0"},
            },
            "training": {
                "correction": {"type": "ScoreCentering"},
                "optimizer": optimizer,
                "dtype": "float32",
                "env": _ONE_THREAD,
                "maxSequenceTokens": model_limits.CONTEXT,
            },
            "export": {"quantization": options.quantization, "env": _ONE_THREAD},
            "gate": _gate(options),
            "onBlocked": options.on_blocked,
        },
    }


def _gate(options: Options) -> dict[str, Any]:
    evaluation = {
        "name": "puzzles",
        "suite": "prodrl.lab.suite:chess_puzzles",
        "suiteUri": SUITE_KEY,
        "metric": "solved",
        # So few items leave about 0.06 of noise either way; an equal policy must pass, a ruined one fail.
        "margin": "0.20",
        "confidence": "0.90",
        "minItems": options.eval_items // 2,
        "maxItems": options.eval_items,
    }
    return {
        "agreement": {"maxMeanAbsLogprobDiff": "0.5", "maxRatioToStable": "3.0", "samples": 16},
        "evaluations": [evaluation],
        "canary": {"steps": [{"weight": 20, "minTrajectories": 20, "deadlineSeconds": 600}]},
        "onInconclusive": "Block",
    }
