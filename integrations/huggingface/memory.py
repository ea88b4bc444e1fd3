"""How much memory a cache takes where nobody says."""

from __future__ import annotations

import os
from typing import Any

import torch

MOST = 4 << 30
"""Bytes that a cache takes on a CPU at most."""


def memory_budget(model: Any) -> int:
    """A fifth of a device's free memory; on a CPU a fifth of all memory, at most 4 GiB."""
    if model.device.type == "cuda":
        return int(torch.cuda.mem_get_info(model.device)[0] // 5)
    if hasattr(os, "sysconf"):
        return min(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 5, MOST)
    return MOST


def default_num_blocks(model: Any, bytes_per_block: int, block_size: int, taken: int = 0) -> int:
    """What fits into the budget beside what is taken, and no more than 32 of the model's longest sequences need."""
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None) or 4096
    return max(1, min((memory_budget(model) - taken) // max(bytes_per_block, 1), 32 * -(-longest // block_size)))
