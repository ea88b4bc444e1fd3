"""Where the keys and values of a step lie in the cache, and how they are read."""

from __future__ import annotations

from .._quantize import small_e4m3
from .._triton import tl, triton
from .layout import TILE, kernel_constants

# How a cache is stored: as the query's dtype, as codes that the device converts, as uint8 codes of float8 e4m3 that are
# read as a 256th of what they stand for; E4M3_PACKED: the same, on a device of Nvidia's.
PLAIN_CACHE, NATIVE_CODES, E4M3_BITS, E4M3_PACKED = kernel_constants(0, 1, 2, 3)


@triton.jit
def _rows_of_head(
    ptr, num_blocks, stride_b, stride_t,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A head's keys or values as a matrix, and its rows from block to block: other heads' may be among them."""
    per_block = tl.cast(stride_b // stride_t, tl.int32)
    rows = tl.make_tensor_descriptor(
        ptr, shape=[(num_blocks - 1) * per_block + BLOCK_SIZE, HEAD_DIM], strides=[stride_t, 1],
        block_shape=[BLOCK_N, BLOCK_D],
    )  # fmt: skip
    return rows, per_block


@triton.jit
def _key_positions(start, second, BLOCK_N: tl.constexpr):
    """Positions of a step's keys: from `start` on, those past TILE of them from `second` on."""
    offs_n = tl.arange(0, BLOCK_N)
    t = start + offs_n
    if BLOCK_N > TILE:
        t = tl.where(offs_n < TILE, t, second + offs_n - TILE)
    return t


@triton.jit
def _blocks(source, block, stride_b):
    """Pointers to blocks; anything for block -1, of which nothing is loaded. In bytes, which takes no shift a block."""
    SIZE: tl.constexpr = source.dtype.element_ty.primitive_bitwidth // 8
    if SIZE == 1 and isinstance(stride_b, tl.tensor) and stride_b.dtype == tl.int32:
        return source + tl.cast(tl.cast(block, tl.uint32), tl.uint64) * tl.cast(tl.cast(stride_b, tl.uint32), tl.uint64)
    apart = tl.cast(tl.cast(block, tl.uint32), tl.uint64) * (tl.cast(stride_b, tl.uint64) * SIZE)
    return (source.to(tl.pointer_type(tl.uint8)) + apart).to(source.dtype)


@triton.jit
def _row_pointers(
    source, block, start, second, stride_b, stride_t,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Pointers to a step's keys or values; as much of them as can be is the same in every step."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    rows = _blocks(source, block, stride_b)
    if BLOCK_N <= TILE and BLOCK_SIZE % BLOCK_N == 0:
        rows += tl.cast(start % BLOCK_SIZE, tl.int64) * stride_t
        pointers = rows + (offs_n.to(tl.int64)[:, None] * stride_t + offs_d[None, :])
    elif TILE % BLOCK_SIZE == 0:
        pointers = rows[:, None] + ((offs_n % BLOCK_SIZE).to(tl.int64) * stride_t)[:, None] + offs_d[None, :]
    else:
        t = _key_positions(start, second, BLOCK_N)
        pointers = rows[:, None] + ((t % BLOCK_SIZE).to(tl.int64) * stride_t)[:, None] + offs_d[None, :]
    return pointers


@triton.jit
def _load_rows(
    pointers, present, dtype: tl.constexpr,
    MASKED: tl.constexpr, CODES: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys or values; 0 where they are absent."""
    offs_d = tl.arange(0, BLOCK_D)
    if MASKED:
        mask = tl.broadcast_to(present[:, None], [BLOCK_N, BLOCK_D])
        if HEAD_DIM != BLOCK_D:
            mask = mask & (offs_d[None, :] < HEAD_DIM)
        rows = tl.load(pointers, mask=mask, other=0.0)
    elif HEAD_DIM != BLOCK_D:
        rows = tl.load(pointers, mask=tl.broadcast_to(offs_d[None, :] < HEAD_DIM, [BLOCK_N, BLOCK_D]), other=0.0)
    else:
        rows = tl.load(pointers)
    if CODES >= E4M3_BITS:
        rows = small_e4m3(rows, CODES == E4M3_PACKED)
    return rows.to(dtype)
