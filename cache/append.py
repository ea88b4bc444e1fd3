"""Appending to running requests: fresh blocks for new tokens, and a copy of the last block if other requests see it."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .allocation import AppendedTokens, BaseAllocation, Pairs
from .pool import BlockPool, OutOfBlocks
from .request import Request
from .state import ManagerState
from .table import Ids


class Growth(NamedTuple):
    """A request that grows to `end` tokens.

    Windowed groups release the blocks that only queries before `position` read.
    """

    request: Request
    end: int
    position: int


def append(state: ManagerState, request_id: Hashable, new: array[int]) -> BaseAllocation:
    """Add tokens to a request; see `CacheManager.append`."""
    request, size = state.running.get(request_id) or state.get(request_id), state.block_size
    pending, start, old_blocks = request.pending, len(request.tokens), request.num_blocks
    if pending and new[: len(pending)] != pending[: len(new)]:
        raise ValueError("token_ids: got tokens that are not the next ones of the prompt, needs those")
    end = start + len(new)
    more, copies = -(-end // size) - old_blocks, None
    if more > 0 or pending or (request.check_tail and end > start):
        if state.prefix_only and not request.check_tail:
            state.pools[0].check_available(more)
            state.begin(request)
            if more > 0:
                _take(state, request, 0, old_blocks + more)
                request.num_blocks = old_blocks + more
        else:
            position = min(request.committed, request.computed, max(request.length - 1, end - 1))
            copies = _grow(state, Growth(request, end, position))
        if pending:
            request.pending = pending[len(new) :] or None
    first, num_blocks = start // size, request.num_blocks
    tables, spans = [table[first:num_blocks].copy() for table in request.tables], [(start, end)] if end > start else []
    allocation = state.allocation(tables, first, size, [], spans, False, copies, None, old_blocks)
    request.tokens.extend(new)  # last, because without new blocks this is the only change
    return allocation


def _take(state: ManagerState, request: Request, group: int, num_blocks: int) -> None:
    """Allocate fresh blocks for a group's table, up to `num_blocks`. The request does not count them yet."""
    pool, old = state.pools[group], request.num_blocks
    ids = pool.take(np.arange(old + 1, num_blocks + 1, dtype=np.int32))
    request.grown_table(group, num_blocks)[old:num_blocks] = ids
    pool.hinted(ids, request.priority, request.ttl)


def append_each(state: ManagerState, request_ids: Sequence[Hashable], new: array[int]) -> AppendedTokens[Any, Any]:
    """Add a token to each of several requests; see `CacheManager.append_each`."""
    size, running = state.block_size, state.running
    try:
        requests = [running[request_id] for request_id in request_ids]
    except KeyError:
        requests = [state.get(request_id) for request_id in request_ids]
    if len(set(request_ids)) < len(requests):
        raise ValueError("request_ids: got a request twice, needs each once")
    positions = [len(request.tokens) for request in requests]
    slow = [r for r, at in zip(requests, positions, strict=True) if at % size == 0 or r.check_tail or r.pending]
    if slow:
        if any(request.pending and request.pending[0] != token for request, token in zip(requests, new, strict=True)):
            raise ValueError("token_ids: got a token that is not the next one of its prompt, needs that")
        copies = _grow_each(state, slow, (requests, positions))
    else:
        state.begin(growing=(requests, positions))
        copies = [[] for _ in state.pools]
    slots = []
    offsets = np.array([at % size for at in positions], np.int64)
    for group, spec in enumerate(state.groups):
        if spec.holds_states:
            slots.append(np.full(len(requests), -1, np.int64))
            continue
        blocks = [request.tables[group].item(request.num_blocks - 1) for request in requests]
        slots.append(np.array(blocks, np.int64) * size + offsets)
    mapping = tuple(slots) if len(slots) > 1 else slots[0]
    appended: AppendedTokens[Any, Any] = AppendedTokens(mapping, state.per_group(copies), request_ids, positions)
    for request, token in zip(requests, new, strict=True):
        request.tokens.append(token)
    return appended


def _grow_each(
    state: ManagerState, slow: list[Request], growing: tuple[Sequence[Request], Sequence[int]]
) -> list[Pairs]:
    """Allocate the blocks that some growing requests need for one more token each; return the copies of each group."""
    copies: list[Pairs] = [[] for _ in state.pools]
    if state.prefix_only and not any(request.check_tail for request in slow):
        full = [request for request in slow if len(request.tokens) % state.block_size == 0]
        state.pools[0].check_available(len(full))
        state.begin(*slow, growing=growing)
        if full:
            _take_one_each(state, full)
    else:
        # Every token so far has been computed, committed or not.
        growths = [Growth(r, len(r.tokens) + 1, min(r.committed, max(r.length - 1, len(r.tokens)))) for r in slow]
        _check_room(state, growths)
        state.begin(*slow, growing=growing)
        for growth in growths:
            for pairs, further in zip(copies, _apply(state, growth), strict=True):
                pairs += further
    for request in slow:
        if request.pending:
            request.pending = request.pending[1:] or None
    return copies


