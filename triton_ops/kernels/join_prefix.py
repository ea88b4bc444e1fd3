"""The kernel that finds where each row of joined sequences comes from: a slot of the cache, or a new token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _bisect(values, target, low, high, steps):
    """Return the first index in [low, high) whose value is above target, else high, in `steps` halvings."""
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        above = tl.load(values + middle, mask=open_, other=0) > target
        low = tl.where(open_ & (above == 0), middle + 1, low)
        high = tl.where(open_ & above, middle, high)
    return low


@triton.jit(do_not_specialize=["num_seqs", "num_rows", "max_blocks", "block_size", "seq_steps", "token_steps"])
def _join_map_kernel(
    rows,  # [num_rows] int64, written
    block_tables,  # [num_seqs, max_blocks]
    seq_ends,  # [num_seqs] int64, cumulated lengths
    query_start_loc,  # [num_seqs + 1]
    new_positions,  # [num_tokens] or None
    num_seqs, num_rows, max_blocks, block_size, seq_steps, token_steps, stride_bs, stride_bb,
    TILE: tl.constexpr,
):  # fmt: skip
    """Write the source of each row: the slot of a cached token, -2 - t for the new token t, or -1 for zeros.

    Grid (tiles of rows,).
    """
    offs = tl.cast(tl.program_id(0), tl.int64) * TILE + tl.arange(0, TILE)
    low = tl.zeros([TILE], tl.int64)
    sequence = _bisect(seq_ends, offs, low, low + num_seqs, seq_steps)
    live = (offs < num_rows) & (sequence < num_seqs)
    begin = tl.load(seq_ends + sequence - 1, mask=live & (sequence > 0), other=0)
    end = tl.load(seq_ends + sequence, mask=live, other=0)
    first_token = tl.cast(tl.load(query_start_loc + sequence, mask=live, other=0), tl.int64)
    last_token = tl.cast(tl.load(query_start_loc + sequence + 1, mask=live, other=0), tl.int64)
    position = offs - begin
    if new_positions is None:
        token = last_token - (end - offs)
        is_new = live & (token >= first_token)
    else:
        token = _bisect(new_positions, position, first_token, last_token, token_steps) - 1
        found = live & (token >= first_token)
        is_new = found & (tl.load(new_positions + token, mask=found, other=-1) == position)
    block = position // block_size
    cached = live & (is_new == 0) & (block < max_blocks)
    number = tl.cast(tl.load(block_tables + sequence * stride_bs + block * stride_bb, mask=cached, other=-1), tl.int64)
    slot = tl.where(number >= 0, number * block_size + position % block_size, -1)
    tl.store(rows + offs, tl.where(is_new, -2 - token, slot), mask=offs < num_rows)
