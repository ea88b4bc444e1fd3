"""What of a prompt is cached, over all groups, and which blocks are still to be taken."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .allocation import Span
from .content import Found
from .groups import Group, Mask
from .hashing import Node, Words
from .journal import Journal
from .pool import EMPTY, BlockPool, Index
from .request import Request
from .runs import find_runs
from .table import Ids

CANDIDATES = 32
"""Blocks of which partial reuse compares the tokens behind one prefix, the latest first: popular prefixes have many."""


class GroupHit(NamedTuple):
    """What a request gets in one group."""

    table: Ids
    """Block numbers by logical block: cached ones, and -1 or anything where there are none."""
    held: Ids
    """The cached blocks of the table, in order."""
    fresh: slice | Ids
    """Logical blocks to be taken, as an index of the table."""
    prefix_lengths: Ids
    """Of these: the same, counted from 1."""
    slots: Sequence[int] = ()
    """Host slots that the first of them are loaded from."""


class Hit(NamedTuple):
    """What of a prompt is there, and what is to be taken."""

    blocks: int
    """Complete blocks of the prefix that need not be computed."""
    position: int
    """Tokens of the prefix that need not be computed."""
    cached: list[Span]
    """All token ranges that need not be computed."""
    groups: list[GroupHit]
    committed: int
    """Tokens of the prefix whose KV is there."""
    published: int
    """Leading blocks of which all that are held are published in the prefix cache."""
    num_tokens: int
    """Tokens that get blocks."""
    written: bool = False
    """Whether the last token is computed again though its KV is there."""
    attention_hit: int | None = None
    """See `Allocation.junction`."""
    source: Ids | None = None
    """A block whose first tokens are copied to the first fresh block."""
    copied: int = 0
    """How many tokens: `position` counts them."""
    loads: bool = False
    """Whether blocks are loaded from the host."""
    moved: Sequence[Found] = ()
    """Runs of tokens that are cached elsewhere."""
    sources: Ids | None = None
    """The blocks these are in."""


def find_leading(pool: BlockPool, digests: Words, path: Sequence[Node] = ()) -> Ids:
    """The complete blocks of the first hashes, up to one that has none; first looks where `path` was last found."""
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
            # The last block first: blocks are evicted from the tail, and the whole may be long.
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


def remember_taken(path: Sequence[Node], table: Ids) -> None:
    """Leaves the blocks of a request, cached or not yet, as guesses for `find_leading`."""
    for node in reversed(path):
        if node.found is not None:
            break
        node.taken = table[node.begin : node.end].copy()


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
    """What a prompt gets in one group that needs all blocks: `held` are cached, `wanted` tokens get blocks at least."""
    end = (hit := held.size) * block_size
    count = wanted if wanted > end else end
    num_blocks = -(-count // block_size)
    table = np.empty(num_blocks, np.int32)
    table[:hit] = held
    lengths = np.arange(hit + 1, num_blocks + 1, dtype=np.int32)
    return prefix_hit(hit, end, num_tokens, [GroupHit(table, held, slice(hit, num_blocks), lengths)], hit, count)


def prefix_hit(blocks: int, end: int, whole: int, groups: list[GroupHit], published: int, num_tokens: int) -> Hit:
    """The first `end` of the `whole` tokens of a prompt are cached; the very last is computed again for its logits."""
    position = end - 1 if 0 < end == whole else end
    cached = [(0, position)] if position else []
    return Hit(blocks, position, cached, groups, end, published, num_tokens, position < end)


def longest_hit(
    groups: Sequence[Group], resident: Sequence[Mask], num_tokens: int, block_size: int, rooms: Sequence[int] = ()
) -> int:
    """Blocks of the longest prefix behind which every group can go on; see `Group.servable`."""
    servable = np.ones(resident[0].size + 1, np.bool_)
    for i, (group, there) in enumerate(zip(groups, resident, strict=True)):
        servable &= group.servable(there, num_tokens, block_size, rooms[i] if rooms else None)
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
    attention = [i for i, group in enumerate(groups) if not group.holds_states]
    stateful = len(attention) < len(groups)
    longest = None
    if stateful and attention:
        longest = longest_hit([groups[i] for i in attention], [resident[i] for i in attention], num_tokens, block_size)
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
    if longest is not None and longest > hit:
        return found._replace(attention_hit=longest * block_size)
    return found


def cached_spans(hit: int, reused: Ids, num_tokens: int, block_size: int) -> tuple[list[Span], bool]:
    """Token ranges of `hit` leading and the `reused` blocks, neighbours joined, and whether the last token was cut off.

    That of a prompt is computed again for its logits though its KV is there.
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


