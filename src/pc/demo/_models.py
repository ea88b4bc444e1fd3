"""The demo's model: SmolLM2, a model from the hub or a path, or a small untrained model if SmolLM2 is not installed."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import torch

from ._trained import NAME, NoTrainedModelError, load_gguf, plain_copy, trained_model_folder

DOCUMENT = "constitution.txt"
"""The Constitution of the United States with its amendments, 7,670 words, in the public domain."""


def read_document() -> str:
    """Return the document that the demo's questions are about."""
    return files(__package__).joinpath(DOCUMENT).read_text(encoding="utf-8")


def load_model(name: str | None, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any, str, str]:
    """Return a model in eval mode, its tokenizer, its name in the results, and its description.

    Args:
        name: Hub id or path of a model or a GGUF file. None: SmolLM2-135M-Instruct, see `trained_model_folder`, or a
            small model with random weights if SmolLM2 is not installed.
        device: Device of the model.
        dtype: Dtype of its weights.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if name is not None and name.endswith(".gguf"):
        model, tokenizer = load_gguf(name, dtype)
        return plain_copy(model).to(device), tokenizer, name, name
    described = name or f"{NAME} (small and trained; its answers are printed unchanged, right or wrong)"
    try:
        place = name or trained_model_folder()
    except NoTrainedModelError as error:
        tokenizer = train_tokenizer(read_document())
        model = build_model(len(tokenizer)).to(device, dtype).eval()
        described = f"an untrained Llama with random weights: its answers mean nothing, but its speed is real ({error})"
        return model, tokenizer, "llama-25m-untrained", described
    tokenizer = AutoTokenizer.from_pretrained(place)
    model = AutoModelForCausalLM.from_pretrained(place, dtype=dtype).to(device).eval()
    return model, tokenizer, name or NAME, described


def train_tokenizer(text: str, vocab_size: int = 4096) -> Any:
    """Return a byte-level BPE tokenizer trained on `text`; training takes about a tenth of a second."""
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
    """Return a Llama of about 25 million parameters with random, seeded weights."""
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
