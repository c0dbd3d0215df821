"""How a position, a move and a move's result are written for the model. Pure; used by ``session`` and ``model``."""

from __future__ import annotations

import json
import re
from typing import Any

import chess

TOOL = "move"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Play a move on the board.",
            "parameters": {
                "type": "object",
                "properties": {"uci": {"type": "string", "description": "From and to square, for example c3h8"}},
                "required": ["uci"],
            },
        },
    }
]
"""The only tool, as OpenAI's chat completions want it."""
_ORDER = "KQRBNPkqrbnp"
SQUARES_IN_TEXT = re.compile(r"[a-h][1-8]")
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def piece_order(word: str) -> tuple[int, str]:
    """Where a word like ``Ka7`` stands among the others."""
    return _ORDER.index(word[0]), word


def board_text(board: chess.Board) -> str:
    """The pieces in a fixed order, white in capitals; ``black`` at the end where black is to move.

    Example:
        ``Ka7 Qc3 Rg6 kh4``
    """
    words = [piece.symbol() + chess.square_name(square) for square, piece in board.piece_map().items()]
    words.sort(key=piece_order)
    return " ".join(words if board.turn else [*words, "black"])


def reply_text(reply: str, board: chess.Board) -> str:
    """The tool's answer to a good move: what the opponent did, and the new position."""
    return f"{reply} {board_text(board)}"


def call_text(uci: str) -> str:
    """A move as the model writes it; what the chat template makes of a ``tool_calls`` entry."""
    return "<tool_call>" + json.dumps({"name": TOOL, "arguments": {"uci": uci}}) + "</tool_call>"


def call_message(uci: str, call_id: str = "call-0") -> dict[str, Any]:
    """The assistant's message with this move, as chat completions answer it."""
    call = {"id": call_id, "type": "function", "function": {"name": TOOL, "arguments": json.dumps({"uci": uci})}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def parsed_move(uci: str | None) -> chess.Move | None:
    """The move that a text means; None where it means none."""
    try:
        return chess.Move.from_uci(uci) if uci is not None else None
    except ValueError:
        return None


def called_move(arguments: str) -> str | None:
    """The move in a tool call's arguments; None when they are malformed."""
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return None
    uci = parsed.get("uci") if isinstance(parsed, dict) else None
    return uci if isinstance(uci, str) else None


def written_move(text: str) -> str | None:
    """The move in the model's own text, read as an engine's tool parser reads it; None when it is not one call."""
    calls = CALL.findall(text)
    if len(calls) != 1:
        return None
    try:
        call = json.loads(calls[0])
        if call["name"] != TOOL:
            return None
        return called_move(json.dumps(call["arguments"]))
    except (ValueError, KeyError, TypeError):
        return None