class PartialIndex:
    """The tokens of published blocks, by what comes before them: of a block that begins alike, that part is copied."""

    def __init__(self, block_size: int, changes: Journal) -> None:
        self._block_size = block_size
        self._changes = changes
        self._behind: dict[bytes, dict[bytes, array[int]]] = {}
        self._parent_of: dict[bytes, bytes] = {}

    def add(self, request: Request, block: int, parent: bytes | None, block_hash: bytes) -> None:
        """A logical block of a request was published behind the block `parent`, None for the first."""
        root = request.root
        if root is not None:
            parent, size = parent or root, self._block_size
            self._changes.append((self._leave_out, block_hash, parent))
            self._put(block_hash, parent, request.tokens[block * size : (block + 1) * size])

    def _put(self, block_hash: bytes, parent: bytes, tokens: array[int]) -> None:
        self._parent_of[block_hash] = parent
        self._behind.setdefault(parent, {})[block_hash] = tokens

    def _leave_out(self, block_hash: bytes, parent: bytes) -> None:
        children = self._behind.get(parent, {})
        children.pop(block_hash, None)
        if not children:
            self._behind.pop(parent, None)
        self._parent_of.pop(block_hash, None)

    def remove(self, hashes: list[bytes]) -> None:
        """Blocks are no longer published."""
        for block_hash in hashes:
            parent = self._parent_of.get(block_hash)
            if parent is not None:
                self._changes.append((self._put, block_hash, parent, self._behind[parent][block_hash]))
                self._leave_out(block_hash, parent)

    def clear(self) -> None:
        """Forgets everything."""
        self._behind.clear()
        self._parent_of.clear()

    def extend(self, pool: BlockPool, request: Request, hit: Hit) -> Hit:
        """A hit with the tokens that its first fresh block has in common with a cached one, where there is one.

        Not where blocks come back from the host, which a copy must not overwrite, and none that takes the last
        available block for itself.
        """
        (part,), root, size = hit.groups, request.root, self._block_size
        behind_a_gap = hit.cached and hit.cached[-1][1] > hit.position
        if root is None or behind_a_gap or part.slots or not part.prefix_lengths.size:
            return hit
        start, whole = hit.blocks * size, len(request.tokens)
        end = min(hit.num_tokens if hit.num_tokens < whole else whole - 1, start + size)
        parent = request.digests[hit.blocks - 1].tobytes() if hit.blocks else root
        block_hash, common = self.longest(parent, request.tokens[start:end])
        if block_hash is None:
            return hit
        source = pool.table.find(np.frombuffer(block_hash, np.uint64)[None])
        available = pool.available - pool.unreferenced(np.concatenate((part.held, source)))
        if source[0] < 0 or part.prefix_lengths.size > available:
            return hit
        reached = start + common
        return hit._replace(position=reached, cached=[(0, reached)], committed=reached, source=source, copied=common)

    def longest(self, parent: bytes, tokens: array[int]) -> tuple[bytes | None, int]:
        """The block behind a prefix that has the most leading tokens in common with `tokens`, and how many."""
        best: tuple[bytes | None, int] = (None, 0)
        asked = np.frombuffer(tokens, np.uint32) if tokens else np.empty(0, np.uint32)
        children = self._behind.get(parent, {})
        for _, (block_hash, known) in zip(range(CANDIDATES), reversed(children.items()), strict=False):
            differs = np.frombuffer(known, np.uint32)[: asked.size] != asked
            common = int(differs.argmax()) if differs.any() else asked.size
            if common > best[1]:
                best = (block_hash, common)
        return best
