"""A Llama over paged caches that computes tokens anywhere in a sequence."""

from __future__ import annotations

import torch
from custom_model import BLOCK, Llama
from small_model import DEVICE


def ints(values) -> torch.Tensor:
    """Return an int32 tensor."""
    return torch.as_tensor(values, dtype=torch.int32, device=DEVICE)


class Scattered:
    """A batch of tokens at `positions` of a sequence; `table` has the blocks of its other tokens, with -1 for holes."""

    def __init__(self, positions, table, seq_len):
        self.positions, self.table = positions, table
        self.slots = table.long()[positions // BLOCK] * BLOCK + positions % BLOCK
        self.lens, self.starts = ints([seq_len]), ints([0, len(positions)])

    def attend(self, layer, q, keys, values):
        """Return a layer's attention `[tokens, heads, head_dim]` over the blocks of its cache."""
        call = (q, keys, values, self.table[None], self.lens, self.starts, self.positions.int(), q.shape[-1] ** -0.5)
        return torch.ops.pc.sparse_gap_attention(*call)


@torch.inference_mode()
def read(llama: Llama, tokens, positions, table, seq_len):
    """Compute tokens of a sequence, write them to their blocks, and return logits `[len(positions), vocabulary]`."""
    return llama.head(llama.hidden(tokens[positions], Scattered(positions, table, seq_len)))
