"""Keys and values that lie in no cache of blocks, seen as one: views, block tables, and tensors that sizes tell."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from .._dispatch import LaunchCache, aligned, may_cache_tensors, needs_dispatcher, runs_kernels
from .._launch import Launch, current_stream
from .._triton import KERNELS_ON_CPU, require_triton

# What serving caches use, and the kernels are tuned for. Any other length is a block a token: a kernel is compiled for
# a block size, so it may not follow the length.
BLOCK_SIZE = 16
_COLUMNS_A_PROGRAM = 1024


class DenseBlocks(NamedTuple):
    """Keys and values as caches of blocks: block j of sequence b has the number b * per_sequence + j * per_block."""

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    per_sequence: int
    per_block: int
    copied: bool = False

    @property
    def size(self) -> int:
        """Tokens of a block."""
        return self.key_cache.shape[1]


def as_blocks(key: torch.Tensor, value: torch.Tensor, size: int = 0, in_place: bool = False) -> DenseBlocks:
    """Keys and values `[batch, seq_len, num_kv_heads, head_dim]` as caches with the same block numbers.

    They are views, unless no two views have the same numbers: more than one sequence, and heads before tokens in one of
    the two alone.

    Args:
        key: Any strides with a contiguous last dimension.
        value: The same; its head_dim may be another.
        size: Tokens of a block, which divide the length; 0: as kernels like it.
        in_place: Whether blocks are whole sequences then, not copies.
    """
    batch, length = key.shape[:2]
    if batch == 0 or length == 0:
        return DenseBlocks(key.reshape(0, 1, *key.shape[2:]), value.reshape(0, 1, *value.shape[2:]), 0, 0)
    if key.is_cpu and not KERNELS_ON_CPU and not size:
        return DenseBlocks(key, value, 1, 1)
    size = size or (1 if length % BLOCK_SIZE else BLOCK_SIZE)
    steps, value_steps, copied = _steps(key, size), _steps(value, size), False
    if steps[1:] != value_steps[1:]:
        if in_place:
            return DenseBlocks(key, value, 1, 1)
        key, value, copied = key.contiguous(), value.contiguous(), True
        steps, value_steps = _steps(key, size), _steps(value, size)
    return DenseBlocks(_blocks(key, size, steps), _blocks(value, size, value_steps), *steps[1:], copied)


def _steps(dense: torch.Tensor, size: int) -> tuple[int, int, int]:
    """Elements from block to block, and blocks from sequence to sequence and from one of a sequence to the next."""
    batch, length = dense.shape[:2]
    by_sequence = dense.stride(0) if batch > 1 else 0
    by_block = dense.stride(1) * size if length > size else 0
    if by_sequence == length // size * by_block:
        return by_block, length // size if batch > 1 else 0, 1
    # A compiler that looks on knows no gcd of lengths, and needs none of usual strides.
    step = by_block or by_sequence or 1
    if by_sequence % step:
        step = math.gcd(int(by_sequence), int(by_block))
    return step, by_sequence // step, by_block // step


def _blocks(dense: torch.Tensor, size: int, steps: tuple[int, int, int]) -> torch.Tensor:
    batch, length, *features = dense.shape
    step, per_sequence, per_block = steps
    count = (batch - 1) * per_sequence + (length // size - 1) * per_block + 1
    return dense.as_strided((count, size, *features), (step, *dense.stride()[1:]))


_made: LaunchCache[torch.Tensor] = LaunchCache()


def _once(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Remembers what `make(device, *sizes)` gives, which is never written to."""

    @functools.wraps(make)
    def run(device: torch.device, *sizes: int) -> torch.Tensor:
        # What a captured graph reads has to live as long as it does.
        on_gpu = device.type == "cuda"
        if not may_cache_tensors(on_gpu):
            return make(device, *sizes)
        kind = (make, device, current_stream() if on_gpu else None, *sizes)
        return _made.get_or(kind, (), lambda: make(device, *sizes))

    return run


@_once
def arange_i32(device: torch.device, count: int, step: int) -> torch.Tensor:
    """0, step, 2 * step, ...: `[count]` int32."""
    return torch.arange(count, dtype=torch.int32, device=device) * step


@_once
def full_i32(device: torch.device, count: int, value: int) -> torch.Tensor:
    """The same value: `[count]` int32."""
    return torch.full((count,), value, dtype=torch.int32, device=device)


@_once
def strided_block_table(
    device: torch.device, batch: int, length: int, per_sequence: int, per_block: int
) -> torch.Tensor:
    """Block tables `[batch, length]` int32 of `DenseBlocks`."""
    rows = torch.arange(batch, dtype=torch.int32, device=device) * per_sequence
    blocks = torch.arange(length, dtype=torch.int32, device=device) * per_block
    return rows.unsqueeze(1) + blocks


def choose_packed_tables(
    starts: torch.Tensor, num_columns: int
) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """What makes block tables `[num_seqs, num_columns]` and lengths of cu_seqlens, for packed keys as blocks of one.

    By one kernel on a device; a compiler that looks on sees PyTorch, and makes a kernel of it itself.
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
    launch = Launch(_packed_tables_kernel, constexprs, programs, (num_columns, stride), reusable=is_aligned)

    def run_kernel(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tables = starts.new_empty((batch, num_columns))
        lens = starts.new_empty(batch)
        launch((tables, lens, starts))
        return tables, lens

    return run_kernel
