"""Puzzles: generated ones against python-chess by brute force, the reader against bad files, the split."""

from __future__ import annotations

import chess
import pytest

from prodrl.errors import DataError, UsageError
from prodrl.lab import generate, puzzles
from prodrl.lab.puzzles import COLUMNS, Puzzle, read_puzzles, split, symmetry_class, write_puzzles

HEADER = ",".join(COLUMNS)
LICHESS = [
    "00sHx,q3k1nr/1pp1nQpp/3p4/1P2p3/4P3/B1PP1b2/B5PP/5K2 b k - 0 17,e8d7 a2e6 d7d8 f7f8,1760,80,83,72,"
    "mate mateIn2 middlegame short,https://lichess.org/yyznGmXs/black#34,Italian_Game Italian_Game_Classical_Variation",
    "000hf,r1bqk2r/pp1nbNp1/2p1p2p/8/2BP4/1PN3P1/P3QP1P/3R1RK1 b kq - 0 19,e8f7 e2e6 f7f8 e6f7,1575,76,91,666,"
    "mate mateIn2 middlegame short,https://lichess.org/71ygsFeE/black#38,Horwitz_Defense",
]


@pytest.fixture(scope="module")
def generated() -> list[Puzzle]:
    return list(generate.generate(600, mate_in_one=0.7, seed=3))


def mating_moves(board: chess.Board) -> list[str]:
    found = []
    for move in list(board.legal_moves):
        board.push(move)
        if board.is_checkmate():
            found.append(move.uci())
        board.pop()
    return found


def moves_that_force_mate_next(board: chess.Board) -> list[str]:
    """White moves after which every reply allows a mate; a stalemate or mate allows no reply and does not count."""
    found = []
    for move in list(board.legal_moves):
        board.push(move)
        replies = list(board.legal_moves)
        forced = bool(replies)
        for reply in replies:
            board.push(reply)
            forced = forced and bool(mating_moves(board))
            board.pop()
        board.pop()
        if forced:
            found.append(move.uci())
    return found


def test_mates_in_one_have_one_solution(generated: list[Puzzle]) -> None:
    ones = [puzzle for puzzle in generated if puzzle.num_turns == 1]
    assert len(ones) > 300
    for puzzle in ones:
        assert chess.Board(puzzle.fen).is_valid()
        board = puzzle.start()
        assert board.is_valid()
        assert mating_moves(board) == [puzzle.moves[1]], puzzle


def test_mates_in_two_have_one_solution_at_each_move(generated: list[Puzzle]) -> None:
    twos = [puzzle for puzzle in generated if puzzle.num_turns == 2]
    assert len(twos) > 100
    for puzzle in twos[:60]:
        assert chess.Board(puzzle.fen).is_valid()
        board = puzzle.start()
        assert mating_moves(board) == []
        assert moves_that_force_mate_next(board) == [puzzle.moves[1]], puzzle
        board.push_uci(puzzle.moves[1])
        board.push_uci(puzzle.moves[2])
        assert mating_moves(board) == [puzzle.moves[3]], puzzle


def test_generation_repeats_itself_and_has_no_position_twice(generated: list[Puzzle]) -> None:
    assert generated == list(generate.generate(600, mate_in_one=0.7, seed=3))
    assert generated[:20] != list(generate.generate(600, mate_in_one=0.7, seed=4))[:20]
    positions = [puzzle.start().board_fen() for puzzle in generated]
    assert len(set(positions)) == len(positions)


def test_symmetry_classes_agree_with_the_boards_own_transformations() -> None:
    board = chess.Board("8/8/8/3k4/8/1K6/5R2/8 w - - 0 1")
    images = [board]
    for turn in (chess.flip_vertical, chess.flip_horizontal, chess.flip_diagonal, chess.flip_anti_diagonal):
        images += [image.transform(turn) for image in images]
    assert len({image.board_fen() for image in images}) == 8
    assert len({symmetry_class(image) for image in images}) == 1
    assert symmetry_class(chess.Board("8/8/8/3k4/8/1K6/4R3/8 w - - 0 1")) != symmetry_class(board)


def test_a_pawn_has_only_its_mirror_image() -> None:
    board = chess.Board("8/8/8/3k4/8/1K6/5P2/8 w - - 0 1")
    assert symmetry_class(board.transform(chess.flip_horizontal)) == symmetry_class(board)
    assert symmetry_class(board.transform(chess.flip_vertical)) != symmetry_class(board)


