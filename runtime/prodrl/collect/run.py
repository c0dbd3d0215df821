"""The step: look, join, and seal when exactly S*B trajectories are ready. Called by ``prodrl collect``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from prodrl.collect import join, ledger, seal
from prodrl.collect.tail import Tail
from prodrl.config import CollectConfig, CollectResult
from prodrl.errors import CredentialsError, StorageFullError, UnavailableError
from prodrl.progress import Progress, check_stop, stop_requested
from prodrl.store import open_store
from prodrl.store.port import Store
from prodrl.store.retention import retire

logger = logging.getLogger(__name__)

MAX_OUTAGE_SECONDS = 300.0
"""How long the store may be away before the step gives up (and is tried again)."""
LONGEST_CONVERSATION_MS = 7 * 86_400_000
"""A conversation that crossed policies is recognised when its other part ended at most this long before the round."""


def run(config: CollectConfig, progress: Progress, now_ms: Callable[[], int] | None = None) -> CollectResult:
    """Poll the store until the dataset is full, then seal it; repeating a finished round returns the same result.

    Args:
        config: The step's configuration.
        progress: Counts the trajectories that are ready.
        now_ms: Clock, Unix milliseconds; None: this machine's.

    Raises:
        PreemptedError: Told to stop; nothing is lost, the next attempt reads again.
        UnavailableError: The store was away for longer than MAX_OUTAGE_SECONDS.
        DataError: The round's dataset is damaged, or a later round has overtaken this one.
    """
    store = open_store(config.store)
    tidied = _tidy(store, config)
    collector = Collector(store, config, now_ms or _clock)
    progress.set(0, config.steps * config.batch_size, "waiting for conversations", unit="trajectories")
    last_success = time.monotonic()
    while True:
        check_stop(f"Collect round {config.round}")
        try:
            result = collector.look(progress)
            last_success = time.monotonic()
        except UnavailableError as exc:
            if time.monotonic() - last_success > MAX_OUTAGE_SECONDS:
                raise
            logger.warning("Round %d: %s", config.round, exc)
            result = None
        if result is not None:
            progress.set(result.trajectories, message="sealed")
            return result.model_copy(update=tidied)
        stop_requested.wait(config.poll_seconds)


def _tidy(store: Store, config: CollectConfig) -> dict[str, object]:
    """Let go of old rounds' weights. A store that does not let us delete has cost space, and not a round."""
    try:
        return {"retired": len(retire(store, config.round, config.spent))}
    except (CredentialsError, UnavailableError, StorageFullError) as exc:
        logger.warning("Round %d: old rounds' weights are not deleted: %s", config.round, exc)
        return {"retention_error": str(exc)[:500]}


class Collector:
    """One attempt at one round; remembers between two looks what it has read."""

    def __init__(self, store: Store, config: CollectConfig, now_ms: Callable[[], int]) -> None:
        self._store = store
        self._config = config
        self._now_ms = now_ms
        self._tail = Tail(store, config.source.digest, config.collect_from_ms - LONGEST_CONVERSATION_MS)
        self._known: join.Known = {}
        self._earlier: list[ledger.Entry] | None = None

    def look(self, progress: Progress) -> CollectResult | None:
        """Read what is new, and seal if it suffices; None while it does not."""
        if (standing := seal.resume(self._store, self._config)) is not None:
            return standing
        if self._earlier is None:
            self._earlier = ledger.claims_before(self._store, self._config.round)
        # The clock is read first: what is judged missing at that time must have had its chance to be listed.
        now_ms = self._now_ms()
        join.gather(self._known, self._tail.records(), ())
        join.gather(self._known, (), self._tail.feedback())
        wanted = self._config.steps * self._config.batch_size
        ready, refused = self._sort_out(now_ms)
        progress.set(min(len(ready), wanted), message=self._message(refused))
        if len(ready) < wanted:
            return None
        self._earlier = ledger.fence_before(self._store, self._config.round)
        ready, refused = self._sort_out(now_ms)
        if len(ready) < wanted:
            return None
        claimed = ledger.claimed(self._earlier)
        seen = sum(t.id not in claimed for t in join.of_policy(self._known, self._config.source.digest))
        return seal.seal(self._store, self._config, ready[:wanted], refused, seen=seen, now_ms=now_ms)

    def _sort_out(self, now_ms: int) -> tuple[list[join.Trajectory], dict[str, str]]:
        ready, refused = join.sort_out(self._known, rules_of(self._config), now_ms, ledger.claimed(self._earlier or ()))
        return ready, dict(refused)

    def _message(self, refused: dict[str, str]) -> str:
        policy = join.of_policy(self._known, self._config.source.digest)
        scored = sum(trajectory.scored_ms is not None for trajectory in policy)
        damaged = f", {len(self._tail.damaged)} damaged objects set aside" if self._tail.damaged else ""
        return f"{len(policy)} recorded, {scored} scored, {len(refused)} excluded or expired{damaged}"


def rules_of(config: CollectConfig) -> join.Rules:
    """The configuration as the join's rules."""
    return join.Rules(
        digest=config.source.digest,
        collect_from_ms=config.collect_from_ms,
        is_sync=config.mode == "Sync",
        reward_deadline_seconds=config.reward_deadline_seconds,
        settle_seconds=config.settle_seconds,
        max_sequence_tokens=config.max_sequence_tokens,
    )


def _clock() -> int:
    return int(time.time() * 1000)
