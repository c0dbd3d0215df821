"""One puzzle as a conversation: the environment, and the loop that asks a policy for moves.

Called by ``users`` (through the gateway), ``suite`` (against one policy's server), ``watching``, ``measure`` and
``warm_start`` (which learns from how a perfect player answers). Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from prodrl.lab import text
from prodrl.lab.puzzles import Puzzle

MAX_TOKENS = 24
"""Of one answer; a move needs about 8."""
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "max_tokens": MAX_TOKENS}
"""Of users and evaluations alike."""

Message = dict[str, Any]
Ask = Callable[[list[Message]], Awaitable[Message]]
"""Takes the conversation so far, returns the assistant's message."""


class Outcome(StrEnum):
    """How an attempt ended."""

    SOLVED = "solved"
    WRONG = "wrong"
    """A legal move, not the solution."""
    ILLEGAL = "illegal"
    """A move that the rules do not allow."""
    MALFORMED = "malformed"
    """No move at all: no tool call, or one that cannot be read."""


class Game:
    """The environment: knows the solution, judges moves, plays the opponent's."""

    def __init__(self, puzzle: Puzzle) -> None:
        self.puzzle = puzzle
        self.board = puzzle.start()
        self._next = 1

    @property
    def solution(self) -> str:
        """The move that is to be found now."""
        return self.puzzle.moves[self._next]

    @property
    def turns_left(self) -> int:
        """Moves that are still to be found."""
        return (len(self.puzzle.moves) - self._next + 1) // 2

    def submit(self, uci: str | None) -> Outcome | str:
        """Play a move.

        Returns:
            How the attempt ended, or the opponent's reply when it goes on. As at Lichess, another move that mates is
            as good as the recorded one.
        """
        move = text.parsed_move(uci)
        if move is None:
            return Outcome.MALFORMED
        if move not in self.board.legal_moves:
            return Outcome.ILLEGAL
        is_recorded = uci == self.solution
        self.board.push(move)
        if self.board.is_checkmate():
            return Outcome.SOLVED
        if not is_recorded:
            return Outcome.WRONG
        self._next += 2
        if self._next > len(self.puzzle.moves):
            return Outcome.SOLVED
        reply = self.puzzle.moves[self._next - 1]
        self.board.push_uci(reply)
        return reply


@dataclass(frozen=True)
class Played:
    """A finished attempt."""

    outcome: Outcome
    turns: int
    """Answers of the policy."""
    moves: tuple[str | None, ...]
    """What the policy played; None where an answer held no move."""

    @property
    def reward(self) -> float:
        """1 for a solved puzzle, else 0."""
        return float(self.outcome is Outcome.SOLVED)


def opening(game: Game) -> list[Message]:
    """The user's first message."""
    return [{"role": "user", "content": text.board_text(game.board)}]


def reply_message(reply: str, game: Game, call: Message) -> Message:
    """The tool's answer to a good move."""
    return {"role": "tool", "tool_call_id": call.get("id", "call-0"), "content": text.reply_text(reply, game.board)}


def _call(answer: Message) -> Message | None:
    """The one call of the tool in an assistant's message."""
    calls = answer.get("tool_calls") or []
    if len(calls) != 1 or (calls[0].get("function") or {}).get("name") != text.TOOL:
        return None
    call: Message = calls[0]
    return call


async def play(puzzle: Puzzle, ask: Ask) -> Played:
    """Ask for moves until the puzzle is solved or a move is not right. Errors of ``ask`` pass through."""
    game = Game(puzzle)
    messages = opening(game)
    moves: list[str | None] = []
    while True:
        answer = await ask(messages)
        call = _call(answer)
        uci = text.called_move(str(call["function"].get("arguments"))) if call else None
        moves.append(uci)
        result = game.submit(uci)
        if isinstance(result, Outcome):
            return Played(result, len(moves), tuple(moves))
        assert call is not None, "a move that goes on came from a call"
        # Sent back as it came: what the template makes of it are the model's own tokens.
        echoed = {"role": "assistant", "content": answer.get("content"), "tool_calls": [call]}
        messages = [*messages, echoed, reply_message(result, game, call)]


def perfect(puzzle: Puzzle) -> list[Message]:
    """The conversation of a player that knows the solution."""
    game = Game(puzzle)
    messages = opening(game)
    while True:
        answer = text.call_message(game.solution)
        messages.append(answer)
        result = game.submit(game.solution)
        if isinstance(result, Outcome):
            assert result is Outcome.SOLVED, "the recorded line solves the puzzle"
            return messages
        messages.append(reply_message(result, game, answer["tool_calls"][0]))
