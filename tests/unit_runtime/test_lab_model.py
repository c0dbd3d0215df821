"""The tiny model's formats: template, tokens, prefixes, images, sizes; and that the warm start learns."""

from __future__ import annotations

import json
import random

import chess
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from prodrl.lab import generate, measure, session, text, warm_start
from prodrl.lab import model as tiny
from prodrl.lab.puzzles import IMAGES, Puzzle
from prodrl.lab.session import Outcome
from prodrl.lab.warm_settings import WarmStart


@pytest.fixture(scope="module")
def puzzles() -> list[Puzzle]:
    return list(generate.generate(400, mate_in_one=0.6, seed=11))


@pytest.fixture(scope="module")
def saved(puzzles, tmp_path_factory):
    """A folder as the demo serves it, after a few steps, and its losses."""
    folder = tmp_path_factory.mktemp("model")
    losses: list[float] = []
    settings = WarmStart(steps=12, batch_size=32, warmup_steps=3, threads=1)
    model, tokenizer = warm_start.train(puzzles, settings, lambda _, loss: losses.append(loss))
    tiny.save_model(model, tokenizer, folder)
    return folder, losses


@pytest.fixture(scope="module")
def tokenizer(saved):
    return AutoTokenizer.from_pretrained(saved[0])


def ids_of(tokenizer, messages, **options) -> list[int]:
    return tokenizer.apply_chat_template(messages, tools=text.TOOLS, return_dict=False, **options)


def test_a_conversation_reads_as_written(tokenizer) -> None:
    messages = session.perfect(Puzzle("two", "8/8/8/8/8/1R6/2K4k/3R4 b - - 0 1", ("h2g2", "d1d2", "g2f1", "b3b1")))
    assert tokenizer.apply_chat_template(messages, tools=text.TOOLS, tokenize=False) == (
        "<|tools|>move<|user|>Kc2 Rb3 Rd1 kg2<|im_end|>"
        '<|assistant|><tool_call>{"name": "move", "arguments": {"uci": "d1d2"}}</tool_call><|im_end|>'
        "<|tool|>g2f1 Kc2 Rb3 Rd2 kf1<|im_end|>"
        '<|assistant|><tool_call>{"name": "move", "arguments": {"uci": "b3b1"}}</tool_call><|im_end|>'
    )


def test_arguments_render_alike_as_text_and_as_object(tokenizer) -> None:
    """An engine may parse a call's arguments before it renders them, or not."""
    as_text = text.call_message("a7a1")
    as_object = json.loads(json.dumps(as_text))
    as_object["tool_calls"][0]["function"]["arguments"] = {"uci": "a7a1"}
    assert ids_of(tokenizer, [as_text]) == ids_of(tokenizer, [as_object])


def test_content_may_be_parts(tokenizer) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Ka7"}]}]
    assert ids_of(tokenizer, parts) == ids_of(tokenizer, [{"role": "user", "content": "Ka7"}])


