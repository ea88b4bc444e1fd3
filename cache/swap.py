"""Preempting and resuming requests, and keeping a part of their KV in host memory.

Only KV that a later query reads is kept. This is all blocks of full attention, the last blocks and the sinks of a
window, and the state at a boundary. All groups must continue at one position, the greatest at which each has its
blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import Any

import numpy as np

from .allocate import admit, check_available
from .allocation import BaseAllocation, Pairs
from .hashing import Chain, Words
from .lookup import GroupHit, Hit, longest_hit, prefix_hit
from .request import Preempted, Request
from .state import ManagerState
from .table import Ids


def preempt(state: ManagerState, request_id: Hashable, swap: bool) -> Any:
    """End a running request but keep its tokens; see `CacheManager.preempt`."""
    request = state.get(request_id)
    state.begin(request)
    state.end_step(request)
    saved, pairs = Preempted(request), list[Pairs]([[] for _ in state.pools])
    if swap and request.committed:
        saved, pairs = _save(state, request)
    state.counts = state.counts | {"preemptions": state.counts["preemptions"] + 1}
    state.preempted[request_id] = saved
    state.release(request_id, request)
    return state.per_group(pairs)


def resume(state: ManagerState, request_id: Hashable) -> BaseAllocation:
    """Start a preempted request again; see `CacheManager.resume`."""
    saved = state.preempted.get(request_id)
    if saved is None:
        raise KeyError(f"request_id: got {request_id!r}, needs a preempted request")
    old = saved.request
    prompt = old.tokens + (old.pending or array("I"))
    chain = Chain(state.hasher, old.keys)
    digests = chain.extend(prompt, len(prompt) // state.block_size)
    request = Request(old.tokens, chain, digests, old.keys, old.priority, old.ttl, len(old.tokens))
    request.pending = old.pending
    hit = _find(state, digests[: len(old.tokens) // state.block_size], saved)
    hit = state.extended(request, hit)
    check_available(state, hit)
    state.begin()
    allocation = admit(state, request_id, request, hit)
    request.loading = saved.slots
    del state.preempted[request_id]  # last, because this completes the verb
    return allocation


def _save(state: ManagerState, request: Request) -> tuple[Preempted, list[Pairs]]:
    """Allocate host slots for as long a prefix of the KV as they can hold; return them and each group's copies."""
    size, committed, num_tokens = state.block_size, request.committed, len(request.tokens)
    tables = _with_released(state, request)
    slots = [sorted(set(range(state.host_blocks)).difference(state.host_slots(g))) for g in range(len(tables))]
    free = [*map(len, slots)]
    end, position = committed, min(committed, num_tokens - 1)
    needed = [group.needed(position, -(-end // size), size) for group in state.groups]
    tight = any(blocks.size > room for blocks, room in zip(needed, free, strict=True))
    lacking = any((table[blocks] < 0).any() for table, blocks in zip(tables, needed, strict=True))
    if tight or lacking or any(group.holds_states for group in state.groups):
        resident = [table[: committed // size] >= 0 for table in tables]
        end = longest_hit(state.groups, resident, num_tokens, size, free) * size
        position = min(end, num_tokens - 1)
        needed = [group.needed(position, end // size, size) for group in state.groups]
    taken = [some[: blocks.size] for some, blocks in zip(slots, needed, strict=True)]
    parts = zip(tables, needed, taken, strict=True)
    pairs = [list(zip(table[blocks].tolist(), some, strict=True)) for table, blocks, some in parts]
    return Preempted(request, end, needed, taken), pairs


def _with_released(state: ManagerState, request: Request) -> list[Ids]:
    """Return the tables of a request. Holes are filled with released blocks that are still cached."""
    tables = [request.written_table(group, request.num_blocks) for group in range(len(state.pools))]
    complete = request.committed // state.block_size
    digests: Words | None = None
    for pool, table in zip(state.pools, tables, strict=True):
        holes = (table[:complete] < 0).nonzero()[0]
        if holes.size:
            if digests is None:
                digests = state.hasher.hash_blocks(request.tokens[: complete * state.block_size], request.keys)
            table[holes] = pool.table.find(digests[holes])
    return tables


def _find(state: ManagerState, digests: Words, saved: Preempted) -> Hit:
    """Return the hit of a preempted request: blocks that are cached, and blocks to load from host memory."""
    size, num_tokens, total = state.block_size, len(saved.request.tokens), saved.request.length
    listed = [pool.table.find(digests) for pool in state.pools]
    on_host = [np.full(-(-saved.position // size), -1, np.int32) for _ in state.groups]
    for slots, blocks, taken in zip(on_host, saved.blocks, saved.slots, strict=False):
        slots[blocks] = taken
    whole = saved.position // size
    resident = [ids >= 0 for ids in listed]
    for there, slots in zip(resident, on_host, strict=True):
        there[:whole] |= slots[:whole] >= 0
    hit = longest_hit(state.groups, resident, total, size)
    end = hit * size
    if saved.position > end:  # it is inside a block, and host memory has all KV needed there
        hit, end = whole, saved.position
    position, last, num_blocks = min(end, max(total - 1, 0)), -(-end // size), -(-num_tokens // size)
    behind = np.arange(last, num_blocks, dtype=np.int32)
    parts, published = [], hit
    for group, ids, slots in zip(state.groups, listed, on_host, strict=True):
        needed = group.needed(position, last, size)
        there = needed < hit
        there[there] = ids[needed[there]] >= 0
        cached, loaded = needed[there], needed[~there]
        table = np.full(num_blocks, -1, np.int32)
        table[cached] = ids[cached]
        fresh = loaded if group.holds_states else np.concatenate((loaded, behind))
        parts.append(GroupHit(table, table[cached], fresh, fresh + 1, slots[loaded].tolist()))
        published = min([published, *loaded[:1].tolist()])
    return prefix_hit(hit, end, total, parts, published, num_tokens)._replace(loads=any(part.slots for part in parts))
