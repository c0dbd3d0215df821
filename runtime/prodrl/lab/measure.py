"""How many puzzles a model solves, by sampling many answers at once with transformers. Called by ``prepare``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from prodrl.lab import session, text
from prodrl.lab.puzzles import Puzzle
from prodrl.lab.session import Game, Outcome


@torch.no_grad()
def _answers(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, conversations: list[list[session.Message]]
) -> list[str]:
    """One sampled answer to each conversation."""
    prompts = [
        tokenizer.apply_chat_template(one, tools=text.TOOLS, tokenize=False, add_generation_prompt=True)
        for one in conversations
    ]
    batch = tokenizer(prompts, padding=True, padding_side="left", add_special_tokens=False, return_tensors="pt")
    made = model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=session.MAX_TOKENS
    )
    width = batch["input_ids"].shape[1]
    return [tokenizer.decode(row[width:]) for row in made]


def play_all(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, puzzles: Sequence[Puzzle], seed: int = 0
) -> list[Outcome]:
    """Play every puzzle once at temperature 1, all of them side by side."""
    torch.manual_seed(seed)
    games = [Game(puzzle) for puzzle in puzzles]
    talks = [session.opening(game) for game in games]
    outcomes: dict[int, Outcome] = {}
    while waiting := [index for index in range(len(games)) if index not in outcomes]:
        answers = _answers(model, tokenizer, [talks[index] for index in waiting])
        for index, answer in zip(waiting, answers, strict=True):
            uci = text.written_move(answer)
            result = games[index].submit(uci)
            if isinstance(result, Outcome):
                outcomes[index] = result
                continue
            assert uci is not None, "a move that goes on was read"
            call = text.call_message(uci)
            talks[index] += [call, session.reply_message(result, games[index], call["tool_calls"][0])]
    return [outcomes[index] for index in range(len(games))]


def summary(puzzles: Sequence[Puzzle], outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Shares: solved (all, and by depth), and of each way to fail."""
    figures = {"solve_rate": _share(outcomes, Outcome.SOLVED), "puzzles": float(len(outcomes))}
    for depth in sorted({puzzle.num_turns for puzzle in puzzles}):
        of_depth = [o for puzzle, o in zip(puzzles, outcomes, strict=True) if puzzle.num_turns == depth]
        figures[f"mate_in_{depth}"] = _share(of_depth, Outcome.SOLVED)
    return figures | {str(kind): _share(outcomes, kind) for kind in Outcome if kind is not Outcome.SOLVED}


def _share(outcomes: Sequence[Outcome], kind: Outcome) -> float:
    return round(sum(outcome is kind for outcome in outcomes) / max(1, len(outcomes)), 4)
