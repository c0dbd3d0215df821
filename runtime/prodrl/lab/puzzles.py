"""Chess puzzles in the format of the Lichess database: reading, writing, splitting.

Called by ``generate`` (which makes small ones), ``session`` (which plays them) and ``demo``. The columns are those of
https://database.lichess.org/#puzzles, so that a file from there can be played as it is. In that format ``FEN`` is the
position before the opponent's move, and ``Moves`` begins with that move; the solver answers with the second one.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import chess

from prodrl.errors import DataError, UsageError

COLUMNS = (
    "PuzzleId", "FEN", "Moves", "Rating", "RatingDeviation", "Popularity", "NbPlays", "Themes", "GameUrl",
    "OpeningTags",
)  # fmt: skip
_SHOWN_FAULTS = 5
_MOVE = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")


@dataclass(frozen=True)
class Puzzle:
    """One row.

    Example:
        ``Puzzle("00sHx", "q3k1nr/...", ("e8d7", "a2e6", "d7d8", "f7f8"), 1760, "mate mateIn2")``
    """

    id: str
    fen: str
    """Before the opponent's first move."""
    moves: tuple[str, ...]
    """UCI; the opponent's and the solver's in turn, the opponent's first, the solver's last."""
    rating: int = 1000
    themes: str = ""

    @property
    def num_turns(self) -> int:
        """Moves that the solver must find."""
        return len(self.moves) // 2

    def start(self) -> chess.Board:
        """The position in which the solver is to move first."""
        board = chess.Board(self.fen)
        board.push_uci(self.moves[0])
        return board


def _fault(row: dict[str, str | None]) -> str | None:
    """What is wrong with a row, or None: the column, the value, the remedy."""
    fen, moves = row.get("FEN") or "", (row.get("Moves") or "").split()
    if not row.get("PuzzleId"):
        return "PuzzleId is empty; give every puzzle an id"
    if not (row.get("Rating") or "").strip().isdigit():
        return f"Rating must be a whole number, got {row.get('Rating')!r}; correct it"
    try:
        board = chess.Board(fen)
    except ValueError as exc:
        return f"FEN cannot be read ({exc}), got {fen!r}; correct it"
    if not board.is_valid():
        return f"FEN is not a legal position, got {fen!r}; correct it"
    return _fault_of_moves(board, moves)


def _fault_of_moves(board: chess.Board, moves: list[str]) -> str | None:
    if len(moves) < 2 or len(moves) % 2:
        return f"Moves must be an even number of moves, the opponent's first, got {' '.join(moves)!r}; complete them"
    for move in moves:
        if not _MOVE.fullmatch(move) or chess.Move.from_uci(move) not in board.legal_moves:
            return f"Moves holds a move that is not legal, got {move!r} in {board.fen()!r}; write legal moves in UCI"
        board.push_uci(move)
    return None


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str | None]]]:
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS[:4] if name not in (reader.fieldnames or ())]
        if missing:
            raise DataError(
                f"Puzzles {path}: the first line must name the columns, {', '.join(missing)} missing, "
                f"got {reader.fieldnames!r}; use the CSV of database.lichess.org (unpacked)"
            )
        for row in reader:
            yield reader.line_num, row


def read_puzzles(path: Path, *, limit: int | None = None) -> list[Puzzle]:
    """The first ``limit`` puzzles of a file (None: all of them).

    Raises:
        UsageError: No such file.
        DataError: Rows that are no puzzles; the message names line, value and remedy of the first few.
    """
    puzzles: list[Puzzle] = []
    faults: list[str] = []
    try:
        for line, row in itertools.islice(_rows(path), limit):
            fault = _fault(row)
            if fault is not None:
                faults.append(f"line {line}: {fault}")
                if len(faults) == _SHOWN_FAULTS:
                    break
                continue
            moves = tuple((row["Moves"] or "").split())
            puzzles.append(
                Puzzle(row["PuzzleId"] or "", row["FEN"] or "", moves, int(row["Rating"] or 0), row.get("Themes") or "")
            )
    except OSError as exc:
        raise UsageError(f"Puzzles {path}: cannot be read, {exc.strerror}; give a CSV with --puzzles") from exc
    except (UnicodeDecodeError, csv.Error) as exc:
        raise DataError(f"Puzzles {path}: not a CSV in UTF-8 ({exc}); unpack it first (zstd -d)") from exc
    if faults:
        raise DataError(f"Puzzles {path}: bad rows; {'; '.join(faults)}")
    if not puzzles:
        raise DataError(f"Puzzles {path}: holds no puzzle; give a file with at least one row")
    return puzzles


def write_puzzles(path: Path, puzzles: Iterable[Puzzle]) -> None:
    """Write a file that :func:`read_puzzles` reads; it appears whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for puzzle in puzzles:
            row = (puzzle.id, puzzle.fen, " ".join(puzzle.moves), puzzle.rating, 80, 90, 100, puzzle.themes, "", "")
            writer.writerow(row)
    temporary.replace(path)


# Symmetry: without pawns and castling, a position and its eight images under turning and mirroring the board are one
# problem. What is held out must not have an image in what is trained on.


def _image(square: int, number: int) -> int:
    file, rank = chess.square_file(square), chess.square_rank(square)
    if number & 1:
        file = 7 - file
    if number & 2:
        rank = 7 - rank
    if number & 4:
        file, rank = rank, file
    return chess.square(file, rank)


IMAGES = tuple(tuple(_image(square, number) for square in chess.SQUARES) for number in range(8))
"""[8][64] where each square goes under each symmetry of the board; the first is the identity."""


def _symmetries(board: chess.Board) -> tuple[tuple[int, ...], ...]:
    if board.castling_rights or board.ep_square is not None:
        return IMAGES[:1]
    return IMAGES[:2] if board.pawns else IMAGES


def symmetry_class(board: chess.Board) -> str:
    """A text that a position shares with its images under the symmetries that chess allows it, and with no other."""
    pieces = [(piece.symbol(), square) for square, piece in board.piece_map().items()]
    codes = (sorted(f"{symbol}{image[square]:02d}" for symbol, square in pieces) for image in _symmetries(board))
    return f"{'w' if board.turn else 'b'} {min(''.join(code) for code in codes)}"


@dataclass(frozen=True)
class Split:
    """Puzzles of disjoint symmetry classes."""

    warm: list[Puzzle]
    """For the supervised warm start."""
    users: list[Puzzle]
    """For the simulated users."""
    held_out: list[Puzzle]
    """For evaluations."""


def split(puzzles: Iterable[Puzzle], *, warm: float = 0.5, held_out: float = 0.1) -> Split:
    """Divide by a hash of the symmetry class: the same position goes to the same part, whatever else is in the file."""
    parts = Split([], [], [])
    for puzzle in puzzles:
        name = symmetry_class(puzzle.start()).encode()
        place = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") / 2**64
        part = parts.held_out if place < held_out else parts.warm if place < held_out + warm else parts.users
        part.append(puzzle)
    return parts
