"""A Qwen3 of half a million parameters with random weights, a byte-level tokenizer and a chat template with tools."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

EOS = "<|im_end|>"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = ("hello world, how are you?", "the move is a1b2", "one two three four", '{"name": "move", "arguments": {}}')


def write_tokenizer(folder: pathlib.Path) -> int:
    """Byte-level BPE; returns the number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[EOS, "<|im_start|>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(SENTENCES * 8, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=EOS, pad_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def write_model(folder: pathlib.Path, *, seed: int = 0, hidden: int = 128, sharpness: float = 0.1) -> pathlib.Path:
    """A servable bf16 checkpoint. ``sharpness`` scales the initial weights: larger makes peaked distributions."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    num_tokens = write_tokenizer(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=(num_tokens + 63) // 64 * 64,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        initializer_range=sharpness,
        eos_token_id=0,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    # Without it vLLM takes nothing from the model; with it the test sees that server-side defaults reach the record.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "top_k": 20}))
    return folder


_QUANTISE = """
import copy, pathlib, shutil, sys, torch
import modelopt.torch.quantization as mtq
from modelopt.torch.export import export_hf_checkpoint
from transformers import Qwen3ForCausalLM
source, target = map(pathlib.Path, sys.argv[1:])
model = Qwen3ForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
ids = torch.randint(0, 300, (4, 64), generator=torch.Generator().manual_seed(0))
with torch.inference_mode():
    mtq.quantize(model, copy.deepcopy(mtq.NVFP4_DEFAULT_CFG), forward_loop=lambda m: m(input_ids=ids))
export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=target)
for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
    shutil.copy(source / name, target / name)
"""


def write_nvfp4(source: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    """The same model quantised by nvidia-modelopt, in a process of its own because modelopt patches transformers."""
    command = [sys.executable, "-c", _QUANTISE, str(source), str(target)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
    return target
