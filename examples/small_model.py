"""A small untrained Llama and a tokenizer, so that no example downloads anything.

With a model of your own: `AutoModelForCausalLM.from_pretrained(name)` and `AutoTokenizer.from_pretrained(name)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def load() -> tuple[Any, Any]:
    """Model and tokenizer, on a GPU where there is one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=["<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    here = Path(__file__)
    # Texts that stay as they are, whatever examples come, so that numbers of tokens do too.
    bpe.train_from_iterator([path.read_text("utf-8") for path in (here, here.parent.parent / "LICENSE")], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=None,
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return LlamaForCausalLM(config).to(device).eval(), tokenizer
