"""The kernel that moves rows of several tensors in one launch.

A grain is the widest power of two, up to 16 bytes, in which the rows of a tensor can be moved; see `_copy/layout.py`.
The kernel moves units of at most 8 bytes. A grain has VECTOR units.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row_offsets(index, address, VECTOR: tl.constexpr):
    """Return the offsets of rows in units: (index // block_size) * block + (index % block_size) * slot."""
    block = tl.cast(address[1], tl.int64) * VECTOR
    slot = tl.cast(address[2], tl.int64) * VECTOR
    return (index // address[0]) * block + (index % address[0]) * slot


@triton.jit
def _column_offsets(cols, inner, sizes, strides, VECTOR: tl.constexpr, NUM_OUTER: tl.constexpr):
    """Return the offsets of columns in units, in a row of NUM_OUTER strided dimensions around `inner` grains."""
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
    sources,  # tensors that source_index >= 0 indexes
    extras,  # tensors that source_index <= -2 indexes as -2 - index; None: none
    targets,  # tensors that target_index indexes
    source_index,  # [num_rows], -1 reads zeros; None: row number
    target_index,  # [num_rows], negative writes nothing; None: row number
    num_rows,
    inners, widths,  # for each tensor, contiguous grains, and grains of a row
    sizes,  # for each tensor, sizes of the outer dimensions, innermost first
    addresses,  # for each tensor: block_size, block, slot of source, extra and target
    strides,  # for each tensor: outer strides of source, extra and target
    NUM_TENSORS: tl.constexpr, NUM_OUTER: tl.constexpr, VECTOR: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_COLS: tl.constexpr,
):  # fmt: skip
    """Move rows. The grid is the tiles of all tensors, one tensor after another. Sizes and strides are in grains."""
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
                # One of the two loads was masked and gave zeros.
                data |= tl.load(pointers, mask=(live & (extra >= 0))[:, None] & mask_cols, other=0)
            offs = _column_offsets(cols, inners[t], sizes[t], strides[t][2], VECTOR[t], NUM_OUTER[t])
            pointers = targets[t] + _row_offsets(target, addresses[t][2], VECTOR[t])[:, None] + offs[None, :]
            tl.store(pointers, data, mask=live[:, None] & mask_cols)
        first += programs
