"""What a policy is: the digest over its files and over the engine arguments that change numbers.

Used by ``run``, which writes it, and by ``fetch``, which computes it again. Pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from prodrl.errors import DataError
from prodrl.records import Manifest, ManifestFile

KIND = "policy"
ENGINE_ARGS = "engine_args"
POLICY_DIGEST = "policy_digest"


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
