"""The Dockerfiles by their rules, and the operator's image for real: built by buildah, run as its own user."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from prodrl_operator.builders import Platform
from tests.packaging.rendering import ROOT
from tests.support import tiers

IMAGES = ROOT / "images"
NAMES = ("operator", "runtime", "serving")
CACHE = Path(os.environ.get("PRODRL_CACHE") or Path.home() / ".cache" / "prodrl") / "images"


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, rest) of a Dockerfile, continued lines joined."""
    text = re.sub(r"\\\n", " ", (IMAGES / name / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def last_stage(name: str) -> list[tuple[str, str]]:
    found = instructions(name)
    start = max(index for index, (word, _) in enumerate(found) if word == "FROM")
    return found[start:]


@pytest.mark.parametrize("name", NAMES)
def test_the_base_is_an_argument_of_every_stage(name: str) -> None:
    found = instructions(name)
    assert found[0] == ("ARG", "BASE=python:3.11-slim-bookworm")
    bases = [rest.split()[0] for word, rest in found if word == "FROM"]
    assert set(bases) <= {"${BASE}", "dependencies"}
    assert bases[-1] == "${BASE}"


@pytest.mark.parametrize("name", NAMES)
def test_an_image_runs_as_the_user_that_manifests_name(name: str) -> None:
    assert [rest for word, rest in last_stage(name) if word == "USER"][-1] == "10001:10001"


@pytest.mark.parametrize("name", NAMES)
def test_tools_and_settings_of_the_build_stay_behind(name: str) -> None:
    stage = last_stage(name)
    assert not [rest for word, rest in stage if word == "ARG" and "INDEX" in rest]
    copied = [rest for word, rest in stage if word == "COPY"]
    # What changes with every commit is a layer of its own, on top of what does not.
    assert copied == [
        "--from=dependencies /opt/prodrl /opt/prodrl",
        "--from=project /opt/prodrl/code /opt/prodrl/code",
    ]
    labels = " ".join(rest for word, rest in stage if word == "LABEL")
    for label in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels


@pytest.mark.parametrize("path", sorted(p for p in (*IMAGES.rglob("*"), ROOT / "scripts" / "images") if p.is_file()))
def test_no_registry_is_named(path: Path) -> None:
    assert not re.search(r"https?://|\bpypi\b|docker\.io|index-url=|--cert ", path.read_text())


def test_only_the_operator_starts_by_itself() -> None:
    entries = {name: [rest for word, rest in last_stage(name) if word == "ENTRYPOINT"] for name in NAMES}
    assert entries == {"operator": ['["prodrl-operator", "run"]'], "runtime": ["[]"], "serving": ["[]"]}


def test_default_images_are_those_that_are_built_here() -> None:
    version = re.search(r'^version = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert version is not None
    platform = Platform()
    assert (platform.runtime_image, platform.serving_image) == (
        f"prodrl/runtime:{version[1]}",
        f"prodrl/serving:{version[1]}",
    )


def test_the_context_leaves_out_everything_but_what_is_installed() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = {
        source
        for name in NAMES
        for word, rest in instructions(name)
        if word == "COPY" and "--from" not in rest
        for source in rest.split()[:-1]
    }
    assert allowed == copied


# For real.


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The operator's image; the base and the layers of its dependencies are kept between runs."""
    if os.geteuid() != 0:
        tiers.lack(f"images: building without a daemon needs root, got uid {os.geteuid()}")
    wanted = ["buildah"] if (CACHE / "debian-python-bookworm.tar").exists() else ["buildah", "debootstrap"]
    absent = [program for program in wanted if shutil.which(program) is None]
    if absent:
        tiers.lack(f"images: no {' and no '.join(absent)}; install them (Debian: apt-get install buildah debootstrap)")
    if wanted[1:] and not tiers.are_required():
        pytest.skip("images: no base yet (minutes); run scripts/images base FILE once")
    out = tmp_path_factory.mktemp("images") / "operator.tar"
    done = subprocess.run(
        [str(ROOT / "scripts" / "images"), "operator", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(out)
    return out


def configuration(archive: Path) -> dict[str, Any]:
    with tarfile.open(archive) as tar:
        manifest = json.load(tar.extractfile("manifest.json"))  # type: ignore[arg-type]
        found: dict[str, Any] = json.load(tar.extractfile(manifest[0]["Config"]))  # type: ignore[arg-type]
    return found


def in_image(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the image that was just built, as its user."""
    buildah = ["buildah", "--root", str(CACHE / "storage"), "--runroot", str(CACHE / "run")]
    made = subprocess.run(
        [*buildah, "from", "--pull-never", "localhost/prodrl/operator:0.1.0"],
        capture_output=True,
        text=True,
        check=True,
    )
    container = made.stdout.strip()
    try:
        return subprocess.run(
            [*buildah, "run", "--isolation", "chroot", container, "--", *command],
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        subprocess.run([*buildah, "rm", container], capture_output=True, check=True)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_operators_image_is_built_and_starts_as_its_user(archive: Path) -> None:
    found = configuration(archive)
    assert found["config"]["User"] == "10001:10001"
    assert found["config"]["Entrypoint"] == ["prodrl-operator", "run"]
    assert found["config"]["Labels"]["org.opencontainers.image.version"] == "0.1.0"
    # Neither the index nor the certificates of the machine that built it.
    assert "INDEX_URL" not in json.dumps(found)
    assert archive.stat().st_size < 600e6
    helped = in_image("prodrl-operator", "run", "--help")
    assert helped.returncode == 0, helped.stderr
    assert "--lease-namespace" in helped.stdout
    assert in_image("id", "-u").stdout.strip() == "10001"
    crds = in_image("prodrl-operator", "crds")
    assert "kind: CustomResourceDefinition" in crds.stdout


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_operators_image_has_no_torch_no_installer_and_nothing_to_write(archive: Path) -> None:
    program = (
        "import importlib.util as u, os, sys;"
        "print([n for n in ('torch', 'vllm', 'transformers', 'boto3', 'pip', 'uv') if u.find_spec(n)],"
        "os.access(sys.prefix, os.W_OK), os.path.exists('/run/secrets'))"
    )
    assert in_image("python", "-c", program).stdout.strip() == "[] False False"
