"""The kernel that finds slots for new keys, the lengths that include them, and their rotary angles."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        *("num_tokens", "count", "max_blocks", "block_size", "max_positions"),
        *("stride_bt", "stride_c", "stride_s"),
    ]
)
def _append_kernel(
    slots,  # [num_tokens] int64, written
    new_lens,  # [num_tokens / count], written
    angles,  # [num_tokens, 2 * HALF], written
    lens,  # [num_tokens / count]
    first,  # [num_tokens / count], positions of the first new tokens
    tables,  # [num_tokens / count, max_blocks]
    cos, sin,  # [max_positions, HALF]
    num_tokens, count, max_blocks, block_size, max_positions,
    stride_bt, stride_c, stride_s,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute slots, lengths and angles of new keys. Grid (tiles of tokens,)."""
    token = tl.cast(tl.program_id(0), tl.int64) * TILE + tl.arange(0, TILE)
    mask = token < num_tokens
    seq = token // count
    nth = token % count
    length = tl.load(lens + seq, mask=mask, other=0)
    position = length + nth
    block = position // block_size
    is_inside = mask & (position >= 0) & (block < max_blocks)
    number = tl.cast(tl.load(tables + seq * stride_bt + block, mask=is_inside, other=-1), tl.int64)
    slot = tl.where(number >= 0, number * block_size + position % block_size, -1)
    tl.store(slots + token, slot, mask=mask)
    tl.store(new_lens + seq, length + count, mask=mask & (nth == 0))
    if HALF > 0:
        offs_h = tl.arange(0, BLOCK_H)
        row = tl.maximum(tl.load(first + seq, mask=mask, other=0) + nth, 0)
        known = (mask & (row < max_positions))[:, None] & (offs_h[None, :] < HALF)
        c = tl.load(cos + row[:, None] * stride_c + offs_h[None, :], mask=known, other=0.0)
        s = tl.load(sin + row[:, None] * stride_s + offs_h[None, :], mask=known, other=0.0)
        out = angles + token[:, None] * (2 * HALF) + offs_h[None, :]
        written = mask[:, None] & (offs_h[None, :] < HALF)
        tl.store(out, c, mask=written)
        tl.store(out + HALF, s, mask=written)
