"""The operator that joins cached and new rows: out[seq_start + t] = new[...] if t is new, else cache[slot of t].

Use it for a stage that needs the rows of whole prompts, such as hidden states, after a step that computed only a part.
It reads and writes the bytes of num_rows token vectors once. First it builds a map with 8 bytes for each row, which all
tensors of a call share. It computes nothing on rows, so it takes every dtype and changes no bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ._copy import cpu
from ._copy.launch import launch_move_rows
from ._copy.ops import tensors_of
from ._core.cache import aligned, cached
from ._core.checks import (
    INDEX_DTYPES,
    bad_argument,
    check_caches,
    check_reachable,
    check_rows,
    check_tensor,
    describe,
    lowest_entry,
    on_host,
    reads_values,
)
from ._core.launch import Launch
from ._core.operator import operator
from .gather_blocks import gather_blocks_list

_ROWS_A_PROGRAM = 128


def _check(args: Any) -> None:
    """Check the metadata of a call, and the values where they may be read."""
    (cache_name, caches), (new_name, news), seq_lens = tensors_of(args, "cache"), tensors_of(args, "new"), args.seq_lens
    check_caches(cache_name, caches)
    check_tensor("seq_lens", seq_lens, "[num_seqs]", INDEX_DTYPES)
    device, num_seqs = seq_lens.device, seq_lens.shape[0]
    check_tensor("block_tables", args.block_tables, "[num_seqs, max_blocks]", INDEX_DTYPES, device, (num_seqs,))
    check_tensor("query_start_loc", args.query_start_loc, "[num_seqs + 1]", INDEX_DTYPES, device, (num_seqs + 1,))
    if not news or not isinstance(news[0], torch.Tensor) or not news[0].dim():
        raise bad_argument(new_name, describe(news[0]) if news else "an empty list", "[num_tokens, *features]")
    num_tokens = news[0].shape[0]
    check_rows(new_name, news, caches, num_tokens, 2)
    if args.num_rows < 0:
        raise bad_argument("num_rows", args.num_rows, "at least 0")
    if args.new_positions is not None:
        check_tensor("new_positions", args.new_positions, "[num_tokens]", INDEX_DTYPES, device, (num_tokens,))
    check_reachable(cache_name, caches[0], seq_lens, "seq_lens")
    check_reachable(new_name, news[0], seq_lens, "seq_lens")
    if reads_values(seq_lens):
        _check_values(args, caches[0], num_tokens)


def _check_values(args: Any, cache: torch.Tensor, num_tokens: int) -> None:
    """Check that values are in range, or raise ValueError. This reads them, so on a device it synchronizes."""
    num_blocks, block_size = cache.shape[:2]
    block_tables, num_rows, new_positions = args.block_tables, args.num_rows, args.new_positions
    lengths, starts = args.seq_lens.tolist(), args.query_start_loc.tolist()
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
    first = torch.arange(block_tables.shape[1], device=block_tables.device) * block_size  # of each block's positions
    lowest_entry("block_tables", block_tables[first < args.seq_lens[:, None]], num_blocks)  # nothing reads the others
    if new_positions is not None and num_tokens:
        counts = torch.tensor(queries)
        owner, limits = (
            torch.repeat_interleave(x, counts) for x in (torch.arange(len(lengths)), torch.tensor(lengths))
        )
        places = new_positions.cpu().long()[starts[0] : starts[-1]]
        if (places < 0).any() or (places >= limits).any():
            raise bad_argument("new_positions", places.tolist(), "positions within their sequences")
        if ((places.diff() <= 0) & (owner.diff() == 0)).any():
            raise bad_argument("new_positions", places.tolist(), "ascending positions within a sequence")


def launch_join_map(args: Any, block_size: int) -> torch.Tensor:
    """Return the source of each result row, `[num_rows]` int64: a slot, -2 - token of a new row, or -1 for zeros.

    A kernel computes it, without synchronizing.
    """
    block_tables, seq_lens, new_positions = args.block_tables, args.seq_lens, args.new_positions
    num_seqs, num_rows = seq_lens.shape[0], args.num_rows
    rows = torch.empty(num_rows, dtype=torch.int64, device=seq_lens.device)
    if not num_rows:
        return rows
    ends = seq_lens.cumsum(0, dtype=torch.int64)
    positions = None if new_positions is None else new_positions.contiguous()
    starts = args.query_start_loc.contiguous()
    dtypes = [None if tensor is None else tensor.dtype for tensor in (block_tables, starts, positions)]
    is_aligned = aligned(rows, block_tables, ends, starts, positions)
    launch = _build_map_launch(is_aligned, *dtypes, block_tables.stride(), rows.device)
    steps = (num_seqs.bit_length(), 0 if positions is None else positions.shape[0].bit_length())
    launch(
        (rows, block_tables, ends, starts, positions),
        None,
        (-(-num_rows // _ROWS_A_PROGRAM), 1, 1),
        (num_seqs, num_rows, block_tables.shape[1], block_size, *steps, *block_tables.stride()),
    )
    return rows


@cached
def _build_map_launch(is_aligned: bool, *kind: object) -> Launch:
    """Return the launch for calls of a kind, in which lengths do not count: the kernel is not compiled for them."""
    from .kernels.join_prefix import _join_map_kernel

    return Launch(_join_map_kernel, {"TILE": _ROWS_A_PROGRAM}, same_alignment=is_aligned)


def _result_device(cache: torch.Tensor, seq_lens: torch.Tensor, new: torch.Tensor) -> torch.device:
    """Return the GPU of the first tensor that is on one, otherwise the device of `seq_lens`."""
    return next((t.device for t in (seq_lens, new, cache) if t.is_cuda), seq_lens.device)


def _run(args: Any) -> list[torch.Tensor]:
    """Check and run a call on any device."""
    _check(args)
    (_, caches), (_, news) = tensors_of(args, "cache"), tensors_of(args, "new")
    device = _result_device(caches[0], args.seq_lens, news[0])
    outs = [cpu.empty((args.num_rows, *new.shape[1:]), new.dtype, device) for new in news]
    if on_host(outs[0]):
        for cache, new, out in zip(caches, news, outs, strict=True):
            cpu.join_sequences(args, cache, new, out)
        return outs
    for cache in caches:
        if not cache.is_cuda and device.type == "cuda" and not cache.is_pinned():
            raise bad_argument("cache", "pageable host memory", f"pinned memory, since other arguments are on {device}")
    news = [new if new.device == device or new.is_pinned() else new.to(device) for new in news]
    moved = {}
    for name in ("block_tables", "seq_lens", "query_start_loc", "new_positions"):
        if (index := getattr(args, name)) is not None:
            moved[name] = index.to(device, non_blocking=True)
    rows = launch_join_map(args._replace(**moved), caches[0].shape[1])
    launch_move_rows("join_prefix", caches, outs, (2, 1), args.num_rows, source_index=rows, extras=news)
    return outs


@operator(run=lambda args: _run(args)[0])
def join_prefix(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    new: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rows: int,
    new_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Join the cached rows of sequences with their newly computed rows, packed sequence by sequence.

    It does not synchronize, so a CUDA graph may capture it.

    Args:
        cache: `[num_blocks, block_size, *features]`, any dtype and strides. If it is in host memory and other arguments
            are on a device, it must be pinned.
        block_tables: `[num_seqs, max_blocks]` int32 or int64. -1 marks an absent block, whose rows are zeros.
            Entries after a sequence's last block are not read.
        seq_lens: `[num_seqs]` int32 or int64, the tokens of each sequence including its new ones.
        new: `[num_tokens, *features]`, the new rows of all sequences, with the cache's dtype. A kernel may read pinned
            memory after this call, so keep it until the current stream has passed the call.
        query_start_loc: `[num_seqs + 1]` int32 or int64, the first row of each sequence in `new`.
        num_rows: The rows of the result, at least the sum of seq_lens. Rows beyond the sum are zeros.
        new_positions: `[num_tokens]` int32 or int64, the position of each new row in its sequence, ascending within it,
            for rows in gaps between cached rows. None: the last positions of each sequence.

    Returns:
        `[num_rows, *features]`, contiguous, with the cache's dtype. It is on a device if any argument is.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape or device is invalid. For CPU tensors and in debug mode also: a value is out of range.
        RuntimeError: A tensor requires grad while grad mode is on.

    Examples:
        >>> cache = torch.arange(8.0).view(4, 2, 1)  # 4 blocks of 2 slots, a feature each
        >>> new = torch.tensor([[100.0], [101.0]])  # the last two tokens of a sequence of five
        >>> one = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> pc.join_prefix(cache, one(3, 1, 0)[None], one(5), new, one(0, 2), num_rows=5).T
        tensor([[  6.,   7.,   2., 100., 101.]])
    """
    return new.new_empty((num_rows, *new.shape[1:]), device=_result_device(cache, seq_lens, new))


@operator(run=_run, docs_from=(join_prefix, gather_blocks_list))
def join_prefix_list(
    caches: Sequence[torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    news: Sequence[torch.Tensor],
    query_start_loc: torch.Tensor,
    num_rows: int,
    new_positions: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Join the rows of several caches with the same slots, with two launches for up to eight caches.

    Args:
        news: A tensor of new rows for each cache, as for `pc.join_prefix`. All are on one device.

    Returns:
        One tensor for each cache.

    Examples:
        >>> hidden, gates = torch.randn(4, 2, 8), torch.randn(4, 2, 3)  # 4 blocks of 2 slots
        >>> new = [torch.randn(2, 8), torch.randn(2, 3)]
        >>> one = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> whole = pc.join_prefix_list([hidden, gates], one(3, 1, 0)[None], one(5), new, one(0, 2), num_rows=5)
        >>> [rows.shape for rows in whole]
        [torch.Size([5, 8]), torch.Size([5, 3])]
    """
    return [
        new.new_empty((num_rows, *new.shape[1:]), device=_result_device(cache, seq_lens, new))
        for cache, new in zip(caches, news, strict=True)
    ]
