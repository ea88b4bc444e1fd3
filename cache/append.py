"""Appending to a running request: blocks for its new tokens, one of its own where it shares the last one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from .allocation import Allocation
from .pool import BlockPool, OutOfBlocks
from .request import Request
from .runs import Slots
from .state import ManagerState

Copies = list[list[tuple[int, int]]]
"""Per group, (source block, target block)."""


def append(state: ManagerState, request: Request, new: array[int]) -> Allocation:
    """Adds tokens to a request: see `CacheManager.append`."""
    size, tokens = state.block_size, request.tokens
    start, old_blocks = len(tokens), request.num_blocks
    first, end = start // size, start + len(new)
    copies = None
    if end > start and (end > old_blocks * size or request.shared_tail):
        copies = _make_room(state, request, end)
    tokens.extend(new)
    num_blocks = request.num_blocks
    tables = [table[first:num_blocks].copy() for table in request.tables]
    spans = [(start, end)] if end > start else []
    return Allocation(tables, first, size, [], spans, False, copies, None, old_blocks)


def append_each(state: ManagerState, requests: Sequence[Request], new: array[int]) -> tuple[list[Slots], Copies]:
    """Adds a token to each of several requests: slots and copies, per group."""
    size = state.block_size
    slow = [row for row in requests if row.shared_tail or len(row.tokens) % size == 0]
    for pool in state.pools:  # a copy or a new block at most for each, never both
        if len(slow) > pool.available:
            needed = sum(_blocks_to_take(state, row, len(row.tokens) + 1)[0] for row in slow)
            if needed > pool.available:
                raise OutOfBlocks(needed, pool.available)
    copies: Copies = [[] for _ in state.pools]
    for row in slow:
        for group, pairs in enumerate(_make_room(state, row, len(row.tokens) + 1)):
            copies[group] += pairs
    offsets = np.array([len(row.tokens) % size for row in requests], np.int64)
    slots: list[Slots] = []
    for group in range(len(state.pools)):
        blocks = [row.tables[group][row.num_blocks - 1] for row in requests]
        slots.append(np.array(blocks, np.int64) * size + offsets)
    for row, token in zip(requests, new, strict=True):
        row.tokens.append(token)
    return slots, copies


def _blocks_to_take(state: ManagerState, request: Request, end: int) -> tuple[int, list[bool]]:
    """Blocks of each group that a request needs to reach `end` tokens, and the groups that need one as a copy."""
    start, size = len(request.tokens), state.block_size
    first = start // size
    split = request.shared_tail and start % size != 0
    shared = [
        split and _must_copy(pool, int(table[first])) for pool, table in zip(state.pools, request.tables, strict=True)
    ]
    return -(-end // size) - request.num_blocks + any(shared), shared


def _make_room(state: ManagerState, request: Request, end: int) -> Copies:
    """Takes the blocks that a request needs to reach `end` tokens; the copies to make."""
    start, size = len(request.tokens), state.block_size
    first, old_blocks, num_blocks = start // size, request.num_blocks, -(-end // size)
    copies: Copies = [[] for _ in state.pools]
    if num_blocks == old_blocks and not request.shared_tail:
        return copies
    needed, shared = _blocks_to_take(state, request, end)
    for pool in state.pools:
        if needed > pool.available:
            raise OutOfBlocks(needed, pool.available)
    for group, pool in enumerate(state.pools):
        table = request.grown_table(group, num_blocks)
        if shared[group]:
            copies[group].append(_replace_shared(pool, request, group, first))
        if request.shared_tail and start % size:  # tokens taken back, or a fork's, may have been written behind
            pool.refill(int(table[first]), start % size)
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
        request.keep_replaced(group, old)
    return int(old[0]), int(table[block])


def _must_copy(pool: BlockPool, block: int) -> bool:
    """Whether writing a block would be seen by another holder or by whoever finds it."""
    return pool.table.lists(block) or int(pool.ref_count[block]) > 1
