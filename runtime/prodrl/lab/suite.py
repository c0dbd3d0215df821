"""The held-out evaluation ``prodrl.lab.suite:chess_puzzles``: one puzzle an item, the session that users have.

Loaded by name by ``prodrl.evaluate.suites``. Its folder holds ``puzzles.csv`` in Lichess's format.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prodrl.errors import DataError
from prodrl.evaluate.chat import ChatClient
from prodrl.lab import session, text
from prodrl.lab.puzzles import Puzzle, read_puzzles
from prodrl.lab.session import Outcome

FILE = "puzzles.csv"


class ChessPuzzles:
    """Every puzzle of the folder is an item."""

    def __init__(self, puzzles: list[Puzzle], sampling: Mapping[str, Any]) -> None:
        self._puzzles = {puzzle.id: puzzle for puzzle in puzzles}
        self._sampling = sampling

    def items(self) -> list[str]:
        """Puzzle ids."""
        return list(self._puzzles)

    async def play(self, item: str, client: ChatClient, seed: int) -> dict[str, float]:
        """One attempt at the puzzle; the n-th move is sampled with seed + n."""
        turns = 0

        async def ask(messages: list[session.Message]) -> session.Message:
            nonlocal turns
            turns += 1
            reply = await client.chat(messages, tools=text.TOOLS, seed=seed + turns, **self._sampling)
            message: session.Message = reply.body["choices"][0].get("message") or {}
            return message

        played = await session.play(self._puzzles[item], ask)
        return {
            "solved": played.reward,
            "legal": float(played.outcome in (Outcome.SOLVED, Outcome.WRONG)),
            "well_formed": float(played.outcome is not Outcome.MALFORMED),
        }


def chess_puzzles(folder: Path, parameters: Mapping[str, Any]) -> ChessPuzzles:
    """The suite of a folder.

    Args:
        folder: Holds ``puzzles.csv``.
        parameters: Sampling parameters that differ from the users' (temperature 1, 24 tokens).

    Raises:
        DataError: The file is missing, damaged, or has an id twice.
    """
    path = folder / FILE
    if not path.is_file():
        raise DataError(
            f"Suite chess_puzzles: no {FILE}, got folder {str(folder)!r}; set suiteUri to a folder with one"
        )
    puzzles = read_puzzles(path)
    if len({puzzle.id for puzzle in puzzles}) < len(puzzles):
        raise DataError(f"Suite chess_puzzles: PuzzleId repeats in {path}; give every puzzle its own")
    return ChessPuzzles(puzzles, {**session.SAMPLING, **parameters})