def test_the_next_prompt_begins_with_prompt_and_completion(tokenizer, puzzles) -> None:
    for puzzle in [p for p in puzzles if p.num_turns == 2][:40]:
        user, answer, result, _ = session.perfect(puzzle)
        prompt = ids_of(tokenizer, [user], add_generation_prompt=True)
        written = text.call_text(text.called_move(answer["tool_calls"][0]["function"]["arguments"]) or "")
        completion = [*tokenizer(written, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        following = ids_of(tokenizer, [user, answer, result], add_generation_prompt=True)
        assert following[: len(prompt) + len(completion)] == prompt + completion


def test_a_move_takes_few_tokens(tokenizer, puzzles) -> None:
    lengths = [len(tokenizer(text.call_text(p.moves[1]), add_special_tokens=False)["input_ids"]) + 1 for p in puzzles]
    assert max(lengths) <= 10
    for mark in (*tiny.SPECIAL, *tiny.CALL_MARKS):
        assert len(tokenizer(mark, add_special_tokens=False)["input_ids"]) == 1


def test_a_call_survives_the_removal_of_special_tokens(tokenizer) -> None:
    ids = [*tokenizer(text.call_text("c3h8"), add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text.call_text("c3h8")


def test_any_printable_text_keeps_its_meaning(tokenizer) -> None:
    said = "".join(chr(code) for code in range(32, 127)) + "\n what is mate in 2?"
    assert tokenizer.decode(tokenizer(said, add_special_tokens=False)["input_ids"]) == said


def test_every_token_id_of_the_model_is_in_the_tokenizer(saved, tokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved[0])
    assert len(tokenizer) == model.config.vocab_size == model.get_input_embeddings().weight.shape[0]


def test_the_folder_is_what_engines_want(saved) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved[0])
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.tie_word_embeddings
    assert 400_000 < model.num_parameters() < 600_000
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            assert all(size % 16 == 0 for size in weight.shape), name
    said = json.loads((saved[0] / "generation_config.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(saved[0])
    assert tokenizer.eos_token == "<|im_end|>"
    assert (said["eos_token_id"], said["temperature"], said["top_p"]) == (tokenizer.eos_token_id, 1.0, 1.0)
    assert said["top_k"] == 0


def test_the_warm_start_learns_and_repeats_itself(saved, puzzles) -> None:
    losses = saved[1]
    assert losses[0] == pytest.approx(5.5, abs=0.3)  # log 256: it knows nothing
    assert losses[-1] < 0.8 * losses[0]
    again: list[float] = []
    settings = WarmStart(steps=3, batch_size=32, warmup_steps=3, threads=1)
    warm_start.train(puzzles, settings, lambda _, loss: again.append(loss))
    assert again[0] == losses[0]


def test_encoding_in_pieces_gives_the_ids_of_the_whole(tokenizer, puzzles) -> None:
    encoder = warm_start.Encoder(tokenizer, dropout=0.0, drawn=random.Random(1))
    for puzzle in puzzles[:60]:
        conversation = warm_start.render(tokenizer, puzzle)
        ids, positions = encoder.example(conversation)
        assert ids == tokenizer(conversation, add_special_tokens=False)["input_ids"]
        spoken = tokenizer.decode([ids[position] for position in positions])
        assert spoken == "".join(text.call_text(move) + "<|im_end|>" for move in puzzle.moves[1::2])


def test_dropout_changes_the_spelling_of_moves_only(tokenizer, puzzles) -> None:
    encoder = warm_start.Encoder(tokenizer, dropout=0.5, drawn=random.Random(1))
    conversation = warm_start.render(tokenizer, puzzles[0])
    spellings = {tuple(encoder.example(conversation)[0]) for _ in range(30)}
    assert len(spellings) > 1
    assert {tokenizer.decode(list(ids)) for ids in spellings} == {conversation}


def test_the_image_of_a_conversation_is_the_conversation_of_the_image(tokenizer, puzzles) -> None:
    chosen = random.Random(5)
    for puzzle in puzzles[:80]:
        number = chosen.randrange(8)
        image = IMAGES[number]
        board = chess.Board(None)
        board.turn = chess.BLACK
        board.set_piece_map({image[s]: piece for s, piece in chess.Board(puzzle.fen).piece_map().items()})
        moves = [chess.Move.from_uci(move) for move in puzzle.moves]
        moved = tuple(chess.Move(image[m.from_square], image[m.to_square]).uci() for m in moves)
        other = Puzzle("image", board.fen(), moved)
        assert warm_start.image_text(warm_start.render(tokenizer, puzzle), number) == warm_start.render(
            tokenizer, other
        )


def test_measuring_plays_both_turns(monkeypatch, saved, tokenizer, puzzles) -> None:
    solutions = {text.board_text(p.start()): p.moves[1] for p in puzzles}
    later = {}
    for p in puzzles:
        if p.num_turns == 2:
            game = session.Game(p)
            reply = game.submit(p.moves[1])
            later[text.reply_text(str(reply), game.board)] = p.moves[3]

    def know_all(_model, _tokenizer, talks):
        return [text.call_text({**solutions, **later}[talk[-1]["content"]]) + "<|im_end|>" for talk in talks]

    monkeypatch.setattr(measure, "_answers", know_all)
    model = AutoModelForCausalLM.from_pretrained(saved[0])
    outcomes = measure.play_all(model, tokenizer, puzzles)
    assert set(outcomes) == {Outcome.SOLVED}
    assert measure.summary(puzzles, outcomes)["mate_in_2"] == 1.0


def test_measuring_samples_answers(saved, tokenizer, puzzles) -> None:
    model = AutoModelForCausalLM.from_pretrained(saved[0]).float()
    outcomes = measure.play_all(model, tokenizer, puzzles[:24], seed=2)
    assert len(outcomes) == 24
    assert outcomes == measure.play_all(model, tokenizer, puzzles[:24], seed=2)


@pytest.mark.parametrize(
    ("said", "move"),
    [
        (text.call_text("c3h8"), "c3h8"),
        (text.call_text("c3h8") + "<|im_end|>", "c3h8"),
        ("check! " + text.call_text("c3h8"), "c3h8"),
        (text.call_text("c3h8") * 2, None),
        ("<tool_call>{}</tool_call>", None),
        ('<tool_call>{"name": "move", "arguments": 3}</tool_call>', None),
        ('<tool_call>{"name": "pass", "arguments": {"uci": "c3h8"}}</tool_call>', None),
        ("c3h8", None),
    ],
)
def test_moves_are_read_from_text(said, move) -> None:
    assert text.written_move(said) == move


@pytest.mark.slow
def test_vllms_hermes_parser_reads_the_models_calls(tokenizer) -> None:
    """The oracle is the engine's own parser (imports vLLM, starts no server)."""
    parsers = pytest.importorskip("vllm.tool_parsers.hermes_tool_parser")
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    request = protocol.ChatCompletionRequest(messages=[{"role": "user", "content": "Ka7"}], tools=text.TOOLS)
    found = parsers.Hermes2ProToolParser(tokenizer).extract_tool_calls(text.call_text("c3h8"), request)
    assert found.tools_called
    assert found.content is None
    assert found.tool_calls[0].function.name == text.TOOL
    assert text.called_move(found.tool_calls[0].function.arguments) == "c3h8"
