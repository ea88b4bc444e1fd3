"""Appending to running requests: blocks for new tokens, one of its own where a request shares the last one."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .allocation import AppendedTokens, BaseAllocation, Pairs
from .pool import BlockPool, OutOfBlocks
from .request import Request, SharedTail
from .state import ManagerState
from .table import Ids


class Room(NamedTuple):
    """What a request needs to reach `end` tokens."""

    request: Request
    end: int
    copied: list[bool]
    """Per group, whether the block it is in has to become one of its own."""
    again: int
    """The first token to be computed, before the new ones where their block can not be copied yet."""


def append(state: ManagerState, request_id: Hashable, new: array[int]) -> BaseAllocation:
    """Adds tokens to a request: see `CacheManager.append`."""
    request, size = state.get(request_id), state.block_size
    pending = request.pending
    if pending and new[: len(pending)] != pending[: len(new)]:
        raise ValueError("token_ids: got others than the prompt goes on with, needs its next tokens")
    start, old_blocks, again = len(request.tokens), request.num_blocks, len(request.tokens)
    end = start + len(new)
    copies: list[Pairs] | None = None
    if end > start and (end > old_blocks * size or request.shared_tail is not None):
        room = _plan(state, [(request, end)], decoding=False)[0]
        copies, again = _make_room(state, room), room.again
    request.tokens.extend(new)
    if pending:
        request.pending = pending[len(new) :] or None
    first, num_blocks = again // size, request.num_blocks
    tables = [table[first:num_blocks].copy() for table in request.tables]
    spans = [(again, end)] if end > start else []
    return state.allocation(tables, first, size, [], spans, False, copies, None, old_blocks)


def append_each(state: ManagerState, request_ids: Sequence[Hashable], new: array[int]) -> AppendedTokens[Any, Any]:
    """Adds a token to each of several requests: see `CacheManager.append_each`."""
    size, running = state.block_size, state.running
    try:
        requests = [running[request_id] for request_id in request_ids]
    except KeyError:
        requests = [state.get(request_id) for request_id in request_ids]
    if len(set(request_ids)) < len(requests):
        raise ValueError("request_ids: got a request twice, needs each once")
    positions = [len(request.tokens) for request in requests]
    several = len(state.pools) > 1
    slow = [r for r, at in zip(requests, positions, strict=True) if at % size == 0 or r.shared_tail or r.pending]
    copies: list[Pairs] = [[] for _ in state.pools]
    if slow:
        for request, token in zip(requests, new, strict=True):
            if request.pending and request.pending[0] != token:
                raise ValueError("token_ids: got another than its prompt goes on with, needs its next token")
        if state.simple and not any(request.shared_tail for request in slow):
            _take_one_each(state, [request for request in slow if len(request.tokens) % size == 0])
        else:
            rooms = _plan(state, [(request, len(request.tokens) + 1) for request in slow], decoding=True)
            for room in rooms:
                for group, pairs in enumerate(_make_room(state, room)):
                    copies[group] += pairs
    offsets = [at % size for at in positions]
    slots = []
    for group, spec in enumerate(state.groups):
        if spec.holds_states:
            slots.append(np.full(len(requests), -1, np.int64))
            continue
        blocks = [request.tables[group].item(request.num_blocks - 1) for request in requests]
        slots.append(np.array(blocks, np.int64) * size + np.array(offsets, np.int64))
    for request, token in zip(requests, new, strict=True):
        request.tokens.append(token)
    for request in slow:
        if request.pending:
            request.pending = request.pending[1:] or None
    if several:
        return AppendedTokens(tuple(slots), copies, request_ids, positions)
    return AppendedTokens(slots[0], copies[0], request_ids, positions)


def _take_one_each(state: ManagerState, requests: Sequence[Request]) -> None:
    """A fresh block for each of several requests that share nothing, in one go."""
    if not requests:
        return
    pool = state.pools[0]
    state.require([len(requests)], [np.empty(0, np.int32)])
    ids = pool.take(np.array([request.num_blocks + 1 for request in requests], np.int32), runs=False)
    for i, (request, block) in enumerate(zip(requests, ids.tolist(), strict=True)):
        at = request.num_blocks
        request.grown_table(0, at + 1)[at] = block
        request.num_blocks = at + 1
        if request.priority or request.ttl is not None:
            pool.hinted(ids[i : i + 1], request.priority, request.ttl)


def _plan(state: ManagerState, ends: Sequence[tuple[Request, int]], decoding: bool) -> list[Room]:
    """What requests need, one after the other as if each had been served before the next is looked at.

    Args:
        state: Of the manager; nothing is changed.
        ends: Requests and how many tokens each is to have.
        decoding: Whether every token so far has been computed, committed or not.

    Raises:
        OutOfBlocks: Too few blocks for all.
        MustEvict: Enough, once `on_evict` has saved some.
    """
    size, pools = state.block_size, state.pools
    given_up: list[dict[int, int]] = [{} for _ in pools]  # references that earlier ones will have given up
    taken = [0] * len(pools)
    freed = [0] * len(pools)
    rooms = []
    claimed: list[SharedTail] = []  # blocks that one of these goes on in
    for request, end in ends:
        start = len(request.tokens)
        first, more = start // size, -(-end // size) - request.num_blocks
        copied, listed, tail = [], False, request.shared_tail
        for group, pool in enumerate(pools):
            block = request.tables[group].item(first) if tail is not None and start % size else -1
            shared = block >= 0 and (
                pool.table.lists(block) or pool.ref_count.item(block) - given_up[group].get(block, 0) > 1
            )
            copied.append(shared)
            listed |= shared and pool.table.lists(block)
        # What is not committed may not be written yet: a copy would come too early, so who is first goes on in place.
        unsure = any(copied) and request.committed < start
        if unsure and not listed and tail is not None and tail.end == start and tail not in claimed:
            copied, unsure = [False] * len(pools), False
            claimed.append(tail)
        again = max(request.committed, first * size) if unsure and not decoding else start
        for group, (pool, spec) in enumerate(zip(pools, state.groups, strict=True)):
            if more > 0 and not state.simple:
                for block in state.passed(request, group, end)[2].tolist():
                    lost = given_up[group].get(block, 0) + 1
                    given_up[group][block] = lost
                    freed[group] += pool.ref_count.item(block) == lost
            count = 0 if spec.holds_states else more + copied[group]
            taken[group] += count
            if taken[group] > pool.available + freed[group]:
                raise OutOfBlocks(taken[group], pool.available + freed[group])
            if copied[group]:
                block = request.tables[group].item(first)
                given_up[group][block] = given_up[group].get(block, 0) + 1
        rooms.append(Room(request, end, copied, again))
    if state.on_evict is not None:
        if any(count > pool.available for count, pool in zip(taken, pools, strict=True)):
            for request, end in ends:
                for group in range(len(pools)):
                    state.leave_window(request, group, end)
        state.require(taken, [np.empty(0, np.int32) for _ in pools])
    return rooms


def _make_room(state: ManagerState, room: Room) -> list[Pairs]:
    """Takes the blocks that a request needs; the copies to make."""
    request, end, size = room.request, room.end, state.block_size
    start, old_blocks, num_blocks = len(request.tokens), request.num_blocks, -(-end // size)
    first = start // size
    copies: list[Pairs] = [[] for _ in state.pools]
    hinted = request.priority or request.ttl is not None
    for group, (pool, spec) in enumerate(zip(state.pools, state.groups, strict=True)):
        if num_blocks > old_blocks and not state.simple:
            state.leave_window(request, group, end)
        table = request.grown_table(group, num_blocks)
        if room.copied[group]:
            old, fresh = _replace_shared(pool, request, group, first)
            if room.again > first * size:
                copies[group].append((old, fresh))
            if hinted:
                pool.hinted(table[first : first + 1], request.priority, request.ttl)
        if start % size and table[first] >= 0:  # tokens taken back, or a fork's, may have been written behind
            pool.refill(int(table[first]), room.again - first * size)
        if num_blocks > old_blocks:
            table[old_blocks:num_blocks] = -1
            if not spec.holds_states:
                lengths = np.arange(old_blocks + 1, num_blocks + 1, dtype=np.int32)
                table[old_blocks:num_blocks] = fresh_ids = pool.take(lengths)
                if hinted:
                    pool.hinted(fresh_ids, request.priority, request.ttl)
    if request.shared_tail is not None:
        if not any(room.copied):
            request.shared_tail.end = max(request.shared_tail.end, end)
        request.shared_tail = None
    request.num_blocks = num_blocks
    return copies


def _replace_shared(pool: BlockPool, request: Request, group: int, block: int) -> tuple[int, int]:
    """Puts a fresh block in the place of one that others see: (its number, the fresh one's)."""
    table = request.tables[group]
    old: Ids = table[block : block + 1].copy()
    table[block] = pool.take(np.array([block + 1], np.int32))[0]
    if pool.ref_count[old[0]] > 1:
        pool.release(old)
    else:  # nobody else keeps it from being handed out before the copy is made
        request.keep_replaced(group, old)
    return int(old[0]), int(table[block])
