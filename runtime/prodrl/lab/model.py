"""The tiny model: a Qwen3 of half a million parameters, its tokenizer and its chat template.

Called by ``warm_start``. Everything is saved in Hugging Face's own formats, so that vLLM, modelopt and the trainer
take it like any other model. All linear layers have sizes that NVFP4's blocks of 16 divide.

The template writes a conversation in as few tokens as it can, and writes an answered tool call exactly as the model
wrote it: the prompt of the next turn begins with the prompt and the completion of this one, token by token.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from prodrl.lab.model_limits import CONTEXT, VOCABULARY

END = "<|im_end|>"
PAD = "<|pad|>"
ASSISTANT = "<|assistant|>"
SPECIAL = (PAD, END, "<unk>", "<|system|>", "<|tools|>", "<|user|>", ASSISTANT, "<|tool|>")
CALL_MARKS = ("<tool_call>", "</tool_call>")
_WORDS = r" ?[KQRBNPkqrbnp](?=[a-h][1-8])|[a-h][1-8]"
"""A piece's letter and a square are words of their own; what lies between them (the JSON of a call) is another."""

CHAT_TEMPLATE = (
    "{%- if tools %}<|tools|>{% for tool in tools %}{{ ' ' if not loop.first }}{{ (tool.function or tool).name }}"
    "{% endfor %}{% endif %}"
    "{%- for message in messages %}"
    "{{- '<|' + message.role + '|>' }}"
    "{%- if message.content is string %}{{ message.content }}"
    "{%- elif message.content %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{%- if message.tool_calls %}{% for call in message.tool_calls %}{% set call = call.function or call %}"
    '{{- \'<tool_call>{"name": "\' + call.name + \'", "arguments": \' }}'
    "{{- call.arguments if call.arguments is string else call.arguments | tojson }}"
    "{{- '}</tool_call>' }}"
    "{%- endfor %}{% endif %}"
    "{{- '<|im_end|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """A BPE tokenizer over printable ASCII, trained on conversations without their special tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))  # noqa: S106  (a token of text)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORDS), "isolated")
    tokenizer.decoder = decoders.Fuse()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CALL_MARKS),
        special_tokens=list(SPECIAL),
        initial_alphabet=[chr(code) for code in range(32, 127)] + ["\n"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Not "special": a client that skips special tokens must still see the call.
    spare = VOCABULARY - tokenizer.get_vocab_size() - len(CALL_MARKS)
    assert spare >= 0, "the trainer was given a smaller size"
    tokenizer.add_tokens([*CALL_MARKS, *(f"<|spare_{number}|>" for number in range(spare))])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        unk_token="<unk>",  # noqa: S106
        additional_special_tokens=[name for name in SPECIAL if name not in (END, PAD, "<unk>")],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """Fresh weights."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        attn_implementation="sdpa",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
    )
    return model


def save_model(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the bfloat16 weights, configuration, generation settings, tokenizer and template."""
    transformers.utils.logging.disable_progress_bar()
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
