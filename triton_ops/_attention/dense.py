"""Views of dense keys and values as caches of blocks, with their block tables and other small index tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch

from .._core.cache import aligned, cached, may_cache_tensors, needs_dispatcher, runs_kernels
from .._core.launch import Launch, current_stream
from .._core.runtime import KERNELS_ON_CPU, require_triton

# The block size that serving caches use and kernels are tuned for. If it does not divide the length, each token is a
# block. There are only these two sizes, because each block size needs a compiled kernel.
BLOCK_SIZE = 16
_COLUMNS_A_PROGRAM = 1024


BlockSteps = tuple[int, int]
"""Two numbers, (per_sequence, per_block). Block j of sequence b has the number b * per_sequence + j * per_block."""


def as_blocks(
    key: torch.Tensor, value: torch.Tensor, size: int = 0, in_place: bool = False
) -> tuple[torch.Tensor, torch.Tensor, BlockSteps]:
    """Return keys and values `[batch, seq_len, num_kv_heads, head_dim]` as caches with the same block numbers.

    The last result is what `strided_block_table` needs to number the blocks.

    The caches are views if views with equal block numbers exist. They do not exist if there are several sequences and
    only one of the two tensors has heads before tokens.

    Args:
        key: Keys with any strides and a contiguous last dimension.
        value: Values, likewise. Their head_dim may differ.
        size: Number of tokens in a block, a divisor of the length. 0: the size that kernels prefer.
        in_place: If there are no such views, make each sequence one block instead of copying.
    """
    batch, length = key.shape[:2]
    if batch == 0 or length == 0:
        return key.reshape(0, 1, *key.shape[2:]), value.reshape(0, 1, *value.shape[2:]), (0, 0)
    if key.is_cpu and not KERNELS_ON_CPU and not size:
        return key, value, (1, 1)
    size = size or (1 if length % BLOCK_SIZE else BLOCK_SIZE)
    steps, value_steps = _steps(key, size), _steps(value, size)
    if steps[1:] != value_steps[1:]:
        if in_place:
            return key, value, (1, 1)
        key, value = key.contiguous(), value.contiguous()
        steps, value_steps = _steps(key, size), _steps(value, size)
    return _blocks(key, size, steps), _blocks(value, size, value_steps), steps[1:]


def build_blocks(
    key: torch.Tensor, value: torch.Tensor, num_seqs: int, in_place: bool = False
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return a function that makes caches of blocks from keys and values with this metadata, with block tables.

    The caches are those of `as_blocks`. The tables are those of the first `num_seqs` sequences, `[num_seqs, length]`.
    """
    key_cache, value_cache, steps = as_blocks(key, value, in_place=in_place)
    tables = strided_block_table(key.device, num_seqs, key.shape[1] // key_cache.shape[1], *steps)
    if as_blocks(key, value, in_place=True)[2] != steps:  # there are no such views
        return lambda key, value: (*as_blocks(key, value)[:2], tables)
    views = [(cache.shape, cache.stride()) for cache in (key_cache, value_cache)]
    return lambda key, value: (key.as_strided(*views[0]), value.as_strided(*views[1]), tables)


def _steps(dense: torch.Tensor, size: int) -> tuple[int, int, int]:
    """Return (step, per_sequence, per_block).

    Blocks with consecutive numbers begin `step` elements apart. The other two are `BlockSteps`.
    """
    batch, length = dense.shape[:2]
    by_sequence = dense.stride(0) if batch > 1 else 0
    by_block = dense.stride(1) * size if length > size else 0
    if by_sequence == length // size * by_block:
        return by_block, length // size if batch > 1 else 0, 1
    # A compiler cannot compute the gcd of symbolic lengths, and usual strides do not need it.
    step = by_block or by_sequence or 1
    if by_sequence % step:
        step = math.gcd(int(by_sequence), int(by_block))
    return step, by_sequence // step, by_block // step


def _blocks(dense: torch.Tensor, size: int, steps: tuple[int, int, int]) -> torch.Tensor:
    """Return a view of dense keys or values as a cache of blocks of `size` tokens, with strides from `_steps`."""
    batch, length, *features = dense.shape
    step, per_sequence, per_block = steps
    count = (batch - 1) * per_sequence + (length // size - 1) * per_block + 1
    return dense.as_strided((count, size, *features), (step, *dense.stride()[1:]))


def _once(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Decorate `make(device, *sizes)` so that its results, which callers must not write to, are cached."""
    made = cached(lambda stream, *given: make(*given))

    @functools.wraps(make)
    def run(device: torch.device, *sizes: int) -> torch.Tensor:
        # A tensor that a captured graph reads must live as long as the graph.
        on_gpu = device.type == "cuda"
        if not may_cache_tensors(on_gpu):
            return make(device, *sizes)
        return made(current_stream() if on_gpu else None, device, *sizes)

    return run


@_once
def arange_i32(device: torch.device, count: int, step: int) -> torch.Tensor:
    """Return 0, step, 2 * step, ... as `[count]` int32."""
    return torch.arange(count, dtype=torch.int32, device=device) * step


@_once
def full_i32(device: torch.device, count: int, value: int) -> torch.Tensor:
    """Return `[count]` int32 filled with a value."""
    return torch.full((count,), value, dtype=torch.int32, device=device)


@_once
def strided_block_table(
    device: torch.device, batch: int, length: int, per_sequence: int, per_block: int
) -> torch.Tensor:
    """Return block tables `[batch, length]` int32 for blocks with these `BlockSteps`."""
    rows = torch.arange(batch, dtype=torch.int32, device=device) * per_sequence
    blocks = torch.arange(length, dtype=torch.int32, device=device) * per_block
    return rows.unsqueeze(1) + blocks


def build_packed_tables(
    starts: torch.Tensor, num_columns: int
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Return a function from cu_seqlens to block tables `[num_seqs, num_columns]` and lengths, for blocks of one key.

    On a device, one kernel makes both. Under a compiler, PyTorch operators make them, and the compiler fuses these.
    """
    batch, device, (stride,) = starts.shape[0] - 1, starts.device, starts.stride()
    columns = arange_i32(device, num_columns, 1)

    def run(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return starts.as_strided((batch, 1), (stride, 1)) + columns, starts.diff()

    if needs_dispatcher() or batch <= 0 or starts.dtype != torch.int32 or not runs_kernels([starts]):
        return run
    require_triton("flash_attn_varlen_func")
    from ..kernels.packed_tables import _packed_tables_kernel

    programs = (batch, max(1, -(-num_columns // _COLUMNS_A_PROGRAM)), 1)
    constexprs, is_aligned = {"TILE": _COLUMNS_A_PROGRAM}, aligned(starts)
    launch = Launch(_packed_tables_kernel, constexprs, programs, (num_columns, stride), same_alignment=is_aligned)

    def run_kernel(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tables = starts.new_empty((batch, num_columns))
        lens = starts.new_empty(batch)
        launch((tables, lens, starts))
        return tables, lens

    return run_kernel
