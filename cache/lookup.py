"""What of a prompt is cached, over all groups, and which blocks are still to be taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .allocation import Span
from .groups import Group, Mask
from .hash_tree import Node
from .hashing import Words
from .pool import EMPTY, BlockPool, Index
from .runs import find_runs
from .table import Ids


class GroupHit(NamedTuple):
    """What a request gets in one group."""

    table: Ids
    """Block numbers by logical block: cached ones, and -1 or anything where there are none."""
    held: Ids
    """The cached blocks of the table, in order."""
    where: slice | Ids
    """Logical blocks to be taken afresh, as an index of the table."""
    lengths: Ids
    """Their prefix lengths: the same, counted from 1."""
    slots: Sequence[int] = ()
    """Host slots that the first of them are loaded from."""


class Hit(NamedTuple):
    """What of a prompt is there, and what is to be taken."""

    blocks: int
    """Complete blocks of the prefix that need not be computed."""
    position: int
    """Tokens of it that need not be computed."""
    cached: list[Span] | None
    """All token ranges that need not be computed, None when those before `position` are all."""
    written: bool
    """Whether the last token is computed again though its KV is there."""
    groups: list[GroupHit]
    committed: int
    """Tokens of the prefix whose KV is there."""
    published: int
    """Leading blocks of which all that are held are findable."""
    num_tokens: int
    """Tokens that get blocks."""
    contiguous: bool = True
    """Whether nothing behind the prefix is cached."""
    loading: bool = False
    """Whether blocks are loaded from the host."""
    junction: int | None = None
    """See `Allocation.junction`."""


def find_leading(pool: BlockPool, digests: Words, path: Sequence[Node] = ()) -> Ids:
    """The complete blocks of the first hashes, up to the first that has none.

    Args:
        pool: Where they may be.
        digests: The hashes of a sequence.
        path: Remembered chunks it begins with: where they were last found is tried first.
    """
    words, at, guessed = pool.words, 0, False
    parts: list[Index] = []
    for node in reversed(path):
        found = node.found
        if found is None:
            if node.taken is None:
                parts.clear()
                continue
            node.found = found = pool.index_of(node.taken)
            node.taken, guessed = None, True
        end, first = node.end, node.begin
        if type(found) is slice:
            if found.stop - found.start == end:
                first = 0
            # The last block first: blocks are given up from the tail, and the whole may be long.
            same = words.item(found.stop - 1, 0) == digests.item(end - 1, 0)
            same = same and words[found].tobytes() == digests[first:end].tobytes()
        else:
            same = words.take(found, axis=0).tobytes() == node.digests
        if not same:
            node.found = None
            parts.clear()
            continue
        if not parts:
            at = end
        parts.append(found)
        if not first:
            break
    if not parts:
        at, held = 0, EMPTY
    elif len(parts) == 1 and type(parts[0]) is slice:
        held = pool.numbers[parts[0]]
    else:
        held = np.concatenate([pool.numbers[index] for index in reversed(parts)])
    if at < len(digests):
        more = pool.table.leading(digests, at)
        if more.size:
            held, guessed = np.concatenate((held, more)) if at else more, True
    if guessed and held.size:  # a guess may have been evicted whole
        _remember(pool, path, held)
    return held


def _remember(pool: BlockPool, path: Sequence[Node], held: Ids) -> None:
    """Leaves the cached blocks that a sequence begins with as guesses for `find_leading`."""
    whole = pool.index_of(held)
    for node in path:
        if node.end > held.size:
            break
        if type(whole) is slice:
            node.found = slice(whole.start, whole.start + node.end)
        elif node.found is None:
            node.found = pool.index_of(held[node.begin : node.end])


def find_prefix(held: Ids, num_tokens: int, wanted: int, block_size: int) -> Hit:
    """What a prompt gets in one group that needs all its blocks.

    Args:
        held: The leading blocks that are cached.
        num_tokens: Of the prompt.
        wanted: Of the prompt, those that are to have blocks at least.
        block_size: Tokens a block.
    """
    hit = held.size
    end = hit * block_size
    count = wanted if wanted > end else end
    num_blocks = -(-count // block_size)
    table = np.empty(num_blocks, np.int32)
    table[:hit] = held
    lengths = np.arange(hit + 1, num_blocks + 1, dtype=np.int32)
    position = end - 1 if 0 < end == num_tokens else end
    # As tuples: the constructors of named ones are calls of their own.
    group = tuple.__new__(GroupHit, (table, held, slice(hit, num_blocks), lengths, ()))
    return tuple.__new__(Hit, (hit, position, None, position < end, [group], end, hit, count, True, False, None))


def longest_hit(
    groups: Sequence[Group],
    resident: Sequence[Mask],
    num_tokens: int,
    block_size: int,
    rooms: Sequence[int | None] | None = None,
) -> int:
    """Blocks of the longest prefix behind which every group can go on; see `Group.servable`."""
    servable = np.ones(resident[0].size + 1, np.bool_)
    for group, there, room in zip(groups, resident, rooms or [None] * len(groups), strict=True):
        servable &= group.servable(there, num_tokens, block_size, room)
    return int(servable.nonzero()[0][-1])


def find_in_groups(
    groups: Sequence[Group],
    pools: Sequence[BlockPool],
    digests: Words,
    num_tokens: int,
    wanted: int,
    block_size: int,
    gaps: bool,
) -> Hit:
    """What a prompt gets: the longest prefix that all groups can serve; with `gaps`, also blocks behind it."""
    listed = [pool.table.find(digests) for pool in pools]
    resident = [ids >= 0 for ids in listed]
    hit = longest_hit(groups, resident, num_tokens, block_size)
    stateful = any(group.holds_states for group in groups)
    junction = None
    if stateful:
        reached = [(g, there) for g, there in zip(groups, resident, strict=True) if not g.holds_states]
        if reached:
            longest = longest_hit([g for g, _ in reached], [there for _, there in reached], num_tokens, block_size)
            junction = longest * block_size if longest > hit else None
    count = max(wanted, hit * block_size)
    num_blocks = -(-count // block_size)
    reused = EMPTY
    if gaps and not stateful:  # a recurrent state cannot jump a gap
        everywhere: Mask = np.logical_and.reduce([there[hit : count // block_size] for there in resident])
        reused = (everywhere.nonzero()[0] + hit).astype(np.int32)
    position = min(hit * block_size, max(num_tokens - 1, 0))
    fresh = np.arange(hit, num_blocks, dtype=np.int32)
    if reused.size:
        fresh = np.setdiff1d(fresh, reused, assume_unique=True)
    parts = []
    for group, ids in zip(groups, listed, strict=True):
        table = np.full(num_blocks, -1, np.int32)
        needed = group.needed(position, hit, block_size)
        table[needed] = ids[needed]
        table[reused] = ids[reused]
        mine = EMPTY if group.holds_states else fresh
        parts.append(GroupHit(table, table[table >= 0], mine, mine + 1))
    end = hit * block_size
    if not reused.size:
        return Hit(hit, position, None, position < end, parts, end, hit, count, junction=junction)
    cached, written = cached_spans(hit, reused, num_tokens, block_size)
    return Hit(hit, position, cached, written, parts, end, hit, count, contiguous=False, junction=junction)


def cached_spans(hit: int, reused: Ids, num_tokens: int, block_size: int) -> tuple[list[Span], bool]:
    """Token ranges of `hit` leading and the `reused` blocks, neighbours joined, and whether the last token was cut off.

    The last token of the prompt, `num_tokens` long, is computed again for its logits though its KV is there.
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
    """What `spans` leave of [0, num_tokens)."""
    if not spans or (len(spans) == 1 and not spans[0][0]):
        end = spans[0][1] if spans else 0
        return [(end, num_tokens)] if end < num_tokens else []
    edges = [0, *(edge for span in spans for edge in span), num_tokens]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
