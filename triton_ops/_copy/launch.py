"""Launches of the kernel that moves rows of several tensors at once."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence

import torch

from .._attention.constants import next_power_of_2
from .._core.cache import LaunchCache
from .._core.launch import Launch
from .._core.runtime import INTERPRET, require_triton
from .layout import MAX_OUTER, row_layout

MAX_TENSORS = 8
"""Maximum number of tensors in a launch. Each adds a branch to the kernel, and variants to compile for its units."""

TILE_UNITS = 8192 if INTERPRET else 1024
"""Units moved by a program: eight for each of 128 threads, or four 16-byte vectors.

With so few, a thread issues all loads before its first store. With sixteen or more single bytes for each thread,
addresses take so many registers that they spill.
"""

NUM_WARPS = 4


def tile_of(width: int, unit: int) -> tuple[int, int]:
    """Return rows and columns of a tile, for rows of `width` units of `unit` bytes.

    Columns are the largest power of two that wastes at most an eighth of a row, or that takes at most 512 bytes.
    """
    cols = min(next_power_of_2(width), TILE_UNITS)
    while cols * unit > 512 and -(-width // cols) * cols > width + width // 8:
        cols //= 2
    return TILE_UNITS // cols, cols


def launch_move_rows(
    op: str,
    sources: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    leading: tuple[int, int],
    num_rows: int,
    source_index: torch.Tensor | None = None,
    target_index: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] | None = None,
) -> None:
    """Copy row source_index[i] of each source to row target_index[i] of the target at the same place in `targets`.

    Args:
        op: Name of the operator, for errors.
        sources: Tensors to read.
        targets: Tensors to write. They may be the sources, but no row may be both read and written.
        leading: For sources and for targets, 1 if an index counts the first dimension, 2 if it counts slots.
        num_rows: Length of the indices.
        source_index: `[num_rows]`; None: 0, 1, 2, ... An entry of -1 reads zeros. An entry of -2 or below reads row -2
            - entry of the `extras`.
        target_index: `[num_rows]`; None: 0, 1, 2, ... A negative entry writes nothing.
        extras: Tensors whose first dimension counts rows.
    """
    require_triton(op)
    assert source_index is None or source_index.is_contiguous()
    assert target_index is None or target_index.is_contiguous()
    if num_rows == 0:
        return
    rows = zip(sources, sources if extras is None else extras, targets, strict=True)
    work = [(source, extra, target) for source, extra, target in rows if target.numel()]
    indices = [index for index in (source_index, target_index) if index is not None]
    given = [*sources, *targets, *(extras or ()), *indices]
    options = (leading, num_rows, len(sources), extras is None, source_index is None, target_index is None)
    moves, is_split = _moves.get_or(options, given, lambda: _build_moves(work, leading, num_rows, extras is not None))
    if is_split:
        work = _split_all(work, leading)
    for start, move in enumerate(moves):
        move(work[start * MAX_TENSORS : (start + 1) * MAX_TENSORS], source_index, target_index)


_Work = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Source, extra and target; without extras, the source is also the extra."""
_Move = Callable[[list[_Work], torch.Tensor | None, torch.Tensor | None], None]
"""A launch for tensors with the same shapes, strides and lowest bits of addresses, and their indices."""


_moves: LaunchCache[tuple[list[_Move], bool]] = LaunchCache()


def _split(source: torch.Tensor, extra: torch.Tensor, target: torch.Tensor, leading: tuple[int, int]) -> list[_Work]:
    """Return the tensors, or slices of them if a row has more strided dimensions than the kernel supports."""
    extra_leading = 1 if extra is not source else leading[0]
    layout = row_layout((source, extra, target), (leading[0], extra_leading, leading[1]))
    if len(layout.sizes) <= MAX_OUTER:
        return [(source, extra, target)]
    axis = next(d for d in range(target.dim() - leading[1]) if target.shape[leading[1] + d] > 1)
    parts = []
    for i in range(target.shape[leading[1] + axis]):
        part = source.select(leading[0] + axis, i)
        rest = part if extra is source else extra.select(extra_leading + axis, i)
        parts += _split(part, rest, target.select(leading[1] + axis, i), leading)
    return parts


def _split_all(work: list[_Work], leading: tuple[int, int]) -> list[_Work]:
    """Split all tensors whose rows have too many strided dimensions."""
    return [part for tensors in work for part in _split(*tensors, leading)]


def _build_moves(
    work: list[_Work], leading: tuple[int, int], num_rows: int, has_extras: bool
) -> tuple[list[_Move], bool]:
    """Return the launches for calls of this kind, each for up to MAX_TENSORS tensors, and whether tensors are split."""
    parts = _split_all(work, leading)
    groups = (parts[start : start + MAX_TENSORS] for start in range(0, len(parts), MAX_TENSORS))
    return [_build_move(group, leading, num_rows, has_extras) for group in groups], len(parts) > len(work)


def _build_move(work: list[_Work], leading: tuple[int, int], num_rows: int, has_extras: bool) -> _Move:
    """Return one launch. Its tiles and units follow from the layouts of rows."""
    import triton.language as tl
    from triton import reinterpret

    from ..kernels.move_rows import _move_rows_kernel

    layouts = [row_layout(tensors, (leading[0], 1 if has_extras else leading[0], leading[1])) for tensors in work]
    types = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64, 16: tl.int64}
    vectors = [max(1, layout.grain // 8) for layout in layouts]
    widths = [layout.inner * math.prod(layout.sizes) for layout in layouts]
    whole = [
        (width * vector, layout.grain // vector) for width, vector, layout in zip(widths, vectors, layouts, strict=True)
    ]
    tiles = [tile_of(*row) for row in whole]
    programs = sum(
        -(-num_rows // tile[0]) * -(-width // tile[1]) for tile, (width, _) in zip(tiles, whole, strict=True)
    )
    constexprs = {
        "NUM_TENSORS": len(work),
        "NUM_OUTER": tuple(len(layout.sizes) for layout in layouts),
        "VECTOR": tuple(vectors),
        "TILE_ROWS": tuple(tile[0] for tile in tiles),
        "TILE_COLS": tuple(tile[1] for tile in tiles),
    }
    lengths = (
        tuple(layout.inner for layout in layouts),
        tuple(widths),
        tuple(_padded(layout.sizes, 1) for layout in layouts),
        tuple(layout.addresses for layout in layouts),
        tuple(tuple(_padded(strides, 0) for strides in layout.strides) for layout in layouts),
    )
    launch = Launch(_move_rows_kernel, constexprs, (programs, 1, 1), (num_rows, *lengths), NUM_WARPS)
    dtypes = [types[layout.grain] for layout in layouts]

    def move(work: list[_Work], source_index: torch.Tensor | None, target_index: torch.Tensor | None) -> None:
        sources, extras, targets = (
            tuple([reinterpret(tensor, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)])
            for tensors in zip(*work, strict=True)
        )
        device = next((t.device for t in work[0] if t.is_cuda), torch.device("cpu"))
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            launch((sources, extras if has_extras else None, targets, source_index, target_index))

    return move


def _padded(numbers: tuple[int, ...], fill: int) -> tuple[int, ...]:
    """Return MAX_OUTER numbers, the missing ones filled."""
    return (*numbers, *(fill,) * (MAX_OUTER - len(numbers)))
