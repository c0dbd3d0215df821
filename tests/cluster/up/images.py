"""Images without a registry or a builder: a docker archive of a few files, imported into containerd.

Called by ``node`` for the images that every cluster has, and by tests for their own.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.up.errors import CannotRunError

USER = 10001
"""Who workloads run as."""
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")


@dataclass(frozen=True)
class Image:
    """One layer with a few files."""

    reference: str
    files: Mapping[str, bytes | Path] = field(default_factory=dict)
    """Path in the image -> content, or a file of this machine; executable by all."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Path in the image -> target."""
    folders: Sequence[str] = ()
    entrypoint: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def pause(program: Path) -> Image:
    """What holds a pod's namespaces."""
    return Image("test.local/pause:1", files={"pause": program}, entrypoint=["/pause"])


def userland(reference: str, path: str) -> Image:
    """An image without programs, for pods of the RuntimeClass that shows them this machine's.

    Python and its libraries then are those of the machine, whatever its distribution, and no image of gigabytes is
    made for a test.
    """
    links = {name: os.readlink(f"/{name}") for name in _MERGED if os.path.islink(f"/{name}")}
    files = {
        "etc/passwd": f"root:x:0:0::/:/bin/sh\nprodrl:x:{USER}:{USER}::/scratch:/bin/sh\n".encode(),
        "etc/group": f"root:x:0:\nprodrl:x:{USER}:\n".encode(),
        "etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files dns\n",
    }
    environment = {"PATH": path}
    return Image(reference, files=files, links=links, folders=["usr", "tmp"], environment=environment)


def write_archive(image: Image, path: Path) -> None:
    """Write a docker archive, as ``docker save`` does."""
    layer = path.with_suffix(".layer")
    with tarfile.open(layer, "w") as tar:
        for name in _parents([*image.files, *image.links, *image.folders]) | set(image.folders):
            tar.addfile(_entry(name, tarfile.DIRTYPE, mode=0o1777 if name == "tmp" else 0o755))
        for name, target in image.links.items():
            tar.addfile(_entry(name, tarfile.SYMTYPE, link=target))
        for name, content in image.files.items():
            _add_file(tar, name, content)
    with layer.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    config = {
        "architecture": _ARCHITECTURES.get(platform.machine(), platform.machine()),
        "os": "linux",
        "config": {
            "Entrypoint": list(image.entrypoint),
            "Env": [f"{name}={value}" for name, value in image.environment.items()],
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    encoded = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(encoded).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": [image.reference], "Layers": [f"{digest}/layer.tar"]}]
    with tarfile.open(path, "w") as tar:
        _add_file(tar, config_name, encoded)
        tar.add(layer, f"{digest}/layer.tar")
        _add_file(tar, "manifest.json", json.dumps(manifest).encode())
    layer.unlink()


def load(archive: Path, *, address: str) -> None:
    """Import a docker archive under the name that it carries.

    Raises:
        CannotRunError: containerd refused it.
    """
    command = ["ctr", "--address", address, "--namespace", "k8s.io", "images", "import", str(archive)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        raise CannotRunError(f"image {archive}: containerd cannot import it, {done.stdout.strip()[-500:]}")


def _parents(names: Sequence[str]) -> set[str]:
    return {str(parent) for name in names for parent in Path(name).parents if str(parent) != "."}


def _entry(name: str, kind: bytes, *, mode: int = 0o755, link: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.linkname = kind, mode, link
    return entry


def _add_file(tar: tarfile.TarFile, name: str, content: bytes | Path) -> None:
    entry = _entry(name, tarfile.REGTYPE)
    data = content.read_bytes() if isinstance(content, Path) else content
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))
