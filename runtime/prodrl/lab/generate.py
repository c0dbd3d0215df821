"""Makes small puzzles: a lone black king against a king and one or two pieces, mate in one or two, one solution each.

Called by ``prepare``. Everything under ``numba.njit`` works on bitboards (bit ``8 * rank + file``) and knows only
what these positions need: no pawns, no castling, and black has nothing but its king. The rules themselves are checked
against python-chess by the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chess
import numba
import numpy as np

from prodrl.lab.puzzles import Puzzle

KING, QUEEN, ROOK, BISHOP, KNIGHT = range(5)
_PIECES = (chess.KING, chess.QUEEN, chess.ROOK, chess.BISHOP, chess.KNIGHT)
FAMILIES = ((KING, QUEEN), (KING, ROOK), (KING, ROOK, ROOK), (KING, QUEEN, ROOK), (KING, ROOK, BISHOP), (KING, ROOK, KNIGHT))  # noqa: E501  # fmt: skip
"""White's pieces; the king is always the first."""
_WIDTH = 11
"""Columns of a found row: family, 3 squares of white, king before and after, then up to 5 squares of the line."""
_STEPS = np.array([(0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, -1), (-1, 1)], np.int64)
"""Straight directions first, then the diagonal ones, as (file, rank)."""
_JUMPS = np.array([(1, 2), (2, 1), (2, -1), (1, -2), (-1, -2), (-2, -1), (-2, 1), (-1, 2)], np.int64)


def _near(steps: Any, square: int) -> int:
    file, rank = square % 8, square // 8
    targets = [(file + df, rank + dr) for df, dr in steps.tolist()]
    return sum(1 << (8 * r + f) for f, r in targets if 0 <= f < 8 and 0 <= r < 8)


_KING_NEAR = np.array([_near(_STEPS, square) for square in range(64)], np.uint64)
_KNIGHT_NEAR = np.array([_near(_JUMPS, square) for square in range(64)], np.uint64)
_BIT = np.array([1 << square for square in range(64)], np.uint64)
_NONE = np.uint64(0)


@numba.njit(cache=True)
def _attacks(kind: int, square: int, occupied: int) -> np.uint64:
    """Squares that a piece attacks; the first occupied one of a line is among them."""
    if kind == KING:
        return _KING_NEAR[square]
    if kind == KNIGHT:
        return _KNIGHT_NEAR[square]
    found = _NONE
    for direction in range(4 if kind == BISHOP else 0, 4 if kind == ROOK else 8):
        file = square % 8 + _STEPS[direction, 0]
        rank = square // 8 + _STEPS[direction, 1]
        while 0 <= file < 8 and 0 <= rank < 8:
            bit = _BIT[8 * rank + file]
            found |= bit
            if occupied & bit:
                break
            file += _STEPS[direction, 0]
            rank += _STEPS[direction, 1]
    return found


@numba.njit(cache=True)
def _white(squares: Any) -> np.uint64:
    occupied = _NONE
    for square in squares:
        if square >= 0:
            occupied |= _BIT[square]
    return occupied


@numba.njit(cache=True)
def _covered(kinds: Any, squares: Any) -> np.uint64:
    """Squares where the black king would be in check. It is transparent: it cannot hide behind where it was."""
    occupied = _white(squares)
    found = _NONE
    for index in range(len(squares)):
        if squares[index] >= 0:
            found |= _attacks(kinds[index], squares[index], occupied)
    return found


@numba.njit(cache=True)
def _targets(kinds: Any, squares: Any, index: int, king: int) -> np.uint64:
    """Where a white piece may go; white's king keeps away from black's."""
    if squares[index] < 0:
        return _NONE
    white = _white(squares)
    found = _attacks(kinds[index], squares[index], white | _BIT[king]) & ~(white | _BIT[king])
    return found & ~_KING_NEAR[king] if kinds[index] == KING else found


@numba.njit(cache=True)
def _mates_in_one(kinds: Any, squares: Any, king: int, line: Any) -> int:
    """Number of mating moves, counted up to 2; the first is written to ``line``."""
    count = 0
    for index in range(len(squares)):
        origin = squares[index]
        targets = _targets(kinds, squares, index, king)
        for target in range(64):
            if not targets & _BIT[target]:
                continue
            squares[index] = target
            covered = _covered(kinds, squares)
            squares[index] = origin
            if covered & _BIT[king] and not _KING_NEAR[king] & ~covered:
                if count == 1:
                    return 2
                line[0], line[1], count = origin, target, 1
    return count


@numba.njit(cache=True)
def _answers(kinds: Any, squares: Any, king: int, line: Any) -> int:
    """After a quiet white move: 0 if some reply escapes mate in one, 1 if none does, 2 if ``line[2:5]`` is set as well.

    ``line[2:5]`` gets a reply after which exactly one move mates, and that move; among several a random one.
    """
    flights = _KING_NEAR[king] & ~_covered(kinds, squares)
    if not flights:
        return 0
    mate = np.empty(2, np.int64)
    fitting = 0
    for reply in range(64):
        if not flights & _BIT[reply]:
            continue
        taken = -1
        for index in range(len(squares)):
            if squares[index] == reply:
                taken = index
        if taken >= 0:
            squares[taken] = -1
        count = _mates_in_one(kinds, squares, reply, mate)
        if taken >= 0:
            squares[taken] = reply
        if count == 0:
            return 0
        if count == 1 and taken < 0:
            fitting += 1
            if np.random.randint(fitting) == 0:
                line[2], line[3], line[4] = reply, mate[0], mate[1]
    return 2 if fitting else 1


