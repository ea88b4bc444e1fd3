"""Where each row of a joined output comes from: a cache slot (>= 0), a new row (-2 - row), or nowhere (-1)."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import torch

from .._checks import bad_argument
from .._launcher import MAX_REMEMBERED, KernelLaunch, aligned
from .._triton import tl, triton

_ROWS_A_PROGRAM = 128


def join_map_cpu(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rows: int,
    block_size: int,
    new_positions: torch.Tensor | None,
) -> torch.Tensor:
    """The map in PyTorch on CPU tensors; arguments as in `launch_join_map`, checked before."""
    lengths, starts = seq_lens.long(), query_start_loc.long()
    queries = starts.diff()
    ends = lengths.cumsum(0)
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(len(sequence)) - (ends - lengths)[sequence]
    rows = torch.full((num_rows,), -1, dtype=torch.int64)
    if not len(sequence):
        return rows
    block = position // block_size
    if block_tables.shape[1]:
        number = block_tables[sequence, block].long()
        rows[: len(sequence)] = torch.where(number < 0, -1, number * block_size + position % block_size)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), queries)
    tokens = torch.arange(int(starts[0]), int(starts[-1]))
    if new_positions is None:
        place = tokens - starts[:-1][owner] + (lengths - queries)[owner]
    else:
        place = new_positions[int(starts[0]) : int(starts[-1])].long()
    rows[(ends - lengths)[owner] + place] = -2 - tokens
    return rows


@triton.jit
def _bisect(values, target, low, high, steps):
    """First index in [low, high) whose value is above target, else high; `steps` halvings suffice."""
    for _ in range(steps):
        middle = (low + high) // 2
        open_ = low < high
        above = tl.load(values + middle, mask=open_, other=0) > target
        low = tl.where(open_ & (above == 0), middle + 1, low)
        high = tl.where(open_ & above, middle, high)
    return low


@triton.jit(do_not_specialize=["num_seqs", "num_rows", "max_blocks", "block_size", "seq_steps", "token_steps"])
def _join_map_kernel(
    # pointers
    rows,  # [num_rows] int64, written
    block_tables,  # [num_seqs, max_blocks]
    seq_ends,  # [num_seqs] int64, cumulated lengths
    query_start_loc,  # [num_seqs + 1]
    new_positions,  # [num_tokens] or None
    # sizes
    num_seqs,
    num_rows,
    max_blocks,
    block_size,
    seq_steps,
    token_steps,
    # strides
    stride_bs,
    stride_bb,
    TILE: tl.constexpr,
):
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


def launch_join_map(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rows: int,
    block_size: int,
    new_positions: torch.Tensor | None,
) -> torch.Tensor:
    """The map by kernel, without waiting for the device.

    Args:
        block_tables: `[num_seqs, max_blocks]`, -1 is a hole.
        seq_lens: `[num_seqs]`.
        query_start_loc: `[num_seqs + 1]`.
        num_rows: Rows of the output.
        block_size: Tokens a block.
        new_positions: `[num_tokens]`, ascending within a sequence; None: the last positions.

    Returns:
        `[num_rows]` int64.
    """
    num_seqs = seq_lens.shape[0]
    rows = torch.empty(num_rows, dtype=torch.int64, device=seq_lens.device)
    if not num_rows:
        return rows
    ends = seq_lens.cumsum(0, dtype=torch.int64)
    positions = None if new_positions is None else new_positions.contiguous()
    starts = query_start_loc.contiguous()
    launch = _join_launch(
        aligned(rows, block_tables, ends, starts, positions),
        *(None if tensor is None else tensor.dtype for tensor in (block_tables, starts, positions)),
        block_tables.stride(),
        rows.device,
    )
    launch(
        _join_map_kernel,
        (-(-num_rows // _ROWS_A_PROGRAM), 1, 1),
        rows,
        block_tables,
        ends,
        starts,
        positions,
        num_seqs,
        num_rows,
        block_tables.shape[1],
        block_size,
        num_seqs.bit_length(),
        0 if positions is None else positions.shape[0].bit_length(),
        *block_tables.stride(),
    )
    return rows


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def _join_launch(is_aligned: bool, *metadata: object) -> KernelLaunch:
    """One for all that the kernel is compiled by."""
    return KernelLaunch({"TILE": _ROWS_A_PROGRAM}, 4, None, is_aligned)


def check_join_values(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rows: int,
    num_blocks: int,
    block_size: int,
    num_tokens: int,
    new_positions: torch.Tensor | None,
) -> None:
    """Raises ValueError for values that point outside of something; reads them, so it waits for a device."""
    lengths, starts = seq_lens.tolist(), query_start_loc.tolist()
    queries = [end - begin for begin, end in itertools.pairwise(starts)]
    if starts[0] < 0 or starts[-1] > num_tokens or min(queries, default=0) < 0:
        raise bad_argument("query_start_loc", starts, f"ascending values from 0 to {num_tokens}, the new rows")
    if not lengths:
        return
    if any(length < count for length, count in zip(lengths, queries, strict=True)):
        raise bad_argument("seq_lens", "a sequence shorter than its new rows", "lengths that include the new rows")
    longest, total, most = max(lengths), sum(lengths), block_tables.shape[1] * block_size
    if longest > most:
        raise bad_argument("seq_lens", longest, f"at most {most}, what block_tables holds")
    if total > num_rows:
        raise bad_argument("num_rows", num_rows, f"at least {total}, the sum of seq_lens")
    if block_tables.numel():
        low, high = (int(bound) for bound in torch.aminmax(block_tables))
        if low < -1 or high >= num_blocks:
            raise bad_argument("block_tables", f"values from {low} to {high}", f"-1 to {num_blocks - 1}")
    if new_positions is not None and num_tokens:
        owner = np.repeat(np.arange(len(lengths)), queries)
        limits = np.repeat(lengths, queries)
        places = new_positions.cpu().numpy().astype(np.int64)[starts[0] : starts[-1]]
        if (places < 0).any() or (places >= limits).any():
            raise bad_argument("new_positions", places.tolist(), "positions within their sequences")
        if ((np.diff(places) <= 0) & (np.diff(owner) == 0)).any():
            raise bad_argument("new_positions", places.tolist(), "ascending positions within a sequence")
