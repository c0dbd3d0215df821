"""The supervised warm start: from nothing to a model that solves about a quarter of the puzzles.

Called by ``prepare``. It trains on the very conversations that users will have, rendered by the chat template, with the
loss on the assistant's tokens. Moves are encoded with BPE dropout, so that the model knows several spellings of each:
then text that is encoded again is often not what was sampled, which is what recorded token ids are for.
"""

from __future__ import annotations

import functools
import os
import random
import re
from collections.abc import Callable, Sequence

import chess
import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from prodrl.lab import model as tiny
from prodrl.lab import session, text
from prodrl.lab.puzzles import IMAGES, Puzzle
from prodrl.lab.warm_settings import WarmStart
from prodrl.progress import check_stop

_TURN = re.compile(re.escape(tiny.ASSISTANT) + "(.*?" + re.escape(tiny.END) + ")", re.DOTALL)
_UCI = re.compile(r'(?<="uci": ")(?:[a-h][1-8]){2}')
_MARKS = re.compile("|".join(re.escape(mark) for mark in (*tiny.SPECIAL, *tiny.CALL_MARKS)))
_PIECES = re.compile(r"(?<!\w)[KQRBNPkqrbnp][a-h][1-8](?: [KQRBNPkqrbnp][a-h][1-8])+")
_NAMES = [{chess.square_name(square): chess.square_name(image[square]) for square in chess.SQUARES} for image in IMAGES]

Example = tuple[list[int], list[int]]
"""Token ids of a conversation, and the positions of those that the assistant wrote."""


def render(tokenizer: PreTrainedTokenizerFast, puzzle: Puzzle) -> str:
    """A perfect player's conversation as the model sees it."""
    rendered = tokenizer.apply_chat_template(session.perfect(puzzle), tools=text.TOOLS, tokenize=False)
    assert isinstance(rendered, str), "tokenize=False gives text"
    return rendered


def image_text(conversation: str, number: int) -> str:
    """The same conversation on a turned or mirrored board."""
    names = _NAMES[number]
    moved = text.SQUARES_IN_TEXT.sub(lambda found: names[found.group()], conversation)
    return _PIECES.sub(lambda found: " ".join(sorted(found.group().split(), key=text.piece_order)), moved)


class Encoder:
    """Conversations to examples, moves with BPE dropout.

    A square is one merge of two characters; left out with the given probability. The library's own dropout does the
    same, but cannot be seeded.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, dropout: float, drawn: random.Random) -> None:
        self._exact = functools.lru_cache(maxsize=None)(
            lambda words: tokenizer(words, add_special_tokens=False)["input_ids"]
        )
        self._dropout, self._drawn = dropout, drawn

    def _spell(self, square: str) -> list[int]:
        parts = list(square) if self._drawn.random() < self._dropout else [square]
        return [number for part in parts for number in self._exact(part)]

    def example(self, conversation: str) -> Example:
        """Encode; every piece ends at a boundary of words, so that without dropout the whole gives the same ids."""
        ids: list[int] = []
        positions: list[int] = []
        end = 0
        for turn in _TURN.finditer(conversation):
            ids += self._exact(conversation[end : turn.start(1)])
            first, spoken = len(ids), turn.group(1)
            move = _UCI.search(spoken)
            assert move is not None, "every answer is a call"
            ids += self._exact(spoken[: move.start()])
            ids += self._spell(move.group()[:2]) + self._spell(move.group()[2:])
            ids += self._exact(spoken[move.end() :])
            positions += range(first, len(ids))
            end = turn.end()
        return ids, positions


def _loss_sum(model: Qwen3ForCausalLM, examples: Sequence[Example]) -> torch.Tensor:
    """Summed negative log-likelihood of the assistant's tokens; logits exist at their positions only."""
    length = max(len(ids) for ids, _ in examples)
    padded = torch.zeros(len(examples), length, dtype=torch.long)
    for row, (ids, _) in enumerate(examples):
        padded[row, : len(ids)] = torch.tensor(ids)
    rows = torch.tensor([row for row, (_, positions) in enumerate(examples) for _ in positions])
    columns = torch.tensor([position for _, positions in examples for position in positions])
    # Padding is on the right and attention is causal, so no mask is needed.
    hidden = model.model(input_ids=padded[:, :-1], use_cache=False).last_hidden_state
    return functional.cross_entropy(model.lm_head(hidden[rows, columns - 1]), padded[rows, columns], reduction="sum")


def _rate(settings: WarmStart, step: int) -> float:
    """Warm-up, then a straight line down."""
    rising = min(1.0, (step + 1) / settings.warmup_steps)
    return settings.learning_rate * rising * (1 - (1 - settings.final_rate) * step / settings.steps)


def train(
    puzzles: Sequence[Puzzle], settings: WarmStart, on_step: Callable[[int, float], None]
) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """Make tokenizer and model.

    Args:
        puzzles: What it learns from; each also in its eight symmetric images.
        settings: Sizes and rates.
        on_step: Called after each step with its number (from 1) and its loss per token.
    """
    torch.set_num_threads(min(settings.threads, os.cpu_count() or 1))
    drawn = random.Random(settings.seed)  # noqa: S311  (not for secrecy)
    scratch = tiny.train_tokenizer([])
    conversations = [render(scratch, puzzle) for puzzle in puzzles]
    images = [image_text(one, drawn.randrange(8)) for one in conversations]
    tokenizer = tiny.train_tokenizer(words for image in images for words in _MARKS.split(image))
    model = tiny.new_model(tokenizer, settings.seed).train()
    encoder = Encoder(tokenizer, settings.bpe_dropout, drawn)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=settings.weight_decay, fused=True
    )
    for step in range(settings.steps):
        check_stop("Warm start")
        for group in optimizer.param_groups:
            group["lr"] = _rate(settings, step)
        batch = [image_text(drawn.choice(conversations), drawn.randrange(8)) for _ in range(settings.batch_size)]
        examples = [encoder.example(conversation) for conversation in batch]
        num_tokens = sum(len(positions) for _, positions in examples)
        total = 0.0
        # One pass a length: mates in one are half as long as mates in two.
        for turns in {conversation.count(tiny.ASSISTANT) for conversation in batch}:
            alike = [
                e
                for e, conversation in zip(examples, batch, strict=True)
                if conversation.count(tiny.ASSISTANT) == turns
            ]
            loss = _loss_sum(model, alike) / num_tokens
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        on_step(step + 1, total)
    return model.eval(), tokenizer
