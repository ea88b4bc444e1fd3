"""Models that benchmarks ask: the demo's trained one with its tokenizer and a book, and Llamas of random weights."""

from __future__ import annotations

from typing import Any

import torch

from pc.demo import trained_model_folder
from pc.demo._models import read_document as read_document  # the Constitution of the United States
from pc.demo._trained import NAME as NAME  # of the trained model, in rows

from ..harness.tables import ROOT


def trained_model(dtype: torch.dtype = torch.float32) -> Any:
    """Return SmolLM2-135M-Instruct."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(trained_model_folder(), dtype=dtype).eval()


def trained_tokenizer() -> Any:
    """Return the tokenizer of the trained model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(trained_model_folder())


def alice() -> str:
    """Return the text of a book."""
    return (ROOT / "benchmarks" / "texts" / "alice.txt").read_text(encoding="utf-8")


def random_llama(
    heads: tuple[int, int], device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, **sizes: Any
) -> Any:
    """Return a Llama with seeded random weights whose answers do not end; `sizes` are fields of its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    config = LlamaConfig(eos_token_id=None, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()
