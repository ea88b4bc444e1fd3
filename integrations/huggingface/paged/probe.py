"""A look at a model before it is served: whether it is right over blocks, and how many of them it gets."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..support import UnsupportedError, layer_windows
from .batch import DecodeBatch
from .dispatch import install
from .generation import PackedModel, Row, Span
from .layers import BlockStorage


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    """Eval mode for a while; every submodule gets its own mode back."""
    training = [m for m in model.modules() if m.training]
    model.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True


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
    vocabulary = model.config.vocab_size
    lens = (2 * block_size + 3, 5)
    blocks = [-(-n // block_size) for n in lens]
    storage = BlockStorage(sum(blocks), block_size, layer_windows(model.config))
    install(model)
    packed = PackedModel(model, storage)
    tokens = [(np.arange(n, dtype=np.int64) * 7919 + 13 * n) % vocabulary for n in lens]
    rows = [Row("", ids) for ids in tokens]
    rows[0].table = np.arange(blocks[0], dtype=np.int32)[::-1].copy()  # out of order, as in a real cache
    rows[1].table = np.arange(blocks[0], sum(blocks), dtype=np.int32)

    def span(row: Row, start: int, end: int) -> Span:
        at = np.arange(start, end)
        slots = row.table[at // block_size].astype(np.int64) * block_size + at % block_size
        return Span(row, row.tokens[start:end], slots, start)

    cut = block_size + 1
    tolerance = 1e-3 if model.dtype == torch.float32 else 5e-2
    with _eval_mode(model):
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


def default_num_blocks(model: Any, bytes_per_block: int, block_size: int) -> int:
    """A fifth of the memory that is there, and no more than 32 of the model's longest sequences."""
    if model.device.type == "cuda":
        budget = torch.cuda.mem_get_info(model.device)[0] // 5
    elif hasattr(os, "sysconf"):
        budget = min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 5, 4 << 30)
    else:
        budget = 4 << 30
    longest = getattr(model.config, "max_position_embeddings", None) or 4096
    return max(1, min(budget // bytes_per_block, 32 * -(-longest // block_size)))
