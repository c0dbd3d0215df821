"""Runs this folder's other tests inside a real one-node Kubernetes, as one test of the whole suite.

Their output goes to ``.prodrl/cluster/pytest.log`` while they run, and a line a test to the terminal.
"""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.cluster.up import preflight
from tests.cluster.up.errors import CANNOT_RUN, REASON_FILE, CannotRunError
from tests.support import tiers
from tests.support.s3 import ServerMissingError, find_server

ROOT = Path(__file__).parents[2]
SCRATCH = ROOT / ".prodrl" / "cluster"
OPERATOR_IMAGE = ROOT / ".prodrl" / "images" / "operator.tar"
"""Where ``test_quickstart`` looks for it. Made outside: it needs package registries, and there are none inside."""


def _build() -> str:
    """Build what the tests inside need and cannot build there; returns why it could not be."""
    try:
        find_server()
    except ServerMissingError as exc:
        return f"no S3 server: {exc}"
    OPERATOR_IMAGE.unlink(missing_ok=True)
    command = [str(ROOT / "scripts" / "images"), "operator", str(OPERATOR_IMAGE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-3000:]}"


@pytest.mark.demo
@pytest.mark.timeout(3600)
def test_the_cluster_tier_passes_inside_a_real_kubernetes(capfd: pytest.CaptureFixture[str]) -> None:
    SCRATCH.mkdir(parents=True, exist_ok=True)
    results, log = SCRATCH / "results.xml", SCRATCH / "pytest.log"
    results.unlink(missing_ok=True)
    inner = [sys.executable, "-m", "pytest", "tests/cluster", "-v", "--color=no", f"--junitxml={results}"]
    inner += ["-p", "no:cacheprovider"]
    command = [str(ROOT / "scripts" / "test-cluster"), str(SCRATCH), *inner]
    try:
        preflight.check(build=True)
    except CannotRunError as exc:
        tiers.lack(f"no cluster: {exc}")
    missing = _build()
    if missing and tiers.are_required():
        pytest.fail(missing)
    with log.open("w", encoding="utf-8") as copy, capfd.disabled():
        code = _follow(command, copy)
    text = log.read_text(encoding="utf-8", errors="replace")
    if code == CANNOT_RUN and not results.exists():
        reason = SCRATCH / REASON_FILE
        tiers.lack(f"no cluster: {reason.read_text(encoding='utf-8') if reason.exists() else text[-3000:]}")
    assert results.exists(), f"no results, exit code {code}; {log} ends with\n{text[-5000:]}"
    suite = next(ET.parse(results).getroot().iter("testsuite"))
    counts = {name: int(suite.attrib[name]) for name in ("tests", "failures", "errors", "skipped")}
    assert counts["tests"] > 0, text[-3000:]
    assert code == 0, f"{counts}, exit code {code}; {log} ends with\n{text[-8000:]}"
    assert counts["failures"] + counts["errors"] == 0, counts
    if tiers.are_required():
        assert counts["skipped"] == 0, f"{counts}; see {log}"


def _follow(command: list[str], copy: object) -> int:
    """Run it; its output goes to the log, and the lines that tell progress to the terminal too."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            copy.write(line)  # type: ignore[attr-defined]
            copy.flush()  # type: ignore[attr-defined]
            if line.startswith(("tests/cluster/", "test-cluster:", "kubernetes:")):
                sys.stdout.write(f"\n    {line.rstrip()}")
                sys.stdout.flush()
        return process.wait()
    finally:
        process.terminate()
        process.wait()