def test_the_parts_of_a_split_share_no_symmetry_class(generated: list[Puzzle]) -> None:
    parts = split(generated)
    classes = [{symmetry_class(p.start()) for p in part} for part in (parts.warm, parts.users, parts.held_out)]
    assert not classes[0] & classes[1]
    assert not classes[0] & classes[2]
    assert not classes[1] & classes[2]
    assert len(parts.warm) + len(parts.users) + len(parts.held_out) == len(generated)
    assert 0.4 < len(parts.warm) / len(generated) < 0.6
    assert 0.05 < len(parts.held_out) / len(generated) < 0.17


def test_the_split_of_a_puzzle_does_not_depend_on_the_others(generated: list[Puzzle]) -> None:
    alone = split(generated[:100])
    assert set(alone.held_out) <= set(split(generated).held_out)


def test_rows_of_lichess_are_read(tmp_path) -> None:
    path = tmp_path / "lichess.csv"
    path.write_text("\n".join([HEADER, *LICHESS]), encoding="utf-8")
    found = read_puzzles(path)
    assert [puzzle.id for puzzle in found] == ["00sHx", "000hf"]
    assert found[0].moves == ("e8d7", "a2e6", "d7d8", "f7f8")
    assert found[0].rating == 1760
    assert read_puzzles(path, limit=1) == found[:1]


def test_what_is_written_is_read_back(tmp_path, generated: list[Puzzle]) -> None:
    write_puzzles(tmp_path / "some.csv", generated[:50])
    assert read_puzzles(tmp_path / "some.csv") == generated[:50]
    assert [path.name for path in tmp_path.iterdir()] == ["some.csv"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("e8d7 a2e6", "e8d7 a2e7"), ["line 3", "Moves", "'a2e7'", "legal"]),
        ((" f7f8,", ","), ["line 3", "Moves", "even number"]),
        (("q3k1nr", "q3k1nrr"), ["line 3", "FEN", "q3k1nrr"]),
        (("5K2 b", "5k2 b"), ["line 3", "FEN", "not a legal position"]),
        ((",1760,", ",high,"), ["line 3", "Rating", "'high'"]),
        (("00sHx,", ","), ["line 3", "PuzzleId"]),
    ],
)
def test_a_bad_row_is_refused_with_line_value_and_remedy(tmp_path, change, named) -> None:
    bad = LICHESS[0].replace(*change)
    assert bad != LICHESS[0]
    (tmp_path / "bad.csv").write_text("\n".join([HEADER, LICHESS[1], bad]), encoding="utf-8")
    with pytest.raises(DataError) as refused:
        read_puzzles(tmp_path / "bad.csv")
    assert all(word in str(refused.value) for word in named), refused.value


def test_several_bad_rows_are_named_together(tmp_path) -> None:
    bad = [LICHESS[0].replace(",1760,", ",x,"), LICHESS[1].replace("e8f7 e2e6", "e8f7 e2e5")]
    (tmp_path / "bad.csv").write_text("\n".join([HEADER, *bad]), encoding="utf-8")
    with pytest.raises(DataError, match=r"line 2.*line 3"):
        read_puzzles(tmp_path / "bad.csv")


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", HEADER.encode(), b"\x28\xb5\x2f\xfd\xff\xfe"])
def test_a_file_that_is_no_puzzle_file_is_refused(tmp_path, content) -> None:
    (tmp_path / "bad.csv").write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.csv"):
        read_puzzles(tmp_path / "bad.csv")


def test_a_missing_file_is_a_usage_error(tmp_path) -> None:
    with pytest.raises(UsageError, match="--puzzles"):
        read_puzzles(tmp_path / "absent.csv")


def test_images_are_the_symmetries_of_the_square() -> None:
    assert puzzles.IMAGES[0] == tuple(range(64))
    assert len(set(puzzles.IMAGES)) == 8
    assert all(sorted(image) == list(range(64)) for image in puzzles.IMAGES)


def test_both_kinds_are_spread_over_the_file(generated: list[Puzzle]) -> None:
    """Whoever takes the first rows gets the mixture."""
    parts = [generated[:200], generated[200:400], generated[400:]]
    for part in parts:
        assert 0.58 < sum(puzzle.num_turns == 1 for puzzle in part) / len(part) < 0.82
