"""Volumes as folders of this machine. Called by ``runner``; which path stands for which is ``podspec``'s business.

- ``emptyDir``: a folder of the pod, gone with it; with ``medium: Memory`` one in ``/dev/shm``, whose path is short
  enough for the sockets that engines put there (the kernel's limit is 107 characters).
- ``persistentVolumeClaim``: ``volumes/NAMESPACE/CLAIM`` in the data folder, kept. ``hostPath``: that path itself.
- ``configMap`` and ``secret``: files as the kubelet writes them, each a link through ``..data`` to a folder that is
  replaced as a whole, so that a reader never sees half an update. They are written once for each container that
  mounts them; Service names in the text of a ConfigMap become addresses (``podspec``).
"""

from __future__ import annotations

import base64
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from prodrl_operator.errors import InvalidError

Object = dict[str, Any]
MEMORY = Path("/dev/shm")  # noqa: S108  (that is what the kernel calls it)
Read = Callable[[str, str], Object | None]
"""(kind, name) -> the ConfigMap or Secret."""


def targets(pod: Object, container: Object, pod_folder: Path, data: Path) -> dict[str, Path]:
    """MountPath -> path on this machine, for every mount of the container; creates what must exist."""
    volumes = {volume["name"]: volume for volume in pod["spec"].get("volumes", ())}
    result = {}
    for mount in container.get("volumeMounts", ()):
        volume = volumes.get(mount["name"])
        if volume is None:
            name = pod["metadata"]["name"]
            raise InvalidError(f"Pod {name}: volumeMounts names an unknown volume, got {mount['name']!r}; declare it")
        folder = _folder(pod, container, volume, pod_folder, data)
        sub = mount.get("subPath", "")
        if ".." in Path(sub).parts or Path(sub).is_absolute():
            raise InvalidError(f"Pod {pod['metadata']['name']}: subPath must stay inside the volume, got {sub!r}")
        target = folder / sub if sub else folder
        if not _is_projected(volume) and not target.exists():
            target.mkdir(parents=True, exist_ok=True)
        result[mount["mountPath"]] = target
    return result


def _is_projected(volume: Object) -> bool:
    return "configMap" in volume or "secret" in volume


def _folder(pod: Object, container: Object, volume: Object, pod_folder: Path, data: Path) -> Path:
    if _is_projected(volume):
        return pod_folder / "files" / str(container["name"]) / str(volume["name"])
    if "hostPath" in volume:
        path = Path(volume["hostPath"]["path"])
        if volume["hostPath"].get("type") in ("Directory", "File") and not path.exists():
            raise InvalidError(f"Pod {pod['metadata']['name']}: hostPath does not exist, got {path}; create it")
        return path
    if "persistentVolumeClaim" in volume:
        return data / "volumes" / str(pod["metadata"]["namespace"]) / str(volume["persistentVolumeClaim"]["claimName"])
    folder = pod_folder / "volumes" / str(volume["name"])
    if volume.get("emptyDir", {}).get("medium") == "Memory":
        return _in_memory(folder, pod["metadata"]["uid"])
    return folder


def _in_memory(folder: Path, uid: str) -> Path:
    """A folder in memory, linked from the pod's so that :func:`release` finds it."""
    target = MEMORY / f"prodrl-{uid[:13]}-{folder.name}"
    target.mkdir(mode=0o700, exist_ok=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.is_symlink():
        folder.symlink_to(target)
    return target


def empty(pod_folder: Path) -> None:
    """Remove what an ended pod needs no more; how its containers ended stays."""
    for link in (pod_folder / "volumes").glob("*"):
        if link.is_symlink():
            shutil.rmtree(link.resolve(), ignore_errors=True)
    for name in ("volumes", "files", "work"):
        shutil.rmtree(pod_folder / name, ignore_errors=True)


def release(pod_folder: Path) -> None:
    """Remove all of a pod's folders, those in memory too."""
    empty(pod_folder)
    shutil.rmtree(pod_folder, ignore_errors=True)


def project(pod: Object, container: Object, pod_folder: Path, read: Read, translate: Callable[[str], str]) -> None:
    """Write the container's ConfigMaps and Secrets, or bring them up to date.

    Raises:
        KeyError: One is missing and not optional (the container waits for it).
    """
    mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
    for volume in pod["spec"].get("volumes", ()):
        if volume["name"] in mounted and _is_projected(volume):
            folder = pod_folder / "files" / container["name"] / volume["name"]
            _write_atomically(folder, _contents(volume, read, translate))


def _contents(volume: Object, read: Read, translate: Callable[[str], str]) -> dict[str, tuple[bytes, int]]:
    kind, source = ("Secret", volume["secret"]) if "secret" in volume else ("ConfigMap", volume["configMap"])
    name = source["secretName"] if kind == "Secret" else source["name"]
    obj = read(kind, name)
    if obj is None:
        if source.get("optional"):
            return {}
        raise KeyError(f"{kind} {name} not found")
    plain = obj.get("data", {})
    coded = plain if kind == "Secret" else obj.get("binaryData", {})
    files = {} if kind == "Secret" else {key: translate(value).encode() for key, value in plain.items()}
    files |= {key: base64.b64decode(value) for key, value in coded.items()}
    mode = source.get("defaultMode", 0o644) & (0o700 if kind == "Secret" else 0o777)
    if "items" not in source:
        return {key: (value, mode) for key, value in files.items()}
    missing = {item["key"] for item in source["items"]} - set(files)
    if missing and not source.get("optional"):
        raise KeyError(f"{kind} {name} has no keys {sorted(missing)}")
    return {i["path"]: (files[i["key"]], i.get("mode", mode)) for i in source["items"] if i["key"] in files}


def _write_atomically(folder: Path, contents: Mapping[str, tuple[bytes, int]]) -> None:
    current = folder / "..data"
    if current.is_symlink() and _equals(current.resolve(), contents):
        return
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / f"..{secrets.token_hex(8)}"
    fresh.mkdir(mode=0o700)
    for name, (value, mode) in contents.items():
        target = fresh / name
        if not target.resolve().is_relative_to(fresh.resolve()):
            raise InvalidError(f"volume {folder.name}: a path must stay inside the volume, got {name!r}; correct it")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(value)
        target.chmod(mode | 0o400)
    old = current.resolve() if current.is_symlink() else None
    link = folder / "..data_tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(fresh.name)
    os.replace(link, current)
    wanted = {Path(name).parts[0] for name in contents}
    for name in wanted:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    for item in folder.iterdir():
        if item.is_symlink() and item.name != "..data" and item.name not in wanted:
            item.unlink()
    for item in folder.glob("..*"):
        if not item.is_symlink() and item not in (fresh, old):  # the one before may be being read
            shutil.rmtree(item, ignore_errors=True)


def _equals(folder: Path, contents: Mapping[str, tuple[bytes, int]]) -> bool:
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return files == set(contents) and all(
        (folder / name).read_bytes() == value for name, (value, _) in contents.items()
    )
