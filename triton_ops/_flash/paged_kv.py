"""Keys and values of a batch as operators take them, and functions that reorder keys: in chunks, or from the end.

FlashAttention's masks and paddings, except windows, need no operator of their own: a block table selects the keys of a
sequence and their order. Unaligned keys are viewed with a smaller block size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch

from .._attention.checks import check_tables
from .._attention.dense import arange_i32, as_blocks
from .._core.cache import checks_values, needs_dispatcher
from .._core.checks import INT32, bad_argument, check_tensor, lowest_entry
from .arguments import known


class PagedKV(NamedTuple):
    """Keys and values as the operators take them, and the batch that reads them.

    Attributes:
        key_cache: Cache of keys, in blocks.
        value_cache: Cache of values, in blocks.
        tables: Block tables, `[batch, max_blocks]`.
        lens: `[batch]`, number of keys of each sequence.
        starts: `[batch + 1]`, start of each sequence's queries.
        max_queries: Upper bound for a sequence's queries.
        max_keys: Upper bound for a sequence's keys. None: the size of the tables.
        fewer_keys: Whether a sequence may have fewer keys than queries.
        plan: A plan for these tables and lengths. None: operators make their own.
    """

    key_cache: torch.Tensor
    value_cache: torch.Tensor
    tables: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    max_queries: int
    max_keys: int | None
    fewer_keys: bool
    plan: torch.Tensor | None = None

    @property
    def capacity(self) -> int:
        """Number of keys that a sequence's table holds."""
        return self.tables.shape[1] * self.key_cache.shape[1]

    @property
    def longest(self) -> int:
        """Maximum number of keys of a sequence."""
        return self.capacity if self.max_keys is None else self.max_keys


