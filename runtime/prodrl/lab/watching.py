"""One puzzle, seen: a board in the terminal, and the moves of a policy or of a person. Called by ``cli``."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import chess
import httpx
from rich.console import Console
from rich.text import Text

from prodrl.lab import session, text
from prodrl.lab.puzzles import Puzzle
from prodrl.lab.session import Outcome, Played

_FIGURES = {"k": "\u265a", "q": "\u265b", "r": "\u265c", "b": "\u265d", "n": "\u265e", "p": "\u265f"}
_LIGHT, _DARK, _MOVED = "grey70", "grey46", "gold3"
_WORDS = {
    Outcome.SOLVED: ("solved", "bold green"),
    Outcome.WRONG: ("a legal move, but not the solution", "bold red"),
    Outcome.ILLEGAL: ("not a legal move", "bold red"),
    Outcome.MALFORMED: ("no move at all", "bold red"),
}


def draw(board: chess.Board, last: chess.Move | None = None) -> Text:
    """The board as coloured squares, white below; the last move's squares stand out."""
    drawn = Text()
    touched = {last.from_square, last.to_square} if last else set()
    for rank in range(7, -1, -1):
        drawn.append(f" {rank + 1} ", "dim")
        for file in range(8):
            square = chess.square(file, rank)
            ground = _MOVED if square in touched else _DARK if (file + rank) % 2 == 0 else _LIGHT
            piece = board.piece_at(square)
            colour = "white" if piece is not None and piece.color else "black"
            drawn.append(f" {_FIGURES[piece.symbol().lower()] if piece else ' '} ", f"bold {colour} on {ground}")
        drawn.append("\n")
    drawn.append("    " + "  ".join("abcdefgh"), "dim")
    return drawn


class Watcher:
    """Wraps an ``Ask`` so that every position and every answer is shown."""

    def __init__(self, console: Console, puzzle: Puzzle, ask: session.Ask, pause: float) -> None:
        self._console, self._ask, self._pause = console, ask, pause
        self._board = puzzle.start()
        self._last = text.parsed_move(puzzle.moves[0])
        self._reply = iter(puzzle.moves[2::2])

    async def ask(self, messages: list[session.Message]) -> session.Message:
        """Show the position, ask, show the answer."""
        if len(messages) > 1 and (reply := text.parsed_move(next(self._reply, None))):
            self._board.push(reply)
            self._last = reply
        self._console.print(draw(self._board, self._last))
        answer = await self._ask(messages)
        calls = answer.get("tool_calls") or []
        uci = text.called_move(calls[0]["function"]["arguments"]) if calls else None
        move = text.parsed_move(uci)
        self._console.print(f"move: [bold]{uci or answer.get('content') or '(nothing)'}[/]\n", highlight=False)
        if move is not None and move in self._board.legal_moves:
            self._board.push(move)
            self._last = move
            await asyncio.sleep(self._pause)
        return answer

    def conclude(self, played: Played, puzzle: Puzzle) -> None:
        """The last position and the verdict."""
        if played.outcome in (Outcome.SOLVED, Outcome.WRONG):
            self._console.print(draw(self._board, self._last))
        words, style = _WORDS[played.outcome]
        self._console.print(Text(words, style))
        if played.outcome is not Outcome.SOLVED:
            self._console.print(f"the solution: {' '.join(puzzle.moves[1:])}", highlight=False)


def gateway_asker(http: httpx.AsyncClient, model: str, conversation: str) -> session.Ask:
    """Asks a served policy, as a user does."""

    async def ask(messages: list[session.Message]) -> session.Message:
        body = {"model": model, "messages": messages, "tools": text.TOOLS, **session.SAMPLING}
        response = await http.post(
            "/v1/chat/completions", json=body, headers={"X-ProdRL-Trajectory": conversation}, timeout=300.0
        )
        response.raise_for_status()
        message: session.Message = response.json()["choices"][0]["message"]
        return message

    return ask


def solver_asker(puzzle: Puzzle) -> session.Ask:
    """Answers with the solution: a demonstration that needs no policy."""
    moves = iter(puzzle.moves[1::2])

    async def ask(_: list[session.Message]) -> session.Message:
        return text.call_message(next(moves))

    return ask


def human_asker(read: Callable[[], str]) -> session.Ask:
    """Asks the person at the terminal."""

    async def ask(_: list[session.Message]) -> session.Message:
        return text.call_message((await asyncio.to_thread(read)).strip().lower())

    return ask


def choose(puzzles: list[Puzzle], name: str | None) -> Puzzle | None:
    """The puzzle of that id (None when there is none), or any."""
    if name is None:
        return random.choice(puzzles)  # noqa: S311  (not for secrecy)
    return next((puzzle for puzzle in puzzles if puzzle.id == name), None)


def watch(
    console: Console, puzzle: Puzzle, open_asker: Callable[[], Awaitable[session.Ask]], pause: float = 1.0
) -> Played:
    """Show one attempt from start to end."""

    async def attempt() -> Played:
        watcher = Watcher(console, puzzle, await open_asker(), pause)
        played = await session.play(puzzle, watcher.ask)
        watcher.conclude(played, puzzle)
        return played

    return asyncio.run(attempt())
