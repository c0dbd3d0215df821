"""The step: look, join, and seal when exactly S*B trajectories are ready. Called by ``prodrl collect``."""

from __future__ import annotations

import logging
import time

from prodrl.collect import join, ledger, seal
from prodrl.collect.tail import Tail
from prodrl.config import CollectConfig, CollectResult
from prodrl.progress import Progress, check_stop, stop_requested
from prodrl.store import folders, layout, open_store
from prodrl.store.port import Store

log = logging.getLogger(__name__)


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


def resume(store: Store, config: CollectConfig) -> CollectResult | None:
    """What an earlier attempt finished: a claim, or a dataset that was not claimed yet."""
    entry = ledger.read(store, config.round)
    if entry is not None:
        return seal.result_of(store, entry)
    if folders.exists(store, layout.dataset(config.round)):
        return seal.seal(store, config, [], {}, _now_ms())
    return None


def _now_ms() -> int:
    return int(time.time() * 1000)


def run(config: CollectConfig, progress: Progress) -> CollectResult:
    """Poll the store until the dataset is full; never tokenises, never takes a claimed trajectory."""
    store = open_store(config.store)
    finished = resume(store, config)
    if finished is not None:
        return finished
    wanted = config.steps * config.batch_size
    progress.set(0, wanted, "waiting for the first conversations", unit="trajectories")
    rules, claimed = rules_of(config), ledger.claimed_before(store, config.round)
    tail = Tail(store, [layout.records(config.source.digest)])
    known: dict[str, join.Trajectory] = {}
    while True:
        check_stop(f"Collect round {config.round}")
        join.gather(known, tail.records(), tail.feedback())
        now_ms = _now_ms()
        ready = join.choose(known.values(), rules, now_ms, claimed)
        progress.set(min(len(ready), wanted), message=_message(known, rules, now_ms, claimed))
        if len(ready) >= wanted:
            excluded = join.count_excluded(known.values(), rules, now_ms, claimed)
            return seal.seal(store, config, ready[:wanted], excluded, now_ms)
        stop_requested.wait(config.poll_seconds)


def _message(known: dict[str, join.Trajectory], rules: join.Rules, now_ms: int, claimed: set[str]) -> str:
    recorded = sum(1 for t in known.values() if t.records)
    excluded = sum(join.count_excluded(known.values(), rules, now_ms, claimed).values())
    return f"{recorded} recorded, {excluded} excluded"