def sequence_of_token(starts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of packed tokens and the sequence of each; padding belongs to the last one."""
    token = arange_i32(starts.device, count, 1)
    return token, torch.searchsorted(starts[1:], token, right=True).clamp_(max=max(0, starts.shape[0] - 2))


def rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows of x at these places."""
    if x.dtype.itemsize == 1:  # no index takes float8
        return x.view(torch.uint8).index_select(0, index).view(x.dtype)
    return x.index_select(0, index)


def _in_order(keys: PagedKV, size: int, first: torch.Tensor, count: int, step: int = 1) -> PagedKV:
    """Return the keys with new tables `[batch * n, count]`, of blocks of `size` tokens.

    Each sequence becomes n sequences. `first` `[batch, n]` has the number of each new table's first block in the old
    sequence, in units of `size` tokens. The blocks `first + step`, `first + 2 * step` and so on follow. Blocks before
    the old sequence's first or after its table's last are absent. The caller must change the lengths and the starts of
    queries.
    """
    blocks_each = keys.key_cache.shape[1] // size
    key_cache, value_cache, (per_sequence, per_block) = as_blocks(keys.key_cache, keys.value_cache, size)
    unit = first.unsqueeze(2) + arange_i32(first.device, count, step)
    columns = unit.div(blocks_each, rounding_mode="floor")
    tables = torch.full_like(unit, -1)
    if keys.tables.shape[1]:
        inside = columns.clamp(0, keys.tables.shape[1] - 1)
        found = keys.tables.gather(1, inside.flatten(1).long()).view_as(unit)
        places = found * per_sequence + unit.remainder(blocks_each) * per_block
        tables = torch.where((columns == inside) & (found >= 0), places, tables)
    return keys._replace(key_cache=key_cache, value_cache=value_cache, tables=tables.flatten(0, 1), plan=None)


def check_lens(keys: PagedKV) -> None:
    """Check lengths and block numbers. Callers do this before they change them, so that errors show the user's."""
    if checks_values(keys.lens):
        lowest_entry("seq_lens", keys.lens, keys.longest + 1, least=0)
        check_tables(keys.tables, keys.lens.tolist(), keys.key_cache.shape[1], keys.key_cache.shape[0])


def check_used(name: str, used: torch.Tensor | None, starts_name: str, starts: torch.Tensor, count: int) -> None:
    """Check, where values may be read, that sequences lie in `count` packed tokens and use no token of the next one."""
    if not checks_values(starts):
        return
    lens = starts.diff()
    if starts.min() < 0 or starts[-1] > count or (lens < 0).any():
        raise bad_argument(starts_name, starts.tolist()[:16], f"ascending from 0 to at most {count}")
    if used is not None and ((used < 0) | (used > lens)).any():
        raise bad_argument(name, used.tolist()[:16], f"0 to the sequences' lengths, {lens.tolist()[:16]}")


def with_holes(keys: PagedKV) -> PagedKV:
    """Return the keys with absent blocks before them, so that no sequence has more queries than keys."""
    check_lens(keys)
    size = keys.key_cache.shape[1]
    holes = -(-keys.max_queries // size)
    tables = torch.nn.functional.pad(keys.tables, (holes, 0), value=-1)
    return keys._replace(
        tables=tables, lens=keys.lens + holes * size, max_keys=keys.longest + holes * size, fewer_keys=False, plan=None
    )


def without_leftpad(keys: PagedKV, leftpad: torch.Tensor) -> PagedKV:
    """Return the keys without the padding before each sequence."""
    check_lens(keys)
    leftpad = leftpad.clamp(min=0)  # a negative padding counts as 0
    found = _in_order(keys, 1, leftpad.unsqueeze(1), keys.capacity)
    return found._replace(lens=keys.lens - leftpad)


def in_chunks(keys: PagedKV, chunk: int, causal: bool) -> PagedKV:
    """Return each chunk of keys as a sequence, to which only the chunk's own queries attend.

    Chunk i holds the `chunk` positions from i * chunk on. A query at a negative position attends to nothing.
    """
    if (causal or not keys.fewer_keys) and known(chunk >= keys.longest):
        return keys
    check_lens(keys)
    most = keys.max_queries
    count = torch.sym_max(1, (most + chunk - 2) // chunk + 1)  # chunks that a sequence's queries are in
    first = keys.lens - keys.starts.diff()
    begins = first.div(chunk, rounding_mode="floor").unsqueeze(1) + arange_i32(first.device, count, 1)
    size = 1 if needs_dispatcher() else math.gcd(chunk, keys.key_cache.shape[1])
    found = _in_order(keys, size, begins * (chunk // size), torch.sym_min(chunk // size, -(-keys.longest // size)))
    lens = (keys.lens.unsqueeze(1) - begins * chunk).clamp(0, chunk).masked_fill(begins < 0, 0)
    to = (begins * chunk - first.unsqueeze(1)).clamp(min=0)
    starts = torch.minimum(keys.starts[:-1, None] + to, keys.starts[1:, None])
    return found._replace(
        lens=lens.flatten(),
        starts=torch.cat((starts.flatten(), keys.starts[-1:])),
        max_queries=torch.sym_min(most, chunk),
        max_keys=torch.sym_min(chunk, keys.longest),
    )


def mirrored(keys: PagedKV, count: int) -> tuple[PagedKV, torch.Tensor]:
    """Return the keys after each query's position, in reverse order, and the new place of each of `count` queries.

    In reverse order, the keys after position p come before p, so a causal mask selects them. Each key is a separate
    block; the first block is absent.
    """
    check_lens(keys)
    token, sequence = sequence_of_token(keys.starts, count)
    first, last = keys.starts[:-1].index_select(0, sequence), keys.starts[1:].index_select(0, sequence)
    places = torch.where(token < last, first + last - 1 - token, token)  # padding stays where it is
    most = keys.max_queries
    found = _in_order(keys, 1, keys.lens.unsqueeze(1) - 1, most - 1, -1)
    tables = torch.nn.functional.pad(found.tables, (1, 0), value=-1)
    lens = keys.starts.diff()
    return found._replace(tables=tables, lens=lens, max_keys=most, fewer_keys=False), places


Pack = Callable[[torch.Tensor], torch.Tensor]
Unpack = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def pack_used(count: int, starts: torch.Tensor, used: torch.Tensor) -> tuple[torch.Tensor, Pack, Unpack]:
    """Pack the first queries of each sequence, as FlashAttention 3's seqused_q says.

    Args:
        count: Number of tokens in the packed queries.
        starts: `[batch + 1]` int32, where each sequence's queries begin.
        used: `[batch]` int32, how many of them are used.

    Returns:
        The starts of the used queries. A function that packs queries; rows after the used ones are arbitrary. A
        function that puts out and lse back to the places of all queries; unused ones get 0 and -inf.
    """
    check_tensor("seqused_q", used, "[batch]", INT32, starts.device, (starts.shape[0] - 1,))
    check_used("seqused_q", used, "cu_seqlens_q", starts, count)
    packed_starts = torch.nn.functional.pad(used.cumsum(0, dtype=torch.int32), (1, 0))
    (token, new), (_, old) = sequence_of_token(packed_starts, count), sequence_of_token(starts, count)
    source = (token - packed_starts[new] + starts[new]).clamp_(0, max(0, count - 1))
    places = token - starts[old] + packed_starts[old]
    unused = places >= packed_starts[old + 1]
    places.clamp_(0, max(0, count - 1))

    def pack(q: torch.Tensor) -> torch.Tensor:
        return rows(q, source)

    def unpack(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = out.index_select(0, places).masked_fill_(unused[:, None, None], 0.0)
        return out, lse.index_select(1, places).masked_fill_(unused, -torch.inf)

    return packed_starts, pack, unpack
