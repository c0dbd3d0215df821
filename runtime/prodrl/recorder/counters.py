"""What the recorder counts. Written by ``capture`` and ``sink``, read by ``middleware`` at ``GET /prodrl/metrics``.

Plain integers: each is written by one thread, or its loss of an increment in a race would be harmless.
"""

from __future__ import annotations

import dataclasses
from collections import Counter


@dataclasses.dataclass
class Counters:
    """Figures since the process started."""

    recorded: int = 0
    """Records that were written to the spool."""
    trainable: int = 0
    """Those of them that may be trained on."""
    untrainable: Counter[str] = dataclasses.field(default_factory=Counter)
    """Reason -> records that have it; a record may have several."""
    dropped_queue_full: int = 0
    """Completions lost because the writer could not follow, or had ended."""
    dropped_faults: int = 0
    """Completions lost to a fault of the recorder itself."""
    dropped_disk: int = 0
    """Records lost because the spool could not be written or is full."""
    not_traffic: int = 0
    """Requests of probes and evaluations: not recorded, by their ids."""
    unsupported: int = 0
    """Requests of traffic that are no sample of anything (beam search, streamed prompts)."""
    refused: int = 0
    """Requests of traffic that the engine refused as the client's fault."""
    shards: int = 0
    """Shards whose manifest is in the store."""
    bytes: int = 0
    """Size of these shards."""
    upload_failures: int = 0
    """Attempts to bring a shard to the store that failed; they are repeated."""
    recovered_shards: int = 0
    """Shards of an earlier process that were found in the spool."""
    torn_shards: int = 0
    """Files of an earlier process that it had not finished; their records are lost."""

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {**dataclasses.asdict(self), "untrainable": dict(self.untrainable)}
