"""The model under demonstration: one from the hub or a path, or a small one that needs no network."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import torch

DOCUMENT = "constitution.txt"
"""The Constitution of the United States with its amendments, 7,670 words, in the public domain."""


def read_document() -> str:
    """The text that the demo asks about."""
    return files(__package__).joinpath(DOCUMENT).read_text(encoding="utf-8")


def load_model(name: str | None, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer, on `device` in `dtype`, in eval mode.

    Args:
        name: Hub id or path; None builds the small default.
        device: Where the model goes.
        dtype: Of its weights.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if name is not None:
        tokenizer = AutoTokenizer.from_pretrained(name)
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).to(device).eval(), tokenizer
    tokenizer = train_tokenizer(read_document())
    return build_model(len(tokenizer)).to(device, dtype).eval(), tokenizer


def train_tokenizer(text: str, vocab_size: int = 4096) -> Any:
    """A byte-level BPE tokenizer trained on `text`; takes about a tenth of a second."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>")


def build_model(vocab_size: int) -> Any:
    """A Llama of about 25 million parameters with random, seeded weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=16384,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config)
