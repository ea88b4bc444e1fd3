"""A look at a model before it is served: whether it is right over blocks, and how many of them it gets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..support import UnsupportedError, eval_mode, harmless_tokens
from .batch import DecodeBatch
from .dispatch import install
from .layers import BlockStorage, layer_windows
from .packed import PackedModel, Row, Span


@torch.no_grad()
def probe(model: Any, block_size: int) -> int:
    """Runs two short sequences through blocks, a decode step of padded rows at their end, and through the model itself.

    It catches what no attribute tells: attention outside the interface, keys changed after they were cached, positions
    that are counted rather than given.

    Returns:
        The bytes of a block.

    Raises:
        UnsupportedError: The model fails over blocks, or its logits differ.
    """
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedError("its attention does not go through transformers' AttentionInterface")
    lens = (2 * block_size + 3, 5)
    blocks = [-(-n // block_size) for n in lens]
    storage = BlockStorage(sum(blocks), block_size, layer_windows(model.config))
    install(model)
    packed = PackedModel(model, storage)
    tokens = [harmless_tokens(model, sum(lens))[-n:] for n in lens]
    rows = [Row("", ids) for ids in tokens]
    rows[0].table = np.arange(blocks[0], dtype=np.int32)[::-1].copy()  # out of order, as in a real cache
    rows[1].table = np.arange(blocks[0], sum(blocks), dtype=np.int32)

    def span(row: Row, start: int, end: int) -> Span:
        at = np.arange(start, end)
        slots = row.table[at // block_size].astype(np.int64) * block_size + at % block_size
        return Span(row, row.tokens[start:end], slots, start)

    cut = block_size + 1
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
    with eval_mode(model):
        try:
            packed.forward([span(rows[0], 0, cut), span(rows[1], 0, 2)])
            packed.forward([span(rows[1], 2, lens[1] - 1), span(rows[0], cut, lens[0] - 1)])
            last = [span(row, n - 1, n) for row, n in zip(rows, lens, strict=True)]
            step = DecodeBatch(4, max(blocks), pinned=False)
            step.write(
                [row.table for row in rows],
                np.array([s.start for s in last]),
                np.concatenate([s.tokens for s in last]),
                np.concatenate([s.slots for s in last]),
            )
            got = packed.decode(step)[:2].float()
        except UnsupportedError:
            raise
        except Exception as error:
            raise UnsupportedError(
                f"its forward pass fails over a paged cache ({type(error).__name__}: {error})"
            ) from error
        for row, logits in zip(rows, got, strict=True):
            ids = torch.from_numpy(row.tokens).to(model.device)[None]
            want = model(input_ids=ids, use_cache=False, return_dict=True).logits[0, -1].float()
            difference = (logits - want).abs().max().item()
            if not difference <= want.abs().max().item() * tolerance:  # NaN fails too
                raise UnsupportedError(
                    f"its logits over a paged cache differ by {difference:.2g}, more than rounding explains"
                )
    return storage.bytes_per_block()
