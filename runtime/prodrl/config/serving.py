"""Configurations of the processes that serve: the gateway and the recorder inside the engine.

Written by ``prodrl_operator.builders``; read by ``prodrl.gateway`` and ``prodrl.recorder``.
"""

from __future__ import annotations

from pydantic import Field, model_validator

from prodrl.config.common import Digest, SamplingPolicy, StoreConfig
from prodrl.config.model import Config


class RecorderConfig(Config):
    """What the plugin inside one vLLM server records, and where it puts it."""

    store: StoreConfig
    """Shards go to ``records/<policy digest>/``."""
    run: str
    """Name of the ProdRLRun."""
    round: int = Field(ge=0)
    """The round that made the served policy."""
    policy_digest: Digest
    """Identity written into every record; readiness demands that the model folder's manifest has it."""
    writer: str = ""
    """Unique name of this server process, part of every shard's key; empty: POD_NAME, else the host name."""
    top_logprobs: int = Field(default=20, ge=0, le=512)
    """Size K of the recorded head; 0 records the sampled token's logprob only."""
    sampling_policy: SamplingPolicy = SamplingPolicy()
    """Requests outside it are recorded but not trainable, with a reason."""
    flush_seconds: float = Field(default=5.0, gt=0)
    """A shard is closed when it is this old ..."""
    flush_rows: int = Field(default=2048, ge=1)
    """... or has this many records."""
    queue_rows: int = Field(default=8192, ge=1)
    """Records waiting to be written; past it new ones are dropped and counted (serving never waits)."""


class Route(Config):
    """One policy that answers users."""

    digest: Digest
    """The policy behind the URL; returned to users in ``X-ProdRL-Policy``."""
    round: int = Field(ge=0)
    """The round that made it."""
    url: str
    """Base URL of its server, without ``/v1``."""
    weight: int = Field(ge=0, le=100)
    """Share of *new* trajectories; 0 keeps only the conversations that began on it."""


class RouteTable(Config):
    """What a gateway replica applies; pushed to its admin port and kept in a ConfigMap for restarts.

    Weights of a table with routes sum to 100. A table without routes answers 503 with ``Retry-After``.
    """

    version: str
    """Hash of the content; the operator compares it with what each replica reports."""
    routes: tuple[Route, ...] = ()
    """At most one route a digest."""

    @model_validator(mode="after")
    def _weights(self) -> RouteTable:
        total = sum(route.weight for route in self.routes)
        if self.routes and total != 100:
            raise ValueError(f"weights must sum to 100, got {total}")
        if len({route.digest for route in self.routes}) != len(self.routes):
            raise ValueError("two routes have the same digest")
        return self


class GatewayConfig(Config):
    """The durable endpoint in front of the policies."""

    store: StoreConfig
    """Feedback segments go to ``feedback/``."""
    run: str
    """Name of the ProdRLRun."""
    writer: str = ""
    """Unique name of this replica, part of every segment's key; empty: environment POD_NAME, else the host name."""
    served_name: str
    """The model name that users send."""
    api_keys_dir: str | None = None
    """Folder with one file an API key: file name = key's name, content = the key. None: environment
    PRODRL_API_KEYS_DIR, else no authentication (loopback)."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    """Larger request bodies are answered 413."""
    max_header_bytes: int = Field(default=32 * 1024, ge=1024)
    """Larger header blocks are answered 431."""
    upstream_timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for an upstream's next byte."""
    connect_retry_seconds: float = Field(default=20.0, ge=0)
    """How long a request that has no byte of answer yet is retried on a server that cannot be reached."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """On SIGTERM: how long running requests may finish."""
    sticky_seconds: float = Field(default=3600.0, gt=0)
    """How long an idle conversation keeps its policy."""
