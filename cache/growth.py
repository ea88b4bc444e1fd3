"""How a running request grows, shrinks and forks: room for its tokens, blocks of its own where it shares one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from .allocation import Allocation, Slots
from .books import Books
from .pool import BlockPool, OutOfBlocks
from .request import Request

Copies = list[list[tuple[int, int]]]
"""Per group, (source block, target block)."""


def append(books: Books, request: Request, new: array[int]) -> Allocation:
    """Adds tokens to a request: see `CacheManager.append`."""
    size, tokens = books.block_size, request.tokens
    start, old_blocks = len(tokens), request.num_blocks
    first, end = start // size, start + len(new)
    copies = None
    if end > start and (end > old_blocks * size or request.shared_tail):
        copies = _make_room(books, request, end)
    tokens.extend(new)
    num_blocks = request.num_blocks
    tables = [table[first:num_blocks].copy() for table in request.tables]
    spans = [(start, end)] if end > start else []
    return Allocation(tables, first, size, [], spans, False, copies, None, old_blocks)


def append_each(books: Books, requests: Sequence[Request], new: array[int]) -> tuple[list[Slots], Copies]:
    """Adds a token to each of several requests: slots and copies, per group."""
    size = books.block_size
    slow = [row for row in requests if row.shared_tail or len(row.tokens) % size == 0]
    for pool in books.pools:  # a copy or a new block at most for each, never both
        if len(slow) > pool.available:
            needed = sum(_blocks_to_take(books, row, len(row.tokens) + 1)[0] for row in slow)
            if needed > pool.available:
                raise OutOfBlocks(needed, pool.available)
    copies: Copies = [[] for _ in books.pools]
    for row in slow:
        for group, pairs in enumerate(_make_room(books, row, len(row.tokens) + 1)):
            copies[group] += pairs
    offsets = np.array([len(row.tokens) % size for row in requests], np.int64)
    slots: list[Slots] = []
    for group in range(len(books.pools)):
        blocks = [row.tables[group][row.num_blocks - 1] for row in requests]
        slots.append(np.array(blocks, np.int64) * size + offsets)
    for row, token in zip(requests, new, strict=True):
        row.tokens.append(token)
    return slots, copies


def rollback(books: Books, request: Request, num_tokens: int) -> None:
    """Takes back the last tokens of a request: see `CacheManager.rollback`."""
    length, size = len(request.tokens) - num_tokens, books.block_size
    committed, num_blocks = min(request.committed, length), -(-length // size)
    needed_from = [max(g.first_needed(committed, size), g.sink_blocks(size)) for g in books.groups]
    for spec, table, first in zip(books.groups, request.tables, needed_from, strict=True):
        if spec.aligned and committed < request.committed and length % size:
            raise ValueError(f"num_tokens: got {num_tokens}, needs to end at a block: the state within it is gone")
        if (table[first:num_blocks] < 0).any():
            raise ValueError(f"num_tokens: got {num_tokens}, needs less: blocks left the window for good")
    for pool, table in zip(books.pools, request.tables, strict=True):
        ids = table[num_blocks : request.num_blocks]
        pool.release(ids[ids >= 0])
    request.released = [min(pair) for pair in zip(request.released, needed_from, strict=True)]
    del request.tokens[length:]
    request.committed, request.num_blocks = committed, num_blocks
    request.published = min(request.published, committed // size)
    request.shared_tail |= length % size != 0
    if request.chain is not None and request.chain.hashed > length // size:
        request.chain = None
        books.withdraw(request)


def fork(books: Books, request: Request) -> Request:
    """A request on the same blocks: see `CacheManager.fork`."""
    for group, pool in enumerate(books.pools):
        pool.share(request.held(group))
    child = request.copy()
    child.shared_tail = request.shared_tail = True
    return child


def _blocks_to_take(books: Books, request: Request, end: int) -> tuple[int, list[bool]]:
    """Blocks of each group that a request needs to reach `end` tokens, and the groups that need one as a copy."""
    start, size = len(request.tokens), books.block_size
    first = start // size
    split = request.shared_tail and start % size != 0
    shared = [
        split and _must_copy(pool, int(table[first])) for pool, table in zip(books.pools, request.tables, strict=True)
    ]
    return -(-end // size) - request.num_blocks + any(shared), shared


def _make_room(books: Books, request: Request, end: int) -> Copies:
    """Takes the blocks that a request needs to reach `end` tokens; the copies to make."""
    start, size = len(request.tokens), books.block_size
    first, old_blocks, num_blocks = start // size, request.num_blocks, -(-end // size)
    copies: Copies = [[] for _ in books.pools]
    if num_blocks == old_blocks and not request.shared_tail:
        return copies
    needed, shared = _blocks_to_take(books, request, end)
    for pool in books.pools:
        if needed > pool.available:
            raise OutOfBlocks(needed, pool.available)
    for group, pool in enumerate(books.pools):
        table = request.grown_table(group, num_blocks)
        if shared[group]:
            copies[group].append(_replace_shared(pool, request, group, first))
        if num_blocks > old_blocks:
            lengths = np.arange(old_blocks + 1, num_blocks + 1, dtype=np.int32)
            table[old_blocks:num_blocks] = pool.take(lengths)
    request.shared_tail = False
    request.num_blocks = num_blocks
    return copies


def _replace_shared(pool: BlockPool, request: Request, group: int, block: int) -> tuple[int, int]:
    """Puts a fresh block in the place of one that others see: (its number, the fresh one's)."""
    table = request.tables[group]
    old = table[block : block + 1].copy()
    table[block] = pool.take(np.array([block + 1], np.int32))[0]
    if pool.ref_count[old[0]] > 1:
        pool.release(old)
    else:  # nobody else keeps it from being handed out before the copy is made
        request.retire(group, old)
    return int(old[0]), int(table[block])


def _must_copy(pool: BlockPool, block: int) -> bool:
    """Whether writing a block would be seen by another holder or by whoever finds it."""
    return pool.table.lists(block) or int(pool.ref_count[block]) > 1
