"""What a policy is: the digest over its files and over the engine arguments that change numbers.

Used by ``run``, which writes it, and by ``fetch``, which computes it again. Pure but for :func:`describe`,
which hashes a local folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from prodrl.errors import DataError
from prodrl.records import Manifest, ManifestFile

KIND = "policy"
ENGINE_ARGS = "engine_args"
POLICY_DIGEST = "policy_digest"

_CHUNK_BYTES = 1 << 22


def policy_digest(files: Sequence[ManifestFile], engine_args: Sequence[str]) -> str:
    """The identity of a policy.

    The manifest's attributes are left out, since the digest itself is one of them, and so are the round and the
    time: the same files served with the same arguments are the same policy.
    """
    in_order = sorted(files, key=lambda file: file.path)
    content = {"engine_args": list(engine_args), "files": Manifest(kind=KIND, files=in_order).digest()}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return "sha256:" + hashlib.sha256(canonical).hexdigest()


def of_manifest(manifest: Manifest, key: str) -> str:
    """Compute the identity of a stored policy again, from its manifest.

    Raises:
        DataError: The folder is not a policy, or its engine arguments cannot be read.
    """
    text = manifest.attributes.get(ENGINE_ARGS)
    if manifest.kind != KIND or text is None:
        raise DataError(f"Policy {key}: not a servable policy, got kind {manifest.kind!r}; export the round again")
    try:
        engine_args = json.loads(text)
    except json.JSONDecodeError as exc:
        raise DataError(f"Policy {key}: engine arguments are not JSON, got {text!r}; export the round again") from exc
    return policy_digest(manifest.files, engine_args)


def file_sha256(path: Path) -> str:
    """64 hexadecimal digits, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def describe(folder: Path) -> list[ManifestFile]:
    """Every file below ``folder`` as a manifest names it, sorted by path."""
    paths = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda p: p.relative_to(folder).as_posix())
    return [
        ManifestFile(path=path.relative_to(folder).as_posix(), size=path.stat().st_size, sha256=file_sha256(path))
        for path in paths
    ]
