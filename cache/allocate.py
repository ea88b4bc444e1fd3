"""How a request gets its blocks: those that are cached are held, the rest is taken."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from .allocation import Allocation
from .hashing import Words
from .lookup import GroupHit, Hit, complement, find_in_groups, find_prefix
from .pool import EMPTY, OutOfBlocks
from .request import Request
from .state import ManagerState
from .table import Ids


def allocate(
    state: ManagerState,
    request_id: Hashable,
    request: Request,
    digests: Words,
    reuse: str,
    priority: int,
    ttl: float | None,
) -> Allocation:
    """Starts a request: see `CacheManager.allocate`."""
    plan = _look_up(state, request, digests, reuse == "gap")
    allocation, common = admit(state, request_id, request, plan, digests, priority, ttl)
    state.total_requests += 1
    state.queried += len(request.tokens)
    state.hits["prefix"] += plan.position
    state.hits["partial"] += common
    state.hits["gap"] += allocation.num_cached_tokens - plan.position - common
    return allocation


def _look_up(state: ManagerState, request: Request, digests: Words, gaps: bool) -> Hit:
    num_tokens, size, chain = len(request.tokens), state.block_size, request.chain
    if state.simple and not gaps:
        return find_prefix(state.pools[0], digests, chain.path if chain is not None else [], num_tokens, size)
    return find_in_groups(state.groups, state.pools, digests, num_tokens, size, gaps)


def admit(
    state: ManagerState,
    request_id: Hashable,
    request: Request,
    plan: Hit,
    digests: Words,
    priority: int,
    ttl: float | None,
) -> tuple[Allocation, int]:
    """Carries out a plan, or raises OutOfBlocks and changes nothing; also returns the tokens reused by a copy."""
    pools, size, hit, num_tokens = state.pools, state.block_size, plan.hit, len(request.tokens)
    source, common, cached = EMPTY, 0, plan.cached
    # A block that comes back from the host must not be overwritten by a copy of one that begins like it.
    if state.listeners.partial is not None and plan.contiguous and not plan.loading:
        source, common = _find_partial(state, request, plan, digests)
        if common:
            cached = [(0, hit * size + common)]
    for pool, part in zip(pools, plan.parts, strict=True):
        needed = part.lengths.size
        if needed + part.held.size > pool.available and needed > pool.num_free:  # else there is room in any case
            available = pool.available - pool.unreferenced(part.held)
            if needed > available:
                raise OutOfBlocks(needed, available)
    for pool, part in zip(pools, plan.parts, strict=True):
        if part.held.size:
            pool.hold(part.held)
        if source.size:
            pool.hold(source)
        if part.lengths.size:
            part.table[part.where] = pool.take(part.lengths, part.digests)
        if priority or ttl is not None:
            pool.policy.hinted(part.table[part.table >= 0], priority, ttl)
    request.open([part.table for part in plan.parts], plan.committed + common, plan.published)
    chain = request.chain
    if chain is not None:
        if state.simple:
            pools[0].note(chain.path, plan.parts[0].table)
        chain.path = []
    if source.size:
        request.keep_replaced(0, source)
        pools[0].refill(int(request.tables[0][hit]), common)
    if plan.loading and plan.committed % size:  # tokens taken back may have been swapped out behind the last one
        for pool, table in zip(pools, request.tables, strict=True):
            pool.refill(int(table[plan.committed // size]), plan.committed % size)
    state.running[request_id] = request
    wait_for = state.start_writing(request_id, request, digests[hit].tobytes()) if hit < len(digests) else None
    tables = [part.table.copy() for part in plan.parts]
    copies = [[(int(source[0]), int(tables[0][hit]))]] if common else None
    loads = [_loads(part) for part in plan.parts] if plan.loading else None
    spans = complement(cached, num_tokens)
    allocation = Allocation(tables, 0, size, cached, spans, plan.written, copies, wait_for, 0, loads)
    return allocation, common


def _loads(part: GroupHit) -> list[tuple[int, int]]:
    """(host slot, block) of the blocks that are loaded."""
    if not part.slots:
        return []
    return list(zip(part.slots, part.table[part.where][: len(part.slots)].tolist(), strict=True))


def _find_partial(state: ManagerState, request: Request, plan: Hit, digests: Words) -> tuple[Ids, int]:
    """The block to copy the beginning of the first fresh block from, if there is room for both."""
    pool, part = state.pools[0], plan.parts[0]
    if not part.lengths.size:
        return EMPTY, 0
    source, common = state.listeners.begins_alike(pool, request, digests, plan.hit)
    if source.size:
        room = pool.available - pool.unreferenced(np.concatenate((part.held, source)))
        if part.lengths.size > room:
            return EMPTY, 0
    return source, common
