"""Appending to running requests: fresh blocks for new tokens, and a copy of the last block if it is shared."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from .allocation import Allocation, AnyAllocation, AppendedTokens, Pairs
from .pool import OutOfBlocks
from .request import Request, RequestSnapshot
from .state import ManagerState
from .table import Ids


def append(state: ManagerState, request_id: Hashable, new: array[int]) -> AnyAllocation:
    """Add tokens to a request; see `CacheManager.append`."""
    request = state.running.get(request_id) or state.get(request_id)
    size, pending = state.block_size, request.pending
    start, old_blocks = len(request.tokens), request.num_blocks
    if pending and new[: len(pending)] != pending[: len(new)]:
        raise ValueError("token_ids: got tokens that are not the next ones of the prompt, needs its next tokens")
    end = start + len(new)
    copies = None
    if -(-end // size) > old_blocks or (new and (pending or request.check_tail)):
        _make_room(state, [(request, end)])
        copies = _grow(state, request, end)
    first = start // size
    tables = [table[first : request.num_blocks].copy() for table in request.tables]
    spans = [(start, end)] if end > start else []
    allocation: AnyAllocation = Allocation(tables, first, size, [], spans, False, copies, None, old_blocks)
    request.tokens.extend(new)  # last, because without new blocks this is the only change
    return allocation


def append_each(state: ManagerState, request_ids: Sequence[Hashable], new: array[int]) -> AppendedTokens[Any, Any]:
    """Add a token to each of several requests; see `CacheManager.append_each`."""
    size, running = state.block_size, state.running
    requests = [running.get(request_id) or state.get(request_id) for request_id in request_ids]
    if len(set(request_ids)) < len(requests):
        raise ValueError("request_ids: got a request twice, needs each once")
    positions = [len(request.tokens) for request in requests]
    slow = [r for r, at in zip(requests, positions, strict=True) if at % size == 0 or r.check_tail or r.pending]
    growing = zip(requests, positions, repeat(()))
    if slow:
        if any(request.pending and request.pending[0] != token for request, token in zip(requests, new, strict=True)):
            raise ValueError("token_ids: got a token that is not the next one of its prompt, needs its next token")
        _make_room(state, [(request, len(request.tokens) + 1) for request in slow], growing)
        copies = _grow_each(state, slow)
    else:
        state.begin(growing=growing)
        copies = [[] for _ in state.pools]
    slots = []
    offsets = np.array(positions, np.int64) % size
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


def _grow_each(state: ManagerState, requests: Sequence[Request]) -> list[Pairs]:
    """Add room for one token to each of several requests that may need a block; return the copies of each group.

    The caller has called `_make_room`.
    """
    copies: list[Pairs] = [[] for _ in state.pools]
    if state.prefix_only and not any(request.check_tail or request.pending for request in requests):
        # All of them need a block. One call is faster.
        lengths = np.array([request.num_blocks + 1 for request in requests], np.int32)
        ids = state.pools[0].take(lengths, each=[request.hint for request in requests])
        for request, block in zip(requests, ids.tolist(), strict=True):
            request.num_blocks += 1
            request.grown_table(0, request.num_blocks)[request.num_blocks - 1] = block
        return copies
    for request in requests:
        for pairs, further in zip(copies, _grow(state, request, len(request.tokens) + 1), strict=True):
            pairs += further
    return copies


def _make_room(
    state: ManagerState, growths: Sequence[tuple[Request, int]], growing: Iterable[RequestSnapshot] = ()
) -> None:
    """Check that requests have enough blocks to grow, call `state.begin`, and release the blocks that windows left.

    `growths` has the requests that may need blocks, each with its number of tokens afterwards. `growing` is for
    `ManagerState.begin`.

    Raises:
        OutOfBlocks: There are too few blocks for all of them together. Nothing has changed.
    """
    requests = [request for request, _ in growths]
    with_tail = [request for request in requests if request.check_tail]
    new_blocks = sum([-(-end // state.block_size) - request.num_blocks for request, end in growths])
    positions = []
    if not state.prefix_only:  # all queries before this position are computed
        positions = [(r, min(r.committed, r.computed, max(r.length, end) - 1)) for r, end in growths]
    for group, (pool, spec) in enumerate(zip(state.pools, state.groups, strict=True)):
        count = 0 if spec.holds_states else new_blocks
        available = pool.available
        for tail, holders in Counter([_partial_block(state, request, group) for request in with_tail]).items():
            if tail >= 0:
                others = pool.ref_count.item(tail) - 1
                # The last holder to append needs no copy, unless the block is published, or offloading keeps it
                # (`_replace_shared`).
                copied = pool.table.lists(tail) or (others and state.offloading)
                count += holders if copied else min(holders, others)
        if positions and count > available:
            behind = [state.behind_window(request, group, position)[1] for request, position in positions]
            blocks, times = np.unique(np.concatenate(behind), return_counts=True)
            available += np.count_nonzero(pool.ref_count[blocks] == times)
        if count > available:
            raise OutOfBlocks(count, int(available))
    state.begin(*requests, growing=growing)
    for request, position in positions:
        for group in range(len(state.pools)):
            state.leave_window(request, group, position)


def _partial_block(state: ManagerState, request: Request, group: int) -> int:
    """Return the number of a request's last block if it is partly filled and so may be shared; else -1."""
    first, filled = divmod(len(request.tokens), state.block_size)
    return request.tables[group].item(first) if filled else -1


def _grow(state: ManagerState, request: Request, end: int) -> list[Pairs]:
    """Allocate the blocks that a request needs for `end` tokens; return the copies of each group.

    The caller has called `_make_room`.
    """
    first, filled = divmod(len(request.tokens), state.block_size)
    old_blocks, num_blocks = request.num_blocks, -(-end // state.block_size)
    copies: list[Pairs] = [[] for _ in state.pools]
    for group, (pool, spec) in enumerate(zip(state.pools, state.groups, strict=True)):
        tail = _partial_block(state, request, group) if request.check_tail else -1
        if tail >= 0:
            source = -1
            if pool.table.lists(tail) or pool.ref_count.item(tail) > 1:
                source, tail = tail, _replace_shared(state, request, group, first)
                copies[group].append((source, tail))
            pool.refill(tail, filled, source)  # other requests, or tokens that were rolled back, may have written there
        if num_blocks > old_blocks:
            if spec.holds_states:
                request.grown_table(group, num_blocks)[old_blocks:num_blocks] = -1
            else:
                ids = pool.take(np.arange(old_blocks + 1, num_blocks + 1, dtype=np.int32), request.hint)
                request.grown_table(group, num_blocks)[old_blocks:num_blocks] = ids
    request.check_tail = False
    request.num_blocks = num_blocks
    if request.pending:
        request.pending = request.pending[end - len(request.tokens) :] or None
    return copies


def _replace_shared(state: ManagerState, request: Request, group: int, block: int) -> int:
    """Give a request a fresh block in place of one that is shared or published; return the fresh block's number."""
    pool, old = state.pools[group], request.tables[group][block : block + 1].copy()
    fresh: Ids = pool.take(np.array([block + 1], np.int32), request.hint)
    request.put_blocks(group, block, fresh.item(0))
    number = old.item(0)
    if pool.ref_count.item(number) > 1 and not pool.table.lists(number) and not state.offloading:
        pool.release(old)  # its other holders go on writing to it
    else:  # keep the block until the copy is made: its other holders may end, in other threads too
        request.keep_replaced(group, old)
    return fresh.item(0)
