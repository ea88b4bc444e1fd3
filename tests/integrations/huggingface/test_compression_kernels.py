"""Compressed documents over Triton's kernels: in the interpreter with TRITON_INTERPRET=1, or on a GPU."""

from __future__ import annotations

import pytest
import torch
from compression_cases import ask, assert_dense_logits, chosen_tokens
from generate_cases import LLAMA, prompt

from pc.integrations.huggingface import enable_prefix_caching


@pytest.mark.slow
@pytest.mark.interpreter
def test_logits_of_a_mask_per_head(device: torch.device) -> None:
    model, context = LLAMA.build().to(device), prompt(70)
    rows = torch.cat([context.expand(2, -1), prompt(10, 1).view(2, 5)], 1).to(device)
    with enable_prefix_caching(model, num_blocks=16) as handle, chosen_tokens() as kept:
        document = handle.compress(context, budget=0.4)
        assert_dense_logits(model, ask(model, document, rows, max_new_tokens=3), kept, 1e-4)
        again = ask(model, document, rows[:1], max_new_tokens=3)
        assert_dense_logits(model, again, kept, 1e-4)
