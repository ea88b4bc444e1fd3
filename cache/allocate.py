"""How a request gets its blocks: those that are cached are held, the rest is taken."""

from __future__ import annotations

from array import array
from collections.abc import Hashable

import numpy as np

from .allocation import BaseAllocation, Pairs
from .hashing import Chain
from .keys import EncodedKeys
from .lookup import GroupHit, Hit, complement, find_in_groups, find_leading, find_prefix
from .pool import BlockPool
from .request import Request
from .state import FIT_EVERY, ManagerState
from .table import Ids


def allocate(
    state: ManagerState,
    request_id: Hashable,
    tokens: array[int],
    keys: EncodedKeys,
    gaps: bool,
    priority: int,
    ttl: float | None,
    wanted: int,
) -> BaseAllocation:
    """Starts a request: see `CacheManager.allocate`; `wanted` tokens are to have blocks at least."""
    if request_id in state.running or request_id in state.preempted:
        state.check_new("request_id", request_id)
    size, num_tokens = state.block_size, len(tokens)
    chain = Chain(state.hasher, keys)
    digests = chain.extend(tokens, num_tokens // size)
    request = Request(tokens, chain, digests, keys, priority, ttl)
    if state.simple and not gaps:
        hit = find_prefix(find_leading(state.pools[0], digests, chain.path), num_tokens, wanted, size)
    else:
        hit = find_in_groups(state.groups, state.pools, digests, num_tokens, wanted, size, gaps)
    allocation, common = admit(state, request_id, request, hit)
    state.total_requests += 1
    if not state.total_requests % FIT_EVERY:
        state.fit_hashes()
    state.queried += num_tokens
    hits = state.hits
    hits["prefix"] += hit.position
    if allocation.num_cached_tokens != hit.position:
        hits["partial"] += common
        hits["gap"] += allocation.num_cached_tokens - hit.position - common
    return allocation


def admit(state: ManagerState, request_id: Hashable, request: Request, hit: Hit) -> tuple[BaseAllocation, int]:
    """Gives a request its blocks, or changes nothing; also returns the tokens reused by a copy."""
    pools, size, num_tokens = state.pools, state.block_size, hit.num_tokens
    source, common, reached, cached = None, 0, hit.position, hit.cached
    # A block that comes back from the host must not be overwritten by a copy of one that begins like it.
    if state.partial is not None and hit.contiguous and not hit.loading:
        source, common = _find_partial(state, request, hit)
        if common:
            reached = hit.blocks * size + common
    parts = hit.groups
    if len(parts) > 1 or parts[0].lengths.size > pools[0].num_free:
        held = [part.held for part in parts] if source is None else [np.concatenate((parts[0].held, source))]
        state.require([part.lengths.size for part in parts], held)
    hinted = request.priority or request.ttl is not None
    tables = request.tables
    state.running[request_id] = request  # before anything is taken: comparing ids is the caller's code
    for pool, (table, mine, where, lengths, _) in zip(pools, parts, strict=True):
        if mine.size:
            if state.adopted is None:
                pool.hold(mine)
            else:
                state.hold(len(tables), mine)
        if source is not None:
            state.hold(0, source)
        if lengths.size:
            table[where] = pool.take(lengths)
        if hinted:
            pool.hinted(table[table >= 0], request.priority, request.ttl)
        tables.append(table)
    request.num_blocks = tables[0].size
    request.released = [0] * len(tables)
    request.hit = hit.blocks
    request.committed = hit.committed + common
    request.published = hit.published
    if num_tokens < len(request.tokens):
        request.pending = request.tokens[num_tokens:]
        request.tokens = request.tokens[:num_tokens]
    chain = request.chain
    if chain is not None and chain.path:
        if state.simple and not request.pending:
            for node in reversed(chain.path):
                if node.found is not None:
                    break
                node.taken = tables[0][node.begin : node.end].copy()
        chain.path = []
    wait_for = None
    if hit.blocks < len(request.digests):
        digest = request.digests[hit.blocks].tobytes()
        wait_for = state.writers.setdefault(digest, request_id)
        if wait_for is request_id:
            wait_for, request.writing = None, digest
    copies: list[Pairs] | None = None
    loads: list[Pairs] | None = None
    if source is not None:
        copies = [[(int(source[0]), int(tables[0][hit.blocks]))]]
        request.keep_replaced(0, source)
        pools[0].refill(int(tables[0][hit.blocks]), common)
    if hit.loading:
        loads = [_loads(part) for part in parts]
        if hit.committed % size:  # tokens taken back may have been swapped out behind the last one
            for pool, table in zip(pools, tables, strict=True):
                _refill(pool, table, hit.committed, size)
    if cached is None:
        cached = [(0, reached)] if reached else []
        spans = [(reached, num_tokens)] if reached < num_tokens else []
    else:
        spans = complement(cached, num_tokens)
    allocation = state.allocation(
        [table.copy() for table in tables] if len(tables) > 1 else [tables[0].copy()],
        0,
        size,
        cached,
        spans,
        hit.written,
        copies,
        wait_for,
        0,
        loads,
        hit.junction,
    )
    return allocation, common


def _refill(pool: BlockPool, table: Ids, position: int, block_size: int) -> None:
    block = int(table[position // block_size])
    if block >= 0:
        pool.refill(block, position % block_size)


def _loads(part: GroupHit) -> Pairs:
    """(host slot, block) of the blocks that are loaded."""
    if not part.slots:
        return []
    return list(zip(part.slots, part.table[part.where][: len(part.slots)].tolist(), strict=True))


def _find_partial(state: ManagerState, request: Request, hit: Hit) -> tuple[Ids | None, int]:
    """The block to copy the beginning of the first fresh block from, if there is room for both."""
    assert state.partial is not None
    pool, part, whole = state.pools[0], hit.groups[0], len(request.tokens)
    if not part.lengths.size:
        return None, 0
    end = hit.num_tokens if hit.num_tokens < whole else whole - 1
    source, common = state.partial.find(pool, request, hit.blocks, end)
    if source is not None:
        room = pool.available - pool.unreferenced(np.concatenate((part.held, source)))
        if part.lengths.size > room:
            return None, 0
    return source, common
