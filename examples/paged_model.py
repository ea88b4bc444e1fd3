"""Tokens anywhere in a sequence: what a Llama over paged caches does with the blocks it is given."""

from __future__ import annotations

import torch
from custom_model import BLOCK, Llama
from small_model import DEVICE


def ints(values) -> torch.Tensor:
    """An int32 tensor."""
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


class Scattered:
    """A batch of tokens at `positions` of a sequence whose other tokens are in the blocks of `table`, holes as -1."""

    def __init__(self, positions, table, seq_len):
        self.positions, self.table = positions, table
        self.slots = table.long()[positions // BLOCK] * BLOCK + positions % BLOCK
        self.lens, self.starts = ints([seq_len]), ints([0, len(positions)])

    def attend(self, layer, q, keys, values):
        """A layer's attention `[tokens, heads, head_dim]` over the blocks of its cache."""
        call = (q, keys, values, self.table[None], self.lens, self.starts, self.positions.int(), q.shape[-1] ** -0.5)
        return torch.ops.pc.sparse_gap_attention(*call)


@torch.inference_mode()
def read(llama: Llama, tokens, positions, table, seq_len):
    """Logits `[len(positions), vocabulary]` of those tokens of a sequence, which are written to their blocks."""
    return llama.head(llama.hidden(tokens[positions], Scattered(positions, table, seq_len)))
