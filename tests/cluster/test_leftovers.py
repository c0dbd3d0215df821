"""A cluster leaves nothing behind: not after a command, not when everything is killed. Runs outside of one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.up import cgroups, isolation, preflight
from tests.cluster.up.errors import CANNOT_RUN, CannotRunError
from tests.support import tiers

SCRIPT = str(preflight.ROOT / "scripts" / "test-cluster")
WRITTEN = ("/var/lib/kubelet", "/var/lib/cni", "/var/lib/containerd", "/var/log/pods", "/var/log/containers",
           "/etc/cni", "/opt/cni", "/opt/containerd", "/run/containerd", "/run/netns")  # fmt: skip
POD = """
cat > "$1/pod.yaml" <<END
{apiVersion: v1, kind: Pod, metadata: {name: idle}, spec: {containers: [{name: main, image: "test.local/pause:1"}]}}
END
kubectl apply -f "$1/pod.yaml" && kubectl wait --for=condition=Ready pod/idle --timeout=60s || exit 9
touch "$1/running"
"""


@pytest.fixture(autouse=True)
def _needs_a_cluster() -> None:
    try:
        preflight.check(build=True)
    except CannotRunError as exc:
        tiers.lack(f"no cluster: {exc}")


def _traces(scratch: Path) -> dict[str, object]:
    """What a machine shows of a cluster; what else happens on it meanwhile is not looked at."""
    links = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True, check=True).stdout
    rules = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True).stdout
    covered = {"/run", "/var/lib", "/var/log", str(Path("/etc/resolv.conf").resolve()), *isolation.KERNEL}
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return {
        "links": [line for line in links.splitlines() if isolation.BRIDGE in line or isolation.SINK in line],
        "rules": [line for line in rules.splitlines() if "kube" in line],
        "mounts": sorted(m for m in mounts if m.removeprefix("/proc/sys/") in covered or m.startswith(str(scratch))),
        "processes": sorted(_processes(scratch)),
        "folders": [path for path in WRITTEN if Path(path).exists()],
        "kernel": {name: _read(Path("/proc/sys", name)) for name in isolation.KERNEL},
    }


def _groups() -> set[str]:
    """Cgroups of clusters, whoever's: of this machine there may be others."""
    return {path.name for root in cgroups.hierarchies() for path in root.glob(f"{cgroups.PREFIX}[0-9]*")}


def _left(before: set[str]) -> set[str]:
    """Those that came since, and whose maker is gone."""
    return {name for name in _groups() - before if not Path("/proc", name.removeprefix(cgroups.PREFIX)).exists()}


def _lines(value: object) -> list[str]:
    assert isinstance(value, list)
    return value


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _processes(scratch: Path) -> Iterator[str]:
    """Whatever names the scratch folder, or has something of it mounted: all that runs inside, pods too."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if str(scratch) in line or str(scratch) in (entry / "mountinfo").read_text():
                    yield line


@pytest.mark.timeout(600)
def test_nothing_is_left_and_the_commands_exit_code_is_the_scripts(tmp_path: Path) -> None:
    before, groups = _traces(tmp_path), _groups()
    done = subprocess.run(
        [SCRIPT, str(tmp_path), "bash", "-c", POD + "exit 7", "pod", str(tmp_path)], capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr
    assert (tmp_path / "running").exists()
    assert _traces(tmp_path) == before
    assert _left(groups) == set()
    assert (tmp_path / "logs" / "kubelet.log").exists()
    assert not (tmp_path / "data").exists()


@pytest.mark.timeout(600)
def test_nothing_runs_on_when_the_script_is_killed_and_the_next_run_works(tmp_path: Path) -> None:
    before, groups = _traces(tmp_path), _groups()
    process = subprocess.Popen([SCRIPT, str(tmp_path), "bash", "-c", POD + "sleep 600", "pod", str(tmp_path)])
    try:
        deadline = time.monotonic() + 180
        while not (tmp_path / "running").exists():
            assert process.poll() is None, "it ended"
            assert time.monotonic() < deadline, "no pod within 180 s"
            time.sleep(0.2)
        seen = _traces(tmp_path)
        assert any("kubelet" in line for line in _lines(seen["processes"])), "the look finds what runs"
        assert "/pause " in _lines(seen["processes"]), "pods too"
        assert _groups() - groups
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 30
    while _traces(tmp_path)["processes"] != before["processes"] and time.monotonic() < deadline:
        time.sleep(0.1)
    # Nobody could remove the cgroups of a killed run, which are empty; the next run does.
    assert _traces(tmp_path) == before
    done = subprocess.run([SCRIPT, str(tmp_path), "kubectl", "get", "pods", "-o", "name"], capture_output=True,
                          text=True, check=False, timeout=300)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert _traces(tmp_path) == before
    assert _left(groups) == set()


def test_a_machine_that_cannot_is_told_all_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(preflight, "PACKAGES", {"no-such-program": "some-package"})
    monkeypatch.setattr(preflight, "CNI_FOLDERS", ("/nowhere",))
    with pytest.raises(CannotRunError) as refused:
        preflight.check(build=False)
    for part in ("root", "uid 1000", "no-such-program", "some-package", "bridge", "containernetworking-plugins"):
        assert part in str(refused.value)


def test_a_refused_run_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run([SCRIPT, "/run/cluster", "true"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == CANNOT_RUN
    assert "cannot run here: scratch folder /run/cluster" in done.stderr
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run([SCRIPT, str(tmp_path), "true"], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == CANNOT_RUN
    assert "another cluster runs in it" in done.stderr
