"""Old rounds' weights: two phases, crashes at any write, and a store that does not let us delete."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from prodrl.collect.run import run
from prodrl.config import StoreConfig
from prodrl.errors import CredentialsError
from prodrl.progress import Progress
from prodrl.store import layout, open_store
from prodrl.store.port import Store
from prodrl.store.retention import retire
from tests.support.records import NOW, make_config, world

pytest_plugins = ["tests.support.stores"]

FOUR = ("t-a", "t-b", "t-c", "t-d")


def made(store: Store, *numbers: int) -> None:
    """What rounds leave: large things, and what tells of them."""
    for number in numbers:
        for folder in (
            layout.policy(number),
            layout.weights(number),
            layout.checkpoint(number),
            layout.dataset(number),
        ):
            store.put(f"{folder}/data.bin", b"x")
            store.put(layout.manifest_of(folder), b"{}")
        store.put(layout.manifest_of(layout.step_checkpoint(number, 4)), b"{}")
        store.put(layout.train_metrics(number), b"{}\n")
        store.put(layout.evaluation(number), b"{}")


def kept(store: Store, number: int) -> set[str]:
    """The kinds of things that a round still has."""
    return {key.split("/")[2].partition(".")[0] for key in store.list(f"{layout.round_folder(number)}/")}


ALL = {"policy", "weights", "checkpoint", "steps", "dataset", "metrics", "evaluation"}
LIGHT = {"dataset", "metrics", "evaluation"}


def test_a_round_marks_and_a_later_one_deletes(any_store: Store) -> None:
    made(any_store, 0, 1, 10)
    assert retire(any_store, 12, [0]) == []
    assert retire(any_store, 12, [0]) == [], "another attempt at the same round is no later round"
    assert kept(any_store, 0) == ALL
    assert retire(any_store, 13, [0, 1]) == [0]
    assert (kept(any_store, 0), kept(any_store, 1), kept(any_store, 10)) == (LIGHT, ALL, ALL)
    assert retire(any_store, 14, [0, 1]) == [1]
    assert retire(any_store, 15, [0, 1]) == []
    assert kept(any_store, 10) == ALL
    assert list(any_store.list(layout.RETIRING)) == []


def test_what_is_not_spent_any_more_loses_its_mark(local_store: Store) -> None:
    made(local_store, 1)
    retire(local_store, 5, [1])
    retire(local_store, 6, [])
    assert retire(local_store, 7, [1]) == []
    assert kept(local_store, 1) == ALL
    assert retire(local_store, 8, [1]) == [1]


def test_an_earlier_round_that_comes_late_deletes_nothing(local_store: Store) -> None:
    made(local_store, 1)
    retire(local_store, 8, [1])
    assert retire(local_store, 7, [1]) == []
    assert kept(local_store, 1) == ALL


def test_a_run_that_begins_anew_in_the_same_store_lets_go_of_its_rounds_too(local_store: Store) -> None:
    made(local_store, 0, 1)
    retire(local_store, 5, [0, 1])
    assert retire(local_store, 6, [0, 1]) == [0, 1]
    made(local_store, 0)
    retire(local_store, 1, [])
    made(local_store, 1)
    retire(local_store, 5, [0, 1])
    assert retire(local_store, 6, [0, 1]) == [0, 1]
    assert (kept(local_store, 0), kept(local_store, 1)) == (LIGHT, LIGHT)


def test_marks_of_a_run_that_was_here_before_count_for_nothing(local_store: Store) -> None:
    made(local_store, 1)
    retire(local_store, 57, [1])
    local_store.put(f"{layout.RETIRING}notes.txt", b"")
    local_store.put(f"{layout.RETIRED}notes.txt", b"")
    assert retire(local_store, 5, [1]) == []
    assert retire(local_store, 6, [1]) == [1]


@pytest.mark.parametrize("spent", [[5], [6], [1, 9]])
def test_a_round_never_names_itself_or_a_later_one(local_store: Store, spent: list[int]) -> None:
    made(local_store, *spent)
    with pytest.raises(ValueError, match="only earlier rounds"):
        retire(local_store, 5, spent)
    assert list(local_store.list(layout.RETIRING)) == []


class CrashError(BaseException):
    """The process died here."""


def _dying(store: Store, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    writes = 0
    for name in ("create", "delete"):
        real = getattr(type(store), name)

        def act(self: Store, *arguments: Any, real: Any = real) -> Any:
            nonlocal writes
            if writes == after:
                raise CrashError
            writes += 1
            return real(self, *arguments)

        monkeypatch.setattr(type(store), name, act)


@pytest.mark.parametrize("after", range(10))
def test_a_crash_between_any_two_writes_is_resumed_by_the_next_round(
    local_store: Store, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    made(local_store, 0, 1, 2)
    retire(local_store, 6, [0])
    with monkeypatch.context() as patch:
        _dying(local_store, patch, after)
        with pytest.raises(CrashError):
            retire(local_store, 7, [0, 1])
    for folder in layout.heavy_folders(0)[:3]:
        is_whole = local_store.exists(f"{folder}/data.bin")
        assert is_whole or not local_store.exists(layout.manifest_of(folder)), "no folder exists without its files"
    retire(local_store, 8, [0, 1])
    retire(local_store, 9, [0, 1])
    assert (kept(local_store, 0), kept(local_store, 1), kept(local_store, 2)) == (LIGHT, LIGHT, ALL)
    assert list(local_store.list(layout.RETIRING)) == []


def test_collecting_lets_go_of_what_the_operator_names(any_config: StoreConfig) -> None:
    there = world(any_config)
    made(there.store, 1, 2)
    there.play(*FOUR)
    there.play("t-e", "t-f", "t-g", "t-h")
    first = run(make_config(any_config, 5, spent=(1,)), Progress(), now_ms=lambda: NOW)
    second = run(make_config(any_config, 6, spent=(1, 2)), Progress(), now_ms=lambda: NOW)
    assert [(item.retired, item.retention_error) for item in (first, second)] == [(0, ""), (1, "")]
    assert (kept(there.store, 1), kept(there.store, 2)) == (LIGHT, ALL)


def test_a_store_that_refuses_to_delete_costs_space_and_no_round(
    local_config: StoreConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = world(local_config)
    made(there.store, 1)
    there.play(*FOUR)
    retire(there.store, 4, [1])

    def refused(self: Store, key: str) -> Iterable[str]:
        raise CredentialsError(f"Object {key}: refused, got AccessDenied; allow s3:DeleteObject")

    monkeypatch.setattr(type(open_store(local_config)), "delete", refused)
    result = run(make_config(local_config, 5, spent=(1,)), Progress(), now_ms=lambda: NOW)
    assert result.trajectories == 4
    assert result.retired == 0
    assert "s3:DeleteObject" in result.retention_error
    assert kept(there.store, 1) == ALL
