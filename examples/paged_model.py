"""A few untrained layers of rotary attention over paged caches: what a model does with the blocks it is given."""

from __future__ import annotations

import torch

import pc

HEADS, KV_HEADS, DIM, SIZE, LAYERS, VOCABULARY = 8, 2, 32, 16, 4, 997
WIDTH = HEADS * DIM
device = "cuda" if torch.cuda.is_available() else "cpu"


def ints(values) -> torch.Tensor:
    """An int32 tensor."""
    return torch.as_tensor(values, dtype=torch.int32, device=device)


class PagedModel:
    """Reads token ids, writes keys and values of each layer into blocks, and returns the tokens' last hidden states."""

    def __init__(self, num_blocks: int) -> None:
        torch.manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, WIDTH, device=device)
        width = WIDTH + 2 * KV_HEADS * DIM
        self.into = torch.randn(LAYERS, WIDTH, width, device=device) / WIDTH**0.5
        self.back = torch.randn(LAYERS, WIDTH, WIDTH, device=device) / WIDTH**0.5
        # Sharper scores than untrained ones: a token attends to a few others, as in text.
        self.into[:, :, :WIDTH] *= 2
        self.inv_freq = 10000.0 ** (-torch.arange(0, DIM, 2, device=device) / DIM)
        angles = torch.arange(4096, device=device)[:, None] * self.inv_freq
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.caches = torch.zeros(LAYERS, 2, num_blocks, SIZE, KV_HEADS, DIM, device=device)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, seq_len: int):
        """Hidden states of `tokens` at `positions` of a sequence whose other tokens are in the blocks of `table`."""
        slots = table.long()[positions // SIZE] * SIZE + positions % SIZE
        starts, x = ints([0, len(tokens)]), self.embedding[tokens]
        for layer, (keys, values) in enumerate(self.caches):
            normed = torch.nn.functional.rms_norm(x, (WIDTH,)) @ self.into[layer]
            query, key, value = normed.split([WIDTH, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
            query, key, value = (part.unflatten(1, (-1, DIM)) for part in (query, key, value))
            query = pc.rope_and_cache(query, key, value, positions, self.cos_sin, keys, values, slots)
            call = (query, keys, values, table[None], ints([seq_len]), starts, positions.int(), DIM**-0.5)
            x = x + pc.sparse_gap_attention(*call).flatten(1) @ self.back[layer]
        return torch.nn.functional.rms_norm(x, (WIDTH,))