@numba.njit(cache=True)
def _is_mate_in_two(kinds: Any, squares: Any, king: int, line: Any) -> bool:
    """Whether exactly one move forces mate in two, with a reply that leaves one mate; written to ``line``."""
    scratch = np.empty(5, np.int64)
    solutions, is_fitting = 0, False
    for index in range(len(squares)):
        origin = squares[index]
        targets = _targets(kinds, squares, index, king)
        for target in range(64):
            if not targets & _BIT[target]:
                continue
            squares[index] = target
            forced = _answers(kinds, squares, king, scratch)
            squares[index] = origin
            if forced == 0:
                continue
            solutions += 1
            if solutions == 2:
                return False
            line[0], line[1] = origin, target
            line[2:5] = scratch[2:5]
            is_fitting = forced == 2
    return solutions == 1 and is_fitting


@numba.njit(cache=True)
def _random_position(kinds: Any, squares: Any) -> Any:
    """White's squares at random (written), the black king before and after a legal move; (-1, -1) if that failed."""
    before = np.random.randint(64)
    if np.random.random() < 0.7:  # mates happen at the edge
        along, edge = np.random.randint(8), np.random.randint(4)
        before = (along, 56 + along, 8 * along, 8 * along + 7)[edge]
    occupied = _BIT[before]
    for index in range(len(squares)):
        squares[index] = np.random.randint(64)
        if occupied & _BIT[squares[index]]:
            return -1, -1
        occupied |= _BIT[squares[index]]
    covered = _covered(kinds, squares)
    # Not in check before its move: such a position could always have arisen.
    flights = _KING_NEAR[before] & ~covered & ~_white(squares)
    if covered & _BIT[before] or not flights:
        return -1, -1
    after = np.random.randint(64)
    while not flights & _BIT[after]:
        after = np.random.randint(64)
    return before, after


@numba.njit(cache=True)
def _search(seed: int, families: Any, sizes: Any, wanted: Any) -> Any:
    """[wanted[0] + wanted[1], 11] rows of mates in one and two, in the order found."""
    np.random.seed(seed)
    rows = np.full((wanted[0] + wanted[1], _WIDTH), -1, np.int64)
    counts = np.zeros(2, np.int64)
    line = np.empty(5, np.int64)
    while counts.sum() < len(rows):
        family = np.random.randint(len(sizes))
        kinds = families[family, : sizes[family]]
        squares = np.empty(sizes[family], np.int64)
        before, after = _random_position(kinds, squares)
        if before < 0:
            continue
        mates = _mates_in_one(kinds, squares, after, line)
        depth = 1 if mates == 0 else 0
        if mates == 2 or counts[depth] == wanted[depth]:
            continue
        if depth == 1 and not _is_mate_in_two(kinds, squares, after, line):
            continue
        row = rows[counts.sum()]
        row[0] = family
        row[1 : 1 + len(squares)] = squares
        row[4], row[5] = before, after
        last = 8 if depth == 0 else 11
        row[6:last] = line[: last - 6]
        counts[depth] += 1
    return rows


def _puzzle(row: list[int], name: str) -> Puzzle:
    family, before, after, line = FAMILIES[row[0]], row[4], row[5], [square for square in row[6:] if square >= 0]
    board = chess.Board(None)
    board.turn = chess.BLACK
    board.set_piece_at(before, chess.Piece(chess.KING, chess.BLACK))
    for kind, square in zip(family, row[1:4], strict=False):
        board.set_piece_at(square, chess.Piece(_PIECES[kind], chess.WHITE))
    steps = [(before, after), (line[0], line[1])]
    if len(line) == 5:
        steps += [(after, line[2]), (line[3], line[4])]
    moves = tuple(chess.Move(origin, target).uci() for origin, target in steps)
    depth = len(moves) // 2
    return Puzzle(name, board.fen(), moves, 600 + 500 * (depth - 1), f"endgame mate mateIn{depth} short")


def generate(count: int, *, mate_in_one: float = 0.85, seed: int = 0) -> Iterator[Puzzle]:
    """Different puzzles, ``count`` of them before repetitions are left out.

    Args:
        count: Positions searched for.
        mate_in_one: Share of mates in one; the rest are mates in two.
        seed: The same seed gives the same puzzles.
    """
    ones = round(count * mate_in_one)
    sizes = np.array([len(family) for family in FAMILIES], np.int64)
    families = np.array([[*family, 0][:3] for family in FAMILIES], np.int64)
    rows = _search(seed, families, sizes, np.array([ones, count - ones], np.int64))
    # In the order found, the rarer kind would lie at the front.
    np.random.default_rng(seed).shuffle(rows)
    seen: set[tuple[int, ...]] = set()
    for index, row in enumerate(rows.tolist()):
        squares = row[1:4]
        position = (row[0], *squares[:1], *(sorted(squares[1:]) if row[0] == 2 else squares[1:]), row[5])
        if position not in seen:
            seen.add(position)
            yield _puzzle(row, f"lab{seed}-{index:06d}")
