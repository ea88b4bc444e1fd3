"""A few calls of every operator, with sequences of every length over two tiles and with every count of rows.

A comparison in a compiled kernel is one instruction for each element that a lane holds. So a boundary is only tried if
a length ends at that element. `make emulate` runs these calls, and mutate.py breaks kernels under them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from pc.triton_ops._core.cache import forget_choices

from .attention_calls import ATTENTION_CASES
from .flash_calls import FLASH_CASES
from .row_calls import ROW_CASES

CASES = {**ATTENTION_CASES, **FLASH_CASES, **ROW_CASES}

# The cases for CI, which compile in a minute and include every kernel. Others are options of the attention kernel.
SLOW = ("decode head_dim 80, rows of 7 heads", "decode softcap, slopes, sinks", "decode int8", "batch-invariant decode")
SLOW += ("prefill float32", "prefill not causal, window", "prefill softcap, slopes", "prefill e4m3")
SLOW += ("decode bf16, block 64", "prefill bf16, head_dim 128", "flash dense")
SLOW += ("latent: decode e4m3", "latent: several queries, holes", "latent: prefill", "latent: lists")
QUICK = [name for name in CASES if name.removeprefix("attention: ") not in SLOW]


def run(name: str) -> None:
    """Run a case; raise AssertionError if a result is wrong, EmulationError if a kernel made an invalid access."""
    with fresh(0):
        CASES[name]()


@contextlib.contextmanager
def fresh(seed: int) -> Iterator[None]:
    """Forget earlier choices, seed random numbers with `seed`, and fill unwritten memory with NaN."""
    torch.manual_seed(seed)
    forget_choices()
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(False)
