"""The one thing of a cluster that outlives its namespaces: its cgroups. Called by ``__main__``.

Every cluster has a subtree of its own, named after the process that made it, so that a later run can tell the subtrees
of killed ones and remove them.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.up.errors import CannotRunError

TOP = Path("/sys/fs/cgroup")
PREFIX = "prodrl-cluster-"
_REMOVE_SECONDS = 20.0


def hierarchies() -> list[Path]:
    """Roots of all hierarchies: one in cgroups v2, one for each controller in v1."""
    if (TOP / "cgroup.procs").exists():
        return [TOP]
    return sorted({child.resolve() for child in TOP.iterdir() if (child / "cgroup.procs").exists()})


def create() -> str:
    """Make a subtree in every hierarchy; returns its name (also the kubelet's ``cgroupRoot``).

    Raises:
        CannotRunError: A hierarchy cannot be written.
    """
    name = f"{PREFIX}{os.getpid()}"
    try:
        if (TOP / "cgroup.controllers").exists():
            _delegate()
        for root in hierarchies():
            (root / name).mkdir(exist_ok=True)
            _inherit_cpuset(root, root / name)
    except OSError as exc:
        remove(name)
        raise CannotRunError(f"cgroups: {exc.filename} cannot be written, {exc.strerror}; a container needs "
                             "--privileged") from exc  # fmt: skip
    return name


def _delegate() -> None:
    """Cgroups v2: let the root's children have its controllers.

    Only the machine's own root may hold processes besides; the root that a container sees must be emptied first.
    """
    is_machine_root = not (TOP / "cgroup.type").exists()
    if not is_machine_root:
        leaf = TOP / f"{PREFIX}init"
        leaf.mkdir(exist_ok=True)
        for pid in (TOP / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # it ended meanwhile
                (leaf / "cgroup.procs").write_text(pid)
    for controller in (TOP / "cgroup.controllers").read_text().split():
        with contextlib.suppress(OSError):  # "rdma" and the like may refuse; the kubelet names what it misses
            (TOP / "cgroup.subtree_control").write_text(f"+{controller}")


def _inherit_cpuset(parent: Path, child: Path) -> None:
    """Cgroups v1: a new cpuset is empty, and nothing can run in it."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (child / name).exists() and not (child / name).read_text().strip() and parent != TOP:
            (child / name).write_text((parent / name).read_text())


def remove_stale() -> None:
    """Remove what killed runs left."""
    for name in {path.name for root in hierarchies() for path in root.glob(f"{PREFIX}*")}:
        pid = name.removeprefix(PREFIX)
        if pid.isdigit() and not Path("/proc", pid).exists():
            remove(name, seconds=1.0)


def remove(name: str, seconds: float = _REMOVE_SECONDS) -> bool:
    """Remove a subtree, as soon as its processes are gone. Returns whether it is gone."""
    deadline = time.monotonic() + seconds
    while True:
        left = [root / name for root in hierarchies() if (root / name).is_dir()]
        for folder in left:
            for path in _leaves_first(folder):
                with contextlib.suppress(OSError):  # not empty yet
                    path.rmdir()
        left = [folder for folder in left if folder.is_dir()]
        if not left or time.monotonic() > deadline:
            return not left
        time.sleep(0.1)


def _leaves_first(folder: Path) -> Iterator[Path]:
    for path, _folders, _files in os.walk(folder, topdown=False):
        yield Path(path)
