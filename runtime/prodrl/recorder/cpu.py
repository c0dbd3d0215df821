"""What a vLLM without a GPU needs to serve our policies. Called by ``plugin.register`` in every engine process.

Two things, both no-ops on any other platform: the emulated NVFP4 kernel, so that the very checkpoint that is made for
a GPU serves on a CPU too, and the ``fork`` start method where the operator of the process asked for it. Imports vllm,
and therefore must not be imported outside of it.
"""

# ruff: noqa: PLC0415  # vllm exists only inside the engine's processes
from __future__ import annotations

import ctypes
import functools
import logging
import os
import signal
from typing import Any

logger = logging.getLogger("prodrl.recorder")

_PR_SET_PDEATHSIG = 1
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def prepare() -> None:
    """Register the emulated NVFP4 kernel and honour ``VLLM_WORKER_MULTIPROC_METHOD=fork``; only on CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    _register_nvfp4()
    if os.environ.get(START_METHOD) == "fork":
        _keep_fork(type(current_platform))


def _register_nvfp4() -> None:
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    known = linear._POSSIBLE_NVFP4_KERNELS.get(PlatformEnum.CPU, [])
    if linear.EmulationNvFp4LinearKernel not in known:
        linear.register_linear_kernel(linear.EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")


def _keep_fork(platform: Any) -> None:
    """Undo that the CPU platform overwrites an explicit ``fork`` with ``spawn``.

    A forked engine core inherits the 9 s of imports that a spawned one repeats. vLLM forks by default on every other
    platform, at the same point of its start; the CPU platform forces ``spawn`` to preload an OpenMP library, which
    one thread for each process does not need.
    """
    overwriting = platform.check_and_update_config
    if getattr(overwriting, "prodrl_wrapped", False):
        return

    @functools.wraps(overwriting)
    def check_and_update_config(vllm_config: Any) -> None:
        overwriting(vllm_config)
        os.environ[START_METHOD] = "fork"

    os.register_at_fork(after_in_child=functools.partial(_die_with_parent, ctypes.CDLL(None).prctl))
    check_and_update_config.prodrl_wrapped = True  # type: ignore[attr-defined]
    platform.check_and_update_config = staticmethod(check_and_update_config)


def _die_with_parent(prctl: Any) -> None:
    """A forked engine core holds the server's listening socket: if it outlived the server, the port would be dead."""
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