def _take_one_each(state: ManagerState, requests: Sequence[Request]) -> None:
    """Allocate a fresh block for each of several requests in one call."""
    pool = state.pools[0]
    ids = pool.take(np.array([request.num_blocks + 1 for request in requests], np.int32), runs=False)
    for i, (request, block) in enumerate(zip(requests, ids.tolist(), strict=True)):
        at = request.num_blocks
        request.grown_table(0, at + 1)[at] = block
        request.num_blocks = at + 1
        if request.priority or request.ttl is not None:  # checked here because decode calls this for each request
            pool.hinted(ids[i : i + 1], request.priority, request.ttl)


def _check_room(state: ManagerState, growths: Iterable[Growth]) -> None:
    """Raise OutOfBlocks if there are too few blocks for all requests together. Change nothing."""
    size = state.block_size
    for group, (pool, spec) in enumerate(zip(state.pools, state.groups, strict=True)):
        available, taken, dropped = pool.available, 0, Counter[int]()
        for request, end, position in growths:
            more = -(-end // size) - request.num_blocks
            if more > 0 and not state.prefix_only:
                for block in state.behind_window(request, group, position)[2].tolist():
                    dropped[block] += 1
                    available += pool.ref_count.item(block) == dropped[block]
            if not spec.holds_states:
                taken += more
            tail = _seen_tail(state, request, group)
            if tail >= 0 and _is_shared(pool, tail, dropped[tail]):
                taken += 1
                dropped[tail] += not state.offloading  # see `_replace_shared`
            if taken > available:
                raise OutOfBlocks(taken, available)


def _seen_tail(state: ManagerState, request: Request, group: int) -> int:
    """Return the last block of a request if it is partly filled and other requests may see it, else -1."""
    first, filled = divmod(len(request.tokens), state.block_size)
    return request.tables[group].item(first) if request.check_tail and filled else -1


def _is_shared(pool: BlockPool, block: int, dropped: int = 0) -> bool:
    """Return whether other requests can still see a block after `dropped` references are released."""
    return pool.table.lists(block) or pool.ref_count.item(block) - dropped > 1


def _apply(state: ManagerState, growth: Growth) -> list[Pairs]:
    """Allocate the blocks that a request needs, which are available; return the copies of each group."""
    request, end, position = growth
    first, filled = divmod(len(request.tokens), state.block_size)
    old_blocks, num_blocks = request.num_blocks, -(-end // state.block_size)
    copies: list[Pairs] = [[] for _ in state.pools]
    for group, (pool, spec) in enumerate(zip(state.pools, state.groups, strict=True)):
        if num_blocks > old_blocks and not state.prefix_only:
            state.leave_window(request, group, position)
        tail = _seen_tail(state, request, group)
        if tail >= 0:
            source = -1
            if _is_shared(pool, tail):
                source, tail = tail, _replace_shared(state, request, group, first)
                copies[group].append((source, tail))
            pool.refill(tail, filled, source)  # other requests, or tokens that were rolled back, may have written there
        if num_blocks > old_blocks:
            if spec.holds_states:
                request.grown_table(group, num_blocks)[old_blocks:num_blocks] = -1
            else:
                _take(state, request, group, num_blocks)
    request.check_tail = False
    request.num_blocks = num_blocks
    return copies


def _grow(state: ManagerState, growth: Growth) -> list[Pairs]:
    """Allocate the blocks that one request needs; return the copies of each group."""
    _check_room(state, (growth,))
    state.begin(growth.request)
    return _apply(state, growth)


def _replace_shared(state: ManagerState, request: Request, group: int, block: int) -> int:
    """Replace a block that other requests see by a fresh one; return the number of the fresh block."""
    pool, old = state.pools[group], request.tables[group][block : block + 1].copy()
    fresh: Ids = pool.take(np.array([block + 1], np.int32))
    request.put_blocks(group, block, fresh.item(0))
    pool.hinted(fresh, request.priority, request.ttl)
    if pool.ref_count.item(old.item(0)) > 1 and not state.offloading:  # a hidden holder soon drops its reference
        pool.release(old)
    else:  # keep the block from reuse until the copy is made
        request.keep_replaced(group, old)
    return fresh.item(0)
