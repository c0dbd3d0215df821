"""The object store: port, two implementations, and folders with manifests.

``open_store(StoreConfig)`` gives a :class:`~prodrl.store.port.Store`; ``folders`` writes and reads verified
folders (data first, manifest last); ``layout`` spells every key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prodrl.config import StoreConfig

if TYPE_CHECKING:
    from prodrl.store.port import Store

__all__ = ["open_store"]


def open_store(config: StoreConfig) -> Store:
    """The store behind ``config.uri``; nothing is contacted yet.

    Raises:
        UsageError: The URI names no folder and no bucket.
        CredentialsError: ``credentials_dir`` does not hold readable credentials.
    """
    if config.uri.startswith("file://"):
        from prodrl.store.local import LocalStore  # noqa: PLC0415  # each store's imports only where it is used

        return LocalStore(config.uri)
    from prodrl.store.s3 import S3Store  # noqa: PLC0415  # boto3 takes half a second

    return S3Store(config)
