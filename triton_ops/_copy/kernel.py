"""The kernel that moves rows of several tensors in one launch, and its launcher."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import torch

from .._dispatch import Memo
from .._kernel import Grid, KernelLaunch
from .._triton import INTERPRET, require_triton, tl, triton
from .layout import MAX_OUTER, row_layout

MAX_TENSORS = 8
"""Tensors a launch: each adds a branch to the kernel, and a compiled variant per combination of units."""

TILE_UNITS = 8192 if INTERPRET else 1024
"""Units a program: eight for each of 128 threads, four 16-byte vectors, so that loads are in flight before the first
store. Sixteen single bytes a thread and more cost so many addresses that registers spill."""

NUM_WARPS = 4


@triton.jit
def _row_offsets(index, address, VECTOR: tl.constexpr):
    """Offsets of rows in units: (index // block_size) * block + (index % block_size) * slot."""
    block = tl.cast(address[1], tl.int64) * VECTOR
    slot = tl.cast(address[2], tl.int64) * VECTOR
    return (index // address[0]) * block + (index % address[0]) * slot


@triton.jit
def _column_offsets(cols, inner, sizes, strides, VECTOR: tl.constexpr, NUM_OUTER: tl.constexpr):
    """Offsets of columns in units within a row of NUM_OUTER strided dimensions around `inner` contiguous grains."""
    offsets = tl.cast(cols, tl.int64)
    if NUM_OUTER > 0:
        rest = cols // (inner * VECTOR)
        offsets = tl.cast(cols % (inner * VECTOR), tl.int64)
        for axis in tl.static_range(NUM_OUTER):
            stride = tl.cast(strides[axis], tl.int64) * VECTOR
            if axis == NUM_OUTER - 1:
                offsets += tl.cast(rest, tl.int64) * stride
            else:
                offsets += tl.cast(rest % sizes[axis], tl.int64) * stride
                rest = rest // sizes[axis]
    return offsets


@triton.jit(do_not_specialize=["num_rows", "inners", "widths", "sizes", "addresses", "strides"])
def _move_rows_kernel(
    sources,  # per tensor, what source_index >= 0 counts
    extras,  # per tensor, what source_index <= -2 counts as -2 - index; None: nothing
    targets,  # per tensor, what target_index counts
    source_index,  # [num_rows], -1 reads zeros; None: row number
    target_index,  # [num_rows], negative writes nothing; None: row number
    num_rows,
    inners, widths,  # per tensor, grains that are contiguous, and of a row
    sizes,  # per tensor, of the outer dimensions, innermost first
    addresses,  # per tensor, for source, extra and target: block_size, block, slot
    strides,  # per tensor, for source, extra and target: of the outer dimensions
    NUM_TENSORS: tl.constexpr, NUM_OUTER: tl.constexpr, VECTOR: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):  # fmt: skip
    """Grid: the tiles of all tensors, one tensor's after the other's. Sizes and strides are in grains."""
    pid = tl.program_id(0)
    first = 0
    for t in tl.static_range(NUM_TENSORS):
        width = widths[t] * VECTOR[t]
        chunks = tl.cdiv(width, TILE_COLS[t])
        programs = tl.cdiv(num_rows, TILE_ROWS[t]) * chunks
        if (pid >= first) & (pid < first + programs):
            rows = tl.cast((pid - first) // chunks, tl.int64) * TILE_ROWS[t] + tl.arange(0, TILE_ROWS[t])
            cols = (pid - first) % chunks * TILE_COLS[t] + tl.arange(0, TILE_COLS[t])
            live = rows < num_rows
            mask_cols = (cols < width)[None, :]
            source = rows
            if source_index is not None:
                source = tl.cast(tl.load(source_index + rows, mask=live, other=-1), tl.int64)
            target = rows
            if target_index is not None:
                target = tl.cast(tl.load(target_index + rows, mask=live, other=-1), tl.int64)
            live = live & (target >= 0)

            offs = _column_offsets(cols, inners[t], sizes[t], strides[t][0], VECTOR[t], NUM_OUTER[t])
            pointers = sources[t] + _row_offsets(source, addresses[t][0], VECTOR[t])[:, None] + offs[None, :]
            data = tl.load(pointers, mask=(live & (source >= 0))[:, None] & mask_cols, other=0)
            if extras is not None:
                extra = -2 - source
                offs = _column_offsets(cols, inners[t], sizes[t], strides[t][1], VECTOR[t], NUM_OUTER[t])
                pointers = extras[t] + _row_offsets(extra, addresses[t][1], VECTOR[t])[:, None] + offs[None, :]
                # One of the two loads was masked off and gave zeros.
                data |= tl.load(pointers, mask=(live & (extra >= 0))[:, None] & mask_cols, other=0)
            offs = _column_offsets(cols, inners[t], sizes[t], strides[t][2], VECTOR[t], NUM_OUTER[t])
            pointers = targets[t] + _row_offsets(target, addresses[t][2], VECTOR[t])[:, None] + offs[None, :]
            tl.store(pointers, data, mask=live[:, None] & mask_cols)
        first += programs


def tile_of(width: int, unit: int) -> tuple[int, int]:
    """Rows of a tile, and columns: the largest power of two that wastes at most an eighth of a row's last tile."""
    cols = min(triton.next_power_of_2(width), TILE_UNITS)
    while cols * unit > 512 and -(-width // cols) * cols > width + width // 8:
        cols //= 2
    return TILE_UNITS // cols, cols


def _units(grain: int) -> tuple[Any, int]:
    """Triton's integer type and how many of it make a grain."""
    if grain == 16:
        return tl.int64, 2
    return {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}[grain], 1


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
    """Copies row source_index[i] of each source to row target_index[i] of the target in the same place, other memory.

    Indices are `[num_rows]`, None for 0, 1, 2 and so on. A source index reads zeros at -1, and at -2 and below row
    -2 - index of the `extras`, by their first dimension; a negative target index writes nothing. `leading`: for sources
    and for targets 1, when an index counts their first dimension, or 2, when it counts slots. `op` is for errors.
    """
    require_triton(op)
    assert source_index is None or source_index.is_contiguous()
    assert target_index is None or target_index.is_contiguous()
    if num_rows == 0:
        return
    work: list[_Work] = []
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if target.numel():
            work.append((source, source if extras is None else extras[i], target))
    indices = [index for index in (source_index, target_index) if index is not None]
    given = [*sources, *targets, *(extras or ()), *indices]
    options = (leading, num_rows, len(sources), extras is None, source_index is None, target_index is None)
    moves = _moves.get(options, given)
    if moves is None:
        parts = [part for tensors in work for part in _split(*tensors, leading)]
        moves = [
            _choose_move(parts[start : start + MAX_TENSORS], leading, num_rows, extras is not None)
            for start in range(0, len(parts), MAX_TENSORS)
        ]
        if len(parts) == len(work):
            _moves.keep(options, given, moves)
        work = parts
    for start, move in enumerate(moves):
        now = work[start * MAX_TENSORS : (start + 1) * MAX_TENSORS]
        _launch(move, now, (source_index, target_index), extras is not None)


_Work = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


_Move = tuple[Grid, tuple[Any, ...]]
"""One launch, as far as shapes, strides and the lowest bits of addresses tell, and the integer type of each tensor."""


def _lowest_bits(*tensors: torch.Tensor) -> tuple[int, ...]:
    """What layouts are chosen by: how far each address is behind a multiple of 16 bytes."""
    return tuple([tensor.data_ptr() & 15 for tensor in tensors])


_moves: Memo[list[_Move]] = Memo(_lowest_bits)


def _split(source: torch.Tensor, extra: torch.Tensor, target: torch.Tensor, leading: tuple[int, int]) -> list[_Work]:
    """The tensors themselves, or slices of them where a row has more strided dimensions than the kernel takes."""
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


def _choose_move(work: list[_Work], leading: tuple[int, int], num_rows: int, has_extras: bool) -> _Move:
    layouts = [row_layout(tensors, (leading[0], 1 if has_extras else leading[0], leading[1])) for tensors in work]
    units = [_units(layout.grain) for layout in layouts]
    vectors = [vector for _, vector in units]
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
        tuple(tuple(tuple(address) for address in layout.addresses) for layout in layouts),
        tuple(tuple(_padded(strides, 0) for strides in layout.strides) for layout in layouts),
    )
    grid = Grid(KernelLaunch(constexprs, NUM_WARPS), (programs, 1, 1), (num_rows, *lengths))
    return grid, tuple(dtype for dtype, _ in units)


def _padded(numbers: tuple[int, ...], fill: int) -> tuple[int, ...]:
    return (*numbers, *(fill,) * (MAX_OUTER - len(numbers)))


def _launch(move: _Move, work: list[_Work], indices: tuple[torch.Tensor | None, ...], has_extras: bool) -> None:
    grid, dtypes = move
    sources, extras, targets = (
        tuple([triton.reinterpret(tensor, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)])
        for tensors in zip(*work, strict=True)
    )
    device = next((t.device for t in work[0] if t.is_cuda), torch.device("cpu"))
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        grid.run(_move_rows_kernel, (sources, extras if has_extras else None, targets, *indices))
