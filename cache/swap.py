"""Preempting and resuming requests, and keeping a part of their KV in host memory.

Only KV that a later query reads is kept. That is all blocks of full attention, the last blocks and the sinks of a
window, and a recurrent state at the end of a block. All groups of layers must resume at the same position. It is the
greatest position for which each group still has the blocks that it needs.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import Any

import numpy as np

from .allocate import admit
from .allocation import AnyAllocation, Pairs
from .hashing import Chain
from .lookup import Hit, find_in_groups, longest_hit
from .request import Request
from .state import ManagerState
from .table import Ids


def preempt(state: ManagerState, request_id: Hashable, swap: bool) -> Any:
    """End a running request but keep its tokens; see `CacheManager.preempt`."""
    request = state.get(request_id)
    state.begin(request)
    state.end_step(request)
    pairs = _save(state, request) if swap and request.committed else list[Pairs]([[] for _ in state.pools])
    state.count(preemptions=1)
    state.preempted[request_id] = request
    state.release(request_id, request)
    return state.per_group(pairs)


def resume(state: ManagerState, request_id: Hashable) -> AnyAllocation:
    """Start a preempted request again; see `CacheManager.resume`."""
    saved = state.preempted.get(request_id)
    if saved is None:
        raise KeyError(f"request_id: got {request_id!r}, needs a preempted request")
    prompt, size, count = saved.tokens + (saved.pending or array("I")), state.block_size, len(saved.tokens)
    chain = Chain(state.hasher, saved.keys)
    digests = chain.extend(prompt, len(prompt) // size)
    request = Request(saved.tokens, chain, digests, saved.keys, saved.hint, count)
    request.pending, request.host_slots = saved.pending, saved.host_slots
    listed = [pool.table.find(digests[: count // size]) for pool in state.pools]
    on_host = [np.full(-(-saved.host_end // size), -1, np.int32) for _ in state.pools]
    for slots, blocks, taken in zip(on_host, saved.host_blocks, saved.host_slots, strict=False):
        slots[blocks] = taken
    hit = find_in_groups(state.groups, listed, size, len(prompt), count, host_end=saved.host_end, on_host=on_host)
    hit = state.extended(request, hit)
    allocation = admit(state, request_id, request, hit)
    if any(part.slots for part in hit.groups):
        allocation._loads = _loads(state, hit)
    del state.preempted[request_id]  # last, because this completes the verb
    return allocation


def _loads(state: ManagerState, hit: Hit) -> list[Pairs]:
    """Return, for each group, (host slot, block) of the blocks to load."""
    block, first = divmod(hit.committed, state.block_size)
    pairs = []
    for pool, part in zip(state.pools, hit.groups, strict=True):
        loaded = part.table[part.fresh[: len(part.slots)]].tolist()
        pairs.append(list(zip(part.slots, loaded, strict=True)))
        if first:  # the last block on the host may also hold tokens that were rolled back later
            pool.refill(part.table.item(block), first)
    return pairs


def _save(state: ManagerState, request: Request) -> list[Pairs]:
    """Allocate host slots for the longest prefix of the KV that fits; return each group's (block, host slot) pairs."""
    size, committed, num_tokens = state.block_size, request.committed, len(request.tokens)
    tables = _with_released(state, request)
    slots = [sorted(set(range(state.host_blocks)).difference(state.host_slots(g))) for g in range(len(tables))]
    free = [*map(len, slots)]
    end = committed
    needed = _needed(state, end, num_tokens)
    tight = any(blocks.size > room for blocks, room in zip(needed, free, strict=True))
    lacking = any((table[blocks] < 0).any() for table, blocks in zip(tables, needed, strict=True))
    if tight or lacking or any(group.holds_states for group in state.groups):
        resident = [table[: committed // size] >= 0 for table in tables]
        end = longest_hit(state.groups, resident, num_tokens, size, free) * size
        needed = _needed(state, end, num_tokens)
    taken = [some[: blocks.size] for some, blocks in zip(slots, needed, strict=True)]
    parts = zip(tables, needed, taken, strict=True)
    pairs = [list(zip(table[blocks].tolist(), some, strict=True)) for table, blocks, some in parts]
    request.host_end, request.host_blocks, request.host_slots = end, needed, taken
    return pairs


def _needed(state: ManagerState, end: int, num_tokens: int) -> list[Ids]:
    """Return, for each group, the blocks before position `end` that later queries read."""
    size, position = state.block_size, min(end, num_tokens - 1)
    return [group.needed(position, -(-end // size), size) for group in state.groups]


def _with_released(state: ManagerState, request: Request) -> list[Ids]:
    """Return the tables of a request, with released blocks that are still cached put back in their places."""
    tables = [request.written_table(group, request.num_blocks) for group in range(len(state.pools))]
    complete = request.committed // state.block_size
    for pool, table in zip(state.pools, tables, strict=True):
        holes = (table[:complete] < 0).nonzero()[0]
        if holes.size:
            table[holes] = pool.table.find(request.digests[holes])
    return tables
