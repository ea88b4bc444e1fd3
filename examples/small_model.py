"""The model of the examples: SmolLM2-135M if it is installed; otherwise, or with `--untrained`, a random Llama.

With a model of your own: `AutoModelForCausalLM.from_pretrained(name)` and `AutoTokenizer.from_pretrained(name)`.
"""

from __future__ import annotations

import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load() -> tuple[Any, Any]:
    """Return the model and its tokenizer, on a GPU if there is one."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pc.demo import NoTrainedModelError, trained_model_folder

    if "--untrained" not in sys.argv:
        try:
            folder = trained_model_folder()
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            return model.to(DEVICE).eval(), AutoTokenizer.from_pretrained(folder)
        except NoTrainedModelError as error:
            print(f"A small untrained model instead, whose words mean nothing: {error}", file=sys.stderr)
    return load_untrained()


def load_untrained() -> tuple[Any, Any]:
    """Return a small Llama with random, seeded weights, and its tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=2048, special_tokens=["<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    # A fixed text, so that numbers of tokens do not change.
    bpe.train_from_iterator([(Path(__file__).parent.parent / "LICENSE").read_text("utf-8")], trainer)
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
    return LlamaForCausalLM(config).to(DEVICE).eval(), tokenizer


def article(number: str, after: str) -> str:
    """Return an article of the Constitution of the United States, by its Roman number and the next one's."""
    text = files("pc.demo").joinpath("constitution.txt").read_text("utf-8")
    begin = text.index(f"Article {number}\n")
    return text[begin : text.index(f"Article {after}\n", begin)]
