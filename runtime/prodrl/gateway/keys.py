"""API keys from a folder, one file a key. Used by ``app`` through ``identify``; ``server`` calls ``refresh``."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
from pathlib import Path

from prodrl.errors import UsageError
from prodrl.gateway import identity

logger = logging.getLogger(__name__)

MAX_KEY_BYTES = 4096


class ApiKeys:
    """The customers of this gateway.

    Keys are looked up by a hash under a random secret of this process, so the time of a look-up tells nothing about
    a key; the final comparison is constant-time as well.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._secret = secrets.token_bytes(32)
        self._names: dict[bytes, tuple[bytes, str]] = {}
        self._signature: tuple[object, ...] | None = None
        if folder is not None and not folder.is_dir():
            raise UsageError(f"API keys {folder}: not a folder; mount the Secret there or leave api_keys_dir out")
        self.refresh()

    def identify(self, presented: bytes | None) -> str | None:
        """The name of the key, or None when it is not one of ours. Without a folder everyone is anonymous."""
        if self._folder is None:
            return identity.ANONYMOUS
        if presented is None or len(presented) > MAX_KEY_BYTES:
            return None
        digest = self._digest(presented)
        expected, name = self._names.get(digest, (b"", ""))
        return name if hmac.compare_digest(digest, expected) else None

    def refresh(self) -> None:
        """Read the folder again if anything in it changed; keeps the old keys while it cannot be read."""
        if self._folder is None:
            return
        try:
            files = sorted(path for path in self._folder.iterdir() if not path.name.startswith("."))
            stats = [(path.name, path.stat()) for path in files]
            signature = tuple((name, s.st_ino, s.st_mtime_ns, s.st_size) for name, s in stats)
            if signature == self._signature:
                return
            contents = {path.name: path.read_bytes().strip() for path in files if path.is_file()}
        except OSError as exc:
            logger.warning("API keys %s: cannot be read, %s; the keys read before stay valid", self._folder, exc)
            return
        self._names = self._index(contents)
        self._signature = signature
        logger.info("API keys %s: %d in use", self._folder, len(self._names))

    def _index(self, contents: dict[str, bytes]) -> dict[bytes, tuple[bytes, str]]:
        names: dict[bytes, tuple[bytes, str]] = {}
        scopes: dict[str, str] = {}
        for name, key in contents.items():
            digest = self._digest(key)
            clash = scopes.setdefault(identity.scope(name), name)
            if not key or len(key) > MAX_KEY_BYTES:
                logger.error("API key %s: not used, %d bytes; it must have 1 to %d", name, len(key), MAX_KEY_BYTES)
            elif digest in names:
                logger.error("API key %s: not used, same content as %s; give it its own", name, names[digest][1])
            elif clash != name:
                logger.error("API key %s: not used, its scope collides with %s; rename it", name, clash)
            else:
                names[digest] = (digest, name)
        return names

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()
