"""One puzzle as a conversation, with policies that are functions; and the evaluation suite on top of it."""

from __future__ import annotations

import json

import httpx
import pytest

from prodrl.errors import DataError
from prodrl.evaluate import suites
from prodrl.evaluate.chat import ChatClient
from prodrl.lab import session, text
from prodrl.lab.puzzles import Puzzle, write_puzzles
from prodrl.lab.session import Game, Outcome, play

ONE = Puzzle("one", "8/R7/3K4/8/8/8/5R2/3k4 b - - 0 1", ("d1c1", "a7a1"))
TWO = Puzzle("two", "8/8/8/8/8/1R6/2K4k/3R4 b - - 0 1", ("h2g2", "d1d2", "g2f1", "b3b1"))


def player(*moves: str | dict | None):
    """A policy that answers with these moves in turn; None: text without a call."""
    seen = []
    answers = iter(moves)

    async def ask(messages):
        seen.append(list(messages))
        answer = next(answers)
        if answer is None:
            return {"role": "assistant", "content": "I resign"}
        return answer if isinstance(answer, dict) else text.call_message(answer, "call-7")

    return ask, seen


def call(arguments: str, name: str = "move", times: int = 1) -> dict:
    calls = [{"id": "c", "type": "function", "function": {"name": name, "arguments": arguments}}] * times
    return {"role": "assistant", "content": None, "tool_calls": calls}


async def test_a_solved_puzzle_is_worth_one() -> None:
    ask, seen = player("a7a1")
    played = await play(ONE, ask)
    assert (played.outcome, played.reward, played.turns) == (Outcome.SOLVED, 1.0, 1)
    assert seen == [[{"role": "user", "content": "Kd6 Ra7 Rf2 kc1"}]]


async def test_two_moves_are_one_conversation() -> None:
    ask, seen = player("d1d2", "b3b1")
    played = await play(TWO, ask)
    assert (played.outcome, played.turns, played.moves) == (Outcome.SOLVED, 2, ("d1d2", "b3b1"))
    first, answer, result = seen[1]
    assert [first] == seen[0]
    assert answer["tool_calls"][0]["id"] == result["tool_call_id"] == "call-7"
    assert result["role"] == "tool"
    assert result["content"] == "g2f1 Kc2 Rb3 Rd2 kf1"


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("a7a2", Outcome.WRONG),
        ("a7b1", Outcome.ILLEGAL),
        ("h1h2", Outcome.ILLEGAL),
        ("a7a9", Outcome.MALFORMED),
        ("", Outcome.MALFORMED),
        (None, Outcome.MALFORMED),
        (call('{"uci": "a7a1"'), Outcome.MALFORMED),
        (call('{"san": "Ra1#"}'), Outcome.MALFORMED),
        (call('{"uci": 7}'), Outcome.MALFORMED),
        (call('["a7a1"]'), Outcome.MALFORMED),
        (call('{"uci": "a7a1"}', name="resign"), Outcome.MALFORMED),
        (call('{"uci": "a7a1"}', times=2), Outcome.MALFORMED),
    ],
)
async def test_anything_else_ends_it_with_nothing(answer, outcome) -> None:
    ask, seen = player(answer)
    played = await play(ONE, ask)
    assert (played.outcome, played.reward, len(seen)) == (outcome, 0.0, 1)


async def test_the_second_move_must_be_right_too() -> None:
    ask, _ = player("d1d2", "b3b2")
    played = await play(TWO, ask)
    assert (played.outcome, played.turns) == (Outcome.WRONG, 2)


def test_another_mate_is_as_good_as_the_recorded_one() -> None:
    puzzle = Puzzle("ways", "6k1/R7/1R6/8/8/8/8/K2Q4 b - - 0 1", ("g8h8", "b6b8"))
    assert Game(puzzle).submit("b6b8") is Outcome.SOLVED
    assert Game(puzzle).submit("d1d8") is Outcome.SOLVED
    assert Game(puzzle).submit("d1h5") is Outcome.WRONG


def test_a_perfect_player_solves() -> None:
    messages = session.perfect(TWO)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert json.loads(messages[3]["tool_calls"][0]["function"]["arguments"]) == {"uci": "b3b1"}


@pytest.fixture
def folder(tmp_path):
    write_puzzles(tmp_path / "puzzles.csv", [ONE, TWO])
    return tmp_path


async def test_the_suite_plays_through_chat_completions(folder) -> None:
    asked = []

    def server(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        asked.append(body)
        move = {"Kd6 Ra7 Rf2 kc1": "a7a2", "Kc2 Rb3 Rd1 kg2": "d1d2"}.get(body["messages"][-1]["content"], "b3b1")
        choice = {"index": 0, "message": text.call_message(move), "finish_reason": "tool_calls"}
        return httpx.Response(200, json={"choices": [choice]})

    suite = suites.load("prodrl.lab.suite:chess_puzzles", folder, {"max_tokens": 32})
    assert sorted(suite.items()) == ["one", "two"]
    async with httpx.AsyncClient(transport=httpx.MockTransport(server)) as http:
        client = ChatClient(http, "http://policy", "chess")
        assert await suite.play("one", client, 5) == {"solved": 0.0, "legal": 1.0, "well_formed": 1.0}
        assert await suite.play("two", client, 5) == {"solved": 1.0, "legal": 1.0, "well_formed": 1.0}
    assert [body["seed"] for body in asked] == [6, 6, 7]
    assert {(body["temperature"], body["max_tokens"]) for body in asked} == {(1.0, 32)}
    assert asked[0]["tools"][0]["function"]["name"] == "move"


async def test_a_failing_server_fails_the_session(folder) -> None:
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(400, text="no"))) as http:
        with pytest.raises(DataError):
            await suites.load("prodrl.lab.suite:chess_puzzles", folder, {}).play(
                "one", ChatClient(http, "http://policy", "chess"), 1
            )


def test_a_suite_without_its_file_says_so(tmp_path) -> None:
    with pytest.raises(DataError, match=r"puzzles\.csv"):
        suites.load("prodrl.lab.suite:chess_puzzles", tmp_path, {})


def test_a_suite_with_an_id_twice_is_refused(tmp_path) -> None:
    write_puzzles(tmp_path / "puzzles.csv", [ONE, ONE])
    with pytest.raises(DataError, match="repeats"):
        suites.load("prodrl.lab.suite:chess_puzzles", tmp_path, {})
