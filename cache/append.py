"""Appending to running requests: blocks for new tokens, one of its own where a request shares the last one."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .allocation import AppendedTokens, BaseAllocation, Pairs
from .journal import keep_first, put_fields
from .pool import BlockPool, OutOfBlocks
from .request import CHANGING, Request, SharedTail
from .state import ManagerState
from .table import Ids


class Growth(NamedTuple):
    """How a request gets to `end` tokens.

    Attributes:
        position: The first query that is still to come: blocks that only earlier ones read are released.
        copied: Per group, whether the block it is in has to become one of its own.
        again: The first token to be computed, before the new ones where their block cannot be copied yet.
    """

    request: Request
    end: int
    position: int
    copied: list[bool]
    again: int


def append(state: ManagerState, request_id: Hashable, new: array[int]) -> BaseAllocation:
    """Adds tokens to a request: see `CacheManager.append`."""
    request, size = state.running.get(request_id) or state.get(request_id), state.block_size
    pending, start, old_blocks = request.pending, len(request.tokens), request.num_blocks
    if pending and new[: len(pending)] != pending[: len(new)]:
        raise ValueError("token_ids: got others than the prompt goes on with, needs its next tokens")
    end, again = start + len(new), start
    more, shares = -(-end // size) - old_blocks, request.shared_tail is not None
    copies: list[Pairs] | None = None
    if more > 0 and state.prefix_only and not shares:
        state.pools[0].check_available(more)
        state.changes += (
            (keep_first, request.tokens, start),
            (put_fields, request, ("num_blocks", "pending"), (old_blocks, pending)),
        )
        _take(state, request, 0, old_blocks + more)
        request.num_blocks = old_blocks + more
    elif more > 0 or shares or pending:
        grows = end > start and (more > 0 or shares)
        growths = _plan(state, [(request, end, request.computed)], False) if grows else []
        if growths or pending:
            state.changes += ((keep_first, request.tokens, start), (put_fields, request, CHANGING, request.snapshot()))
        for growth in growths:
            copies, again = _grow(state, growth), growth.again
    if pending:
        request.pending = pending[len(new) :] or None
    first, num_blocks = again // size, request.num_blocks
    tables, spans = [table[first:num_blocks].copy() for table in request.tables], [(again, end)] if end > start else []
    allocation = state.allocation(tables, first, size, [], spans, False, copies, None, old_blocks)
    request.tokens.extend(new)  # last: with it the verb is complete
    return allocation


def _take(state: ManagerState, request: Request, group: int, num_blocks: int) -> None:
    """Fresh blocks, up to so many, for a group's table; the request does not count them yet."""
    pool, old = state.pools[group], request.num_blocks
    ids = pool.take(np.arange(old + 1, num_blocks + 1, dtype=np.int32))
    request.grown_table(group, num_blocks)[old:num_blocks] = ids
    pool.hinted(ids, request.priority, request.ttl)


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
    slow = [r for r, at in zip(requests, positions, strict=True) if at % size == 0 or r.shared_tail or r.pending]
    copies: list[Pairs] = [[] for _ in state.pools]
    if slow:
        if any(request.pending and request.pending[0] != token for request, token in zip(requests, new, strict=True)):
            raise ValueError("token_ids: got another than its prompt goes on with, needs its next token")
        copies = _grow_each(state, slow)
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
    state.changes.append((_cut, requests, positions))  # one note of many: this is every step of decoding
    for request, token in zip(requests, new, strict=True):
        request.tokens.append(token)
    return appended


def _cut(requests: Sequence[Request], lengths: Sequence[int]) -> None:
    for request, length in zip(requests, lengths, strict=True):
        keep_first(request.tokens, length)


def _grow_each(state: ManagerState, slow: list[Request]) -> list[Pairs]:
    """Takes the blocks that requests which may need one have to have for a token more each: per group, the copies."""
    full = [request for request in slow if len(request.tokens) % state.block_size == 0]
    at_once = state.prefix_only and not any(request.shared_tail for request in slow)
    growths: list[Growth] = []
    if at_once:
        state.pools[0].check_available(len(full))
        names = ("num_blocks", "pending")
        state.changes += [(put_fields, request, names, (request.num_blocks, request.pending)) for request in slow]
    else:
        growths = _plan(state, [(r, len(r.tokens) + 1, len(r.tokens)) for r in slow], True)
        state.changes += [(put_fields, request, CHANGING, request.snapshot()) for request in slow]
    copies: list[Pairs] = [[] for _ in state.pools]
    for growth in growths:
        for pairs, more in zip(copies, _grow(state, growth), strict=True):
            pairs += more
    if at_once and full:
        _take_one_each(state, full)
    for request in slow:
        if request.pending:
            request.pending = request.pending[1:] or None
    return copies


def _take_one_each(state: ManagerState, requests: Sequence[Request]) -> None:
    """A fresh block for each of several requests that share nothing, in one go."""
    pool = state.pools[0]
    ids = pool.take(np.array([request.num_blocks + 1 for request in requests], np.int32), runs=False)
    for i, (request, block) in enumerate(zip(requests, ids.tolist(), strict=True)):
        at = request.num_blocks
        request.grown_table(0, at + 1)[at] = block
        request.num_blocks = at + 1
        if request.priority or request.ttl is not None:  # what a batch's decode does for each request
            pool.hinted(ids[i : i + 1], request.priority, request.ttl)


