"""Joins cached rows and new rows of all sequences: out[seq_start + t] = new[...] where t is new, else cache[slot of t].

Reads and writes the bytes of num_rows rows once. A map of 8 bytes a row is built first and shared by all tensors of a
call; nothing is computed on the rows, so every dtype is served and no bit changes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._checks import bad_argument, check_tensor, describe
from ._debug import reads_values
from ._library import operator
from ._rows import cpu, memory
from ._rows.checks import INDEX_DTYPES, check_caches, check_reach, check_rows
from ._rows.join import check_join_values, join_map_cpu, launch_join_map
from ._rows.kernel import launch_move_rows
from ._rows.ops import on_host

_FEW_SEQUENCES, _LONG_SEQUENCE = 8, 1 << 18
"""How many sequences, or bytes of one, the CPU joins one by one: a few calls each, but whole blocks and no map."""


def _check(
    caches: Sequence[torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    news: Sequence[torch.Tensor],
    query_start_loc: torch.Tensor,
    num_rows: int,
    new_positions: torch.Tensor | None,
) -> None:
    check_caches("cache", caches)
    check_tensor("seq_lens", seq_lens, 1, "[num_seqs]", INDEX_DTYPES)
    device, num_seqs = seq_lens.device, seq_lens.shape[0]
    check_tensor("block_tables", block_tables, 2, "[num_seqs, max_blocks]", INDEX_DTYPES, device)
    check_tensor("query_start_loc", query_start_loc, 1, "[num_seqs + 1]", INDEX_DTYPES, device)
    if block_tables.shape[0] != num_seqs:
        raise bad_argument("block_tables", describe(block_tables), f"{num_seqs} rows, as seq_lens has")
    if query_start_loc.shape[0] != num_seqs + 1:
        raise bad_argument("query_start_loc", describe(query_start_loc), f"{num_seqs + 1} elements, num_seqs + 1")
    if not news or not isinstance(news[0], torch.Tensor) or not news[0].dim():
        raise bad_argument("new", describe(news[0]) if news else "an empty list", "[num_tokens, *features]")
    num_tokens = news[0].shape[0]
    check_rows("new", news, caches, num_tokens, 2)
    if num_rows < 0:
        raise bad_argument("num_rows", num_rows, "at least 0")
    if new_positions is not None:
        check_tensor("new_positions", new_positions, 1, "[num_tokens]", INDEX_DTYPES, device)
        if new_positions.shape[0] != num_tokens:
            raise bad_argument("new_positions", describe(new_positions), f"{num_tokens} elements, one per row of new")
    check_reach("cache", caches[0], seq_lens, "seq_lens")
    check_reach("new", news[0], seq_lens, "seq_lens")
    if reads_values(seq_lens):
        num_blocks, block_size = caches[0].shape[:2]
        check_join_values(
            block_tables, seq_lens, query_start_loc, num_rows, num_blocks, block_size, num_tokens, new_positions
        )


def _result_device(cache: torch.Tensor, seq_lens: torch.Tensor, new: torch.Tensor) -> torch.device:
    return next((t.device for t in (seq_lens, new, cache) if t.is_cuda), seq_lens.device)


def _run_list(
    caches: Sequence[torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    news: Sequence[torch.Tensor],
    query_start_loc: torch.Tensor,
    num_rows: int,
    new_positions: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    _check(caches, block_tables, seq_lens, news, query_start_loc, num_rows, new_positions)
    block_size = caches[0].shape[1]
    device = _result_device(caches[0], seq_lens, news[0])
    outs = [memory.empty((num_rows, *new.shape[1:]), new.dtype, device) for new in news]
    if on_host(outs[0]):
        num_seqs = seq_lens.shape[0]
        few = num_seqs <= _FEW_SEQUENCES or sum(out.nbytes for out in outs) >= _LONG_SEQUENCE * num_seqs
        if new_positions is None and few:
            for cache, new, out in zip(caches, news, outs, strict=True):
                cpu.join_sequences(cache, block_tables, seq_lens.tolist(), new, query_start_loc.tolist(), out)
            return outs
        rows = join_map_cpu(block_tables, seq_lens, query_start_loc, num_rows, block_size, new_positions)
        for cache, new, out in zip(caches, news, outs, strict=True):
            cpu.join_rows(cache, new, rows, out)
        return outs
    for cache in caches:
        if not cache.is_cuda and device.type == "cuda" and not cache.is_pinned():
            raise bad_argument("cache", "pageable host memory", f"pinned memory, since other arguments are on {device}")
    news = [new if new.device == device or new.is_pinned() else new.to(device) for new in news]
    tables, lengths, starts = (t.to(device, non_blocking=True) for t in (block_tables, seq_lens, query_start_loc))
    if new_positions is not None:
        new_positions = new_positions.to(device, non_blocking=True)
    rows = launch_join_map(tables, lengths, starts, num_rows, block_size, new_positions)
    launch_move_rows("join_prefix", caches, outs, (2, 1), num_rows, source_index=rows, extras=news)
    return outs


def _run(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    new: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rows: int,
    new_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    return _run_list([cache], block_tables, seq_lens, [new], query_start_loc, num_rows, new_positions)[0]


@operator(cpu=_run, launch=_run)
def join_prefix(
    cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    new: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rows: int,
    new_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Joins the cached rows of sequences with their newly computed ones, packed one sequence after the other.

    It does not wait for the device, so a captured graph may hold it.

    Args:
        cache: `[num_blocks, block_size, *features]`, any dtype and strides; pinned when in host memory and the rest
            is on a device.
        block_tables: `[num_seqs, max_blocks]` int32 or int64; the rows of a hole (-1) are zeros.
        seq_lens: `[num_seqs]` int32 or int64, tokens of each sequence including its new ones.
        new: `[num_tokens, *features]`, cache's dtype, the new rows of all sequences.
        query_start_loc: `[num_seqs + 1]` int32 or int64, where each sequence's rows begin in `new`.
        num_rows: Rows of the result, known on the host: the sum of seq_lens, or more; the rest is zeros.
        new_positions: `[num_tokens]` int32 or int64, position of each new row in its sequence, ascending within it, for
            rows computed in gaps between cached ones; None: the last positions of the sequence.

    Returns:
        `[num_rows, *features]`, contiguous, cache's dtype, on the device of any argument that is on one.

    Raises:
        TypeError: An argument of a wrong type or dtype.
        ValueError: A wrong shape or device; on CPU tensors and in debug mode also values out of range.
        RuntimeError: A tensor that requires grad while grad mode is on.

    Examples:
        >>> cache = torch.arange(8.0).view(4, 2, 1)  # 4 blocks of 2 slots, a feature each
        >>> new = torch.tensor([[100.0], [101.0]])  # the last two tokens of a sequence of five
        >>> one = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> pc.join_prefix(cache, one(3, 1, 0)[None], one(5), new, one(0, 2), num_rows=5).T
        tensor([[  6.,   7.,   2., 100., 101.]])
    """
    return new.new_empty((num_rows, *new.shape[1:]), device=_result_device(cache, seq_lens, new))


@operator(cpu=_run_list, launch=_run_list)
def join_prefix_list(
    caches: Sequence[torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    news: Sequence[torch.Tensor],
    query_start_loc: torch.Tensor,
    num_rows: int,
    new_positions: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Joins the rows of several caches that follow the same slots, in two launches for up to eight of them.

    Args:
        caches: Like `cache` of `pc.join_prefix`; one device and the same num_blocks and block_size, features and dtypes
            of their own.
        block_tables: As in `pc.join_prefix`.
        seq_lens: As in `pc.join_prefix`.
        news: One per cache, like `new` of `pc.join_prefix`; one device.
        query_start_loc: As in `pc.join_prefix`.
        num_rows: As in `pc.join_prefix`.
        new_positions: As in `pc.join_prefix`.

    Returns:
        One tensor per cache.

    Raises:
        TypeError: As in `pc.join_prefix`.
        ValueError: As in `pc.join_prefix`, and for tensors that do not agree.
        RuntimeError: As in `pc.join_prefix`.

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
