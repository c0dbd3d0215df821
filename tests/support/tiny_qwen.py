"""A tiny Qwen3 with a byte tokenizer, as a Hugging Face folder: what the export and evaluation tests work on."""

from __future__ import annotations

from pathlib import Path

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def save_tiny_qwen(folder: Path, *, seed: int = 0, layers: int = 1, dtype: str = "bfloat16", tied: bool = True) -> Path:
    """Write model, tokenizer, chat template and generation defaults; hidden size 128, 258 tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    vocabulary |= {"<e>": 256, "<p>": 257}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<e>", pad_token="<p>")
    tokenizer.chat_template = CHAT_TEMPLATE
    config = Qwen3Config(
        vocab_size=258,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        eos_token_id=256,
        pad_token_id=257,
        initializer_range=0.08,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    GenerationConfig(temperature=0.7, top_k=5, do_sample=True, eos_token_id=256).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