class _Ledger:
    """What the pools will have when requests have been served one after the other; nothing is changed.

    Per group: `taken` blocks, and `last_references`, of which the last reference is dropped when windows move on.
    """

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = pools
        self._dropped: list[dict[int, int]] = [{} for _ in pools]
        self.taken = [0] * len(pools)
        self.last_references: list[list[int]] = [[] for _ in pools]

    def is_shared(self, group: int, block: int) -> bool:
        """Whether other requests see this block by then."""
        pool = self._pools[group]
        return pool.table.lists(block) or pool.ref_count.item(block) - self._dropped[group].get(block, 0) > 1

    def drop(self, group: int, block: int) -> bool:
        """A request drops its reference: whether it is the last one."""
        count = self._dropped[group].get(block, 0) + 1
        self._dropped[group][block] = count
        return self._pools[group].ref_count.item(block) == count

    def leave(self, group: int, blocks: Ids) -> None:
        """Blocks are left behind a window."""
        self.last_references[group] += [block for block in blocks.tolist() if self.drop(group, block)]

    def take(self, group: int, count: int) -> None:
        """Blocks are taken."""
        self.taken[group] += count
        available = self._pools[group].available + len(self.last_references[group])
        if self.taken[group] > available:
            raise OutOfBlocks(self.taken[group], available)


def _plan(state: ManagerState, ends: Sequence[tuple[Request, int, int]], decoding: bool) -> list[Growth]:
    """What requests need, one after the other as if each had been served before the next is looked at.

    `ends` are requests, how many tokens each is to have, and the first query that is still to come; when `decoding`,
    every token so far has been computed, committed or not. Nothing is changed; OutOfBlocks: too few blocks for all.
    """
    size, ledger = state.block_size, _Ledger(state.pools)
    claimed: list[SharedTail] = []  # blocks that one of these goes on in
    growths = []
    for request, end, computed in ends:
        more = -(-end // size) - request.num_blocks
        copied, again = _copied(state, request, ledger, claimed, decoding)
        position = min(request.committed, computed, max(request.length - 1, end - 1))
        for group, spec in enumerate(state.groups):
            if more > 0 and not state.prefix_only:
                ledger.leave(group, state.behind_window(request, group, position)[2])
            ledger.take(group, 0 if spec.holds_states else more + copied[group])
            if copied[group]:
                ledger.drop(group, request.tables[group].item(len(request.tokens) // size))
        growths.append(Growth(request, end, position, copied, again))
    return growths


def _copied(
    state: ManagerState, request: Request, ledger: _Ledger, claimed: list[SharedTail], decoding: bool
) -> tuple[list[bool], int]:
    """Per group, whether the block that a request goes on in has to be copied, and the first token to compute."""
    start, size, tail = len(request.tokens), state.block_size, request.shared_tail
    first = start // size
    if tail is None or not start % size:
        return [False] * len(state.pools), start
    blocks = [table.item(first) for table in request.tables]
    copied = [block >= 0 and ledger.is_shared(group, block) for group, block in enumerate(blocks)]
    if not any(copied) or request.committed == start:
        return copied, start
    # What is not committed may not be written yet: a copy would come too early, so who is first goes on in place.
    published = any(pool.table.lists(block) for pool, block in zip(state.pools, blocks, strict=True) if block >= 0)
    if not published and tail.end == start and tail not in claimed:
        claimed.append(tail)
        return [False] * len(copied), start
    return copied, start if decoding else max(request.committed, first * size)


def _grow(state: ManagerState, growth: Growth) -> list[Pairs]:
    """Takes the blocks that a request needs, whose state the caller has noted; the copies to make."""
    request, size, tail = growth.request, state.block_size, growth.request.shared_tail
    start, old_blocks, num_blocks = len(request.tokens), request.num_blocks, -(-growth.end // size)
    first = start // size
    copies: list[Pairs] = [[] for _ in state.pools]
    for group, (pool, spec) in enumerate(zip(state.pools, state.groups, strict=True)):
        if num_blocks > old_blocks and not state.prefix_only:
            state.leave_window(request, group, growth.position)
        old = -1
        if growth.copied[group]:
            old, fresh = _replace_shared(state, request, group, first)
            if growth.again > first * size:
                copies[group].append((old, fresh))
        if tail is not None and start % size:  # tokens taken back, or a fork's, may have been written behind
            pool.refill(request.tables[group].item(first), growth.again - first * size, old)
        if num_blocks > old_blocks:
            if spec.holds_states:
                request.grown_table(group, num_blocks)[old_blocks:num_blocks] = -1
            else:
                _take(state, request, group, num_blocks)
    if tail is not None:
        if not any(growth.copied):
            state.changes.fields(tail, "end")
            tail.end = max(tail.end, growth.end)
        request.shared_tail = None
    request.num_blocks = num_blocks
    return copies


def _replace_shared(state: ManagerState, request: Request, group: int, block: int) -> tuple[int, int]:
    """Puts a fresh block in the place of one that other requests see: (its number, the fresh one's)."""
    pool, table = state.pools[group], request.tables[group]
    old: Ids = table[block : block + 1].copy()
    state.changes.append((request.put_blocks, group, block, old))
    table[block : block + 1] = fresh = pool.take(np.array([block + 1], np.int32))
    pool.hinted(fresh, request.priority, request.ttl)
    if pool.ref_count[old[0]] > 1 and not state.saving:  # a reference of a handover does not last
        pool.release(old)
    else:  # nothing else keeps it from being handed out before the copy is made
        request.keep_replaced(group, old)
    return int(old[0]), int(fresh[0])
