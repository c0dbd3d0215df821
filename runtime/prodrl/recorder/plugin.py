"""What vLLM loads (entry point ``vllm.general_plugins``), in every process of the engine and perhaps repeatedly.

Does nothing but :mod:`prodrl.recorder.cpu` unless PRODRL_RECORDER_CONFIG names a configuration. An error that is
raised here ends the server, on purpose: a server that should record and cannot must not become ready.
"""

# ruff: noqa: PLC0415  # loaded in every process of the engine; most of them need none of these
from __future__ import annotations

import logging
import multiprocessing
import os
import platform
import tempfile
from functools import partial
from pathlib import Path

from prodrl.config import RecorderConfig
from prodrl.errors import UsageError
from prodrl.recorder import active
from prodrl.recorder.counters import Counters

logger = logging.getLogger("prodrl.recorder")

CONFIG = "PRODRL_RECORDER_CONFIG"
SPOOL = "PRODRL_SPOOL_DIR"
TESTED_VERSIONS = ("0.32.", "0.33.")
"""The wrapped parts of vLLM are no public interface: a version counts once the engine tests passed with it."""


def register() -> None:
    """Prepare this process of the engine."""
    from prodrl.recorder import cpu

    cpu.prepare()
    path = os.environ.get(CONFIG)
    if not path or active.get() is not None or not _takes_requests():
        return
    import vllm

    check_version(vllm.__version__)
    _install(RecorderConfig.read(path))


def check_version(version: str) -> None:
    """Refuse an engine whose internals were not tested.

    Raises:
        UsageError: Not one of the tested versions.
    """
    if not version.startswith(TESTED_VERSIONS):
        raise UsageError(
            f"Recorder: vLLM must be one of {', '.join(v + 'x' for v in TESTED_VERSIONS)}, got {version!r}; "
            f"serve with a tested version, or unset {CONFIG} to serve without recording"
        )


def writer_name(config: RecorderConfig) -> str:
    """Unique name of this server."""
    return config.writer or os.environ.get("POD_NAME") or platform.node() or "server"


def _takes_requests() -> bool:
    """Whether this is an API server; engine cores and workers have no ``AsyncLLM``."""
    return multiprocessing.parent_process() is None or multiprocessing.current_process().name.startswith("ApiServer")


def _install(config: RecorderConfig) -> None:
    from vllm.exceptions import GracefulHTTPError, VLLMClientError
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.logprobs import LogprobsProcessor

    from prodrl.recorder import capture
    from prodrl.recorder.sink import ShardSink
    from prodrl.store import open_store

    counters = Counters()
    spool_dir = Path(os.environ.get(SPOOL) or Path(tempfile.gettempdir()) / "prodrl-spool")
    sink = ShardSink(config, counters, spool_dir, _process_name(config), partial(open_store, config.store))
    read_facts = partial(capture.engine_facts, head_size=config.top_logprobs, name=_engine_name())
    recorder = active.Recorder(config, counters, sink, read_facts)
    capture.install(AsyncLLM, LogprobsProcessor, recorder, (VLLMClientError, GracefulHTTPError))
    active.activate(recorder)
    logger.info("Recorder: run %s, policy %s, spool %s", config.run, config.policy_digest, spool_dir)


def _process_name(config: RecorderConfig) -> str:
    """Several API server processes of one pod are several writers."""
    own = multiprocessing.current_process().name
    name = writer_name(config) if own == "MainProcess" else f"{writer_name(config)}-{own}"
    return "".join(char if char.isalnum() or char in "-._" else "-" for char in name)


def _engine_name() -> str:
    import vllm
    from vllm.platforms import current_platform

    return f"{'vllm-cpu' if current_platform.is_cpu() else 'vllm'} {vllm.__version__}"
