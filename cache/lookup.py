"""The lookup of a prompt's cached blocks in all groups, and the choice of blocks to allocate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from .groups import Group, Mask
from .hashing import Words
from .pool import EMPTY
from .request import Request
from .runs import MovedSpan, Span, find_runs
from .table import Ids


class GroupHit(NamedTuple):
    """The blocks that a request gets in one group.

    Attributes:
        table: Block numbers by logical block. Entries of blocks that are not cached are undefined.
        held: The cached blocks of the table, in order.
        fresh: Logical blocks to allocate, as an index of the table.
        prefix_lengths: The numbers of these logical blocks, counted from 1.
        slots: Host slots from which the first of these blocks are loaded.
    """

    table: Ids
    held: Ids
    fresh: slice | Ids
    prefix_lengths: Ids
    slots: Sequence[int] = ()


class Hit(NamedTuple):
    """The cached part of a prompt, and the blocks to allocate.

    Attributes:
        blocks: Number of complete blocks of the prefix that need not be computed.
        position: Number of tokens of the prefix that need not be computed.
        cached: All token ranges that need not be computed.
        groups: The blocks that each group gets.
        committed: Number of tokens of the prefix whose KV is cached.
        published: Number of leading logical blocks that are published in the prefix cache in all groups.
        num_tokens: Number of tokens that get blocks.
        written: Whether the last token is computed again although its KV is cached.
        attention_hit: See `Allocation.junction`.
        loads: Whether blocks are loaded from the host.
        borrowed: Blocks of other requests that are read before this step computes anything, without duplicates. They
            are held until the next commit.
        copied: Number of first tokens of the first borrowed block that are copied to the first fresh block. `position`
            includes them.
        moved: Runs of tokens that are cached in borrowed blocks. Their target slots are not known yet.
    """

    blocks: int
    position: int
    cached: list[Span]
    groups: list[GroupHit]
    committed: int
    published: int
    num_tokens: int
    written: bool = False
    attention_hit: int | None = None
    loads: bool = False
    borrowed: Ids = EMPTY
    copied: int = 0
    moved: Sequence[MovedSpan] = ()


class Reuse(Protocol):
    """A way to reuse more than the leading whole blocks of a prompt. It works with one group that needs all its blocks.

    `extend` runs in the middle of verbs and changes nothing. `published` and `removed` run when a verb is complete,
    under the manager's lock, and may run twice for the same blocks.
    """

    def extend(self, request: Request, hit: Hit, reuse: str, segments: Sequence[Span] | None) -> Hit:
        """Return the hit with `borrowed` blocks and the tokens reused from them. Change nothing but the request.

        `reuse` and `segments` are those of `CacheManager.allocate`.
        """

    def published(self, request: Request, first: int, last: int) -> None:
        """Record that logical blocks [first, last) of a request are published."""

    def removed(self, words: Words) -> None:
        """Record that blocks with these hashes, `[blocks, words]`, were evicted."""

    def clear(self) -> None:
        """Record that no block is published any more."""

    @property
    def nbytes(self) -> int:
        """Number of bytes of the index."""


def find_prefix(held: Ids, num_tokens: int, wanted: int, block_size: int) -> Hit:
    """Return a prompt's hit in one group that needs all blocks.

    `held` are the cached blocks. At least `wanted` tokens get blocks.
    """
    end = (hit := held.size) * block_size
    count = wanted if wanted > end else end
    num_blocks = -(-count // block_size)
    table = np.empty(num_blocks, np.int32)
    table[:hit] = held
    lengths = np.arange(hit + 1, num_blocks + 1, dtype=np.int32)
    return prefix_hit(hit, end, num_tokens, [GroupHit(table, held, slice(hit, num_blocks), lengths)], hit, count)


def prefix_hit(blocks: int, end: int, whole: int, groups: list[GroupHit], published: int, num_tokens: int) -> Hit:
    """Return a hit of the first `end` of `whole` tokens.

    The last token of a prompt is computed again for its logits.
    """
    position = end - 1 if 0 < end == whole else end
    cached = [(0, position)] if position else []
    return Hit(blocks, position, cached, groups, end, published, num_tokens, position < end)


def longest_hit(
    groups: Sequence[Group], resident: Sequence[Mask], num_tokens: int, block_size: int, rooms: Sequence[int] = ()
) -> int:
    """Return the number of blocks of the longest prefix behind which every group can continue; see `Group.servable`."""
    servable = np.ones(resident[0].size + 1, np.bool_)
    for i, (group, there) in enumerate(zip(groups, resident, strict=True)):
        servable &= group.servable(there, num_tokens, block_size, rooms[i] if rooms else None)
    return int(servable.nonzero()[0][-1])


def find_in_groups(
    groups: Sequence[Group], listed: Sequence[Ids], block_size: int, num_tokens: int, wanted: int, gaps: bool
) -> Hit:
    """Return the longest prefix that all groups can serve. With `gaps`, also reuse blocks behind it."""
    resident = [ids >= 0 for ids in listed]
    hit = longest_hit(groups, resident, num_tokens, block_size)
    attention = [i for i, group in enumerate(groups) if not group.holds_states]
    stateful = len(attention) < len(groups)
    attention_hit = None
    if stateful and attention:
        attention_hit = longest_hit(
            [groups[i] for i in attention], [resident[i] for i in attention], num_tokens, block_size
        )
    end = hit * block_size
    count = max(wanted, end)
    num_blocks = -(-count // block_size)
    fresh, reused = np.arange(hit, num_blocks, dtype=np.int32), EMPTY
    if gaps and not stateful:  # a recurrent state cannot jump a gap
        everywhere: Mask = np.logical_and.reduce([there[hit : count // block_size] for there in resident])
        reused = (everywhere.nonzero()[0] + hit).astype(np.int32)
        fresh = np.setdiff1d(fresh, reused, assume_unique=True)
    position = min(end, max(num_tokens - 1, 0))
    parts = []
    for group, ids in zip(groups, listed, strict=True):
        table = np.full(num_blocks, -1, np.int32)
        needed = group.needed(position, hit, block_size)
        table[needed] = ids[needed]
        table[reused] = ids[reused]
        mine = EMPTY if group.holds_states else fresh
        parts.append(GroupHit(table, table[table >= 0], mine, mine + 1))
    found = prefix_hit(hit, end, num_tokens, parts, hit, count)
    if reused.size:
        cached, written = cached_spans(hit, reused, num_tokens, block_size)
        return found._replace(cached=cached, written=written)
    if attention_hit is not None and attention_hit > hit:
        return found._replace(attention_hit=attention_hit * block_size)
    return found


def cached_spans(hit: int, reused: Ids, num_tokens: int, block_size: int) -> tuple[list[Span], bool]:
    """Return the token ranges of the `hit` leading and the `reused` blocks, and whether the last token was cut off.

    Neighbouring ranges are joined. The last token of a prompt is computed again for its logits although its KV is
    cached.
    """
    blocks = np.concatenate((np.arange(hit), reused))
    spans = [(first * block_size, end * block_size) for _, first, end in find_runs(blocks)]
    if spans[-1][1] < num_tokens:
        return spans, False
    start, end = spans.pop()
    if end - start > 1:
        spans.append((start, end - 1))
    return spans, True


def complement(spans: list[Span], num_tokens: int) -> list[Span]:
    """Return the parts of [0, num_tokens) that are not in `spans`."""
    if not spans or (len(spans) == 1 and not spans[0][0]):
        end = spans[0][1] if spans else 0
        return [(end, num_tokens)] if end < num_tokens else []
    edges = [0, *(edge for span in spans for edge in span), num_tokens]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
