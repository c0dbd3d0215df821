"""The parts that several configurations share. Imported by the other modules of this package."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from prodrl.config.model import Config

Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
"""A content digest, ``sha256:`` and 64 hexadecimal digits."""


class StoreConfig(Config):
    """Where the run's immutable objects lie.

    Example:
        ``StoreConfig(uri="s3://prodrl/chess", endpoint_url="http://minio:9000")``
    """

    uri: str = Field(pattern=r"^(file:///|s3://).+", max_length=1024)
    """Root of every key: ``file:///folder`` or ``s3://bucket/prefix``."""
    endpoint_url: str | None = None
    """S3 endpoint; None uses AWS."""
    region: str | None = None
    """S3 region; None leaves it to boto3."""
    credentials_dir: str | None = None
    """Folder with the files ``accessKeyId`` and ``secretAccessKey`` (a mounted Secret); None: environment
    PRODRL_CREDENTIALS_DIR, else boto3's own chain."""


class PolicyRef(Config):
    """A servable policy: where its files are and what its digest is."""

    round: int = Field(ge=0)
    """The round that made it; 0 is the exported base model."""
    digest: Digest
    """Hash over its manifest and the engine arguments that change numbers."""
    key: str
    """Folder of its files in the store, for example ``rounds/0003/policy``."""


class SamplingPolicy(Config):
    """The sampling parameters that a request must have had for its record to be trainable.

    None means: not pinned, any value is accepted.
    """

    temperature: float | None = Field(default=None, gt=0)
    """Serving temperature; the trainer divides its logits by the value recorded per request."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus mass."""
    top_k: int | None = Field(default=None, ge=0)
    """Number of tokens kept; 0 keeps all."""
