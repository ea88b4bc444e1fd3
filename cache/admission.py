"""How a request gets its blocks: those that are cached are held, the rest is taken."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from .allocation import Allocation
from .books import Books
from .hashing import Words
from .matching import Part, Plan, complement, plan_groups, plan_prefix
from .pool import EMPTY, OutOfBlocks
from .preemption import Preempted
from .request import Request
from .swapping import plan_resume
from .table import Ids


def start(
    books: Books, request_id: Hashable, request: Request, digests: Words, reuse: str, priority: int, ttl: float | None
) -> Allocation:
    """Admits a new request: see `CacheManager.allocate`."""
    plan = _plan(books, request, digests, reuse == "gap")
    allocation, common = _admit(books, request_id, request, plan, digests, priority, ttl)
    books.total_requests += 1
    books.queried += len(request.tokens)
    books.hits["prefix"] += plan.position
    books.hits["partial"] += common
    books.hits["gap"] += allocation.num_cached_tokens - plan.position - common
    return allocation


def resume(books: Books, request_id: Hashable, saved: Preempted) -> Allocation:
    """Admits a preempted request again: see `CacheManager.resume`."""
    chain = books.hasher.chain(*saved.keys)
    digests = chain.extend(saved.tokens, len(saved.tokens) // books.block_size)
    request = Request(saved.tokens, chain, saved.keys)
    request.priority = saved.priority
    allocation, _ = _admit(books, request_id, request, plan_resume(books, digests, saved), digests, 0, None)
    request.loading = saved.slots
    return allocation


def _plan(books: Books, request: Request, digests: Words, gaps: bool) -> Plan:
    num_tokens, size, chain = len(request.tokens), books.block_size, request.chain
    if books.simple and not gaps:
        return plan_prefix(books.pools[0], digests, chain.path if chain is not None else [], num_tokens, size)
    return plan_groups(books.groups, books.pools, digests, num_tokens, size, gaps)


def _admit(
    books: Books,
    request_id: Hashable,
    request: Request,
    plan: Plan,
    digests: Words,
    priority: int,
    ttl: float | None,
) -> tuple[Allocation, int]:
    """Carries out a plan, or raises OutOfBlocks and changes nothing; also returns the tokens reused by a copy."""
    pools, size, hit, num_tokens = books.pools, books.block_size, plan.hit, len(request.tokens)
    source, common, cached = EMPTY, 0, plan.cached
    # A block that comes back from the host must not be overwritten by a copy of one that begins like it.
    if books.observers.partial is not None and plan.contiguous and not plan.loading:
        source, common = _borrow(books, request, plan, digests)
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
        if books.simple:
            pools[0].note(chain.path, plan.parts[0].table)
        chain.path = []
    if source.size:
        request.retire(0, source)
    books.running[request_id] = request
    wait_for = books.announce(request_id, request, digests[hit].tobytes()) if hit < len(digests) else None
    tables = [part.table.copy() for part in plan.parts]
    copies = [[(int(source[0]), int(tables[0][hit]))]] if common else None
    loads = [_loads(part) for part in plan.parts] if plan.loading else None
    spans = complement(cached, num_tokens)
    allocation = Allocation(tables, 0, size, cached, spans, plan.written, copies, wait_for, 0, loads)
    return allocation, common


def _loads(part: Part) -> list[tuple[int, int]]:
    """(host slot, block) of the blocks that are loaded."""
    if not part.slots:
        return []
    return list(zip(part.slots, part.table[part.where][: len(part.slots)].tolist(), strict=True))


def _borrow(books: Books, request: Request, plan: Plan, digests: Words) -> tuple[Ids, int]:
    """The block to copy the beginning of the first fresh block from, if there is room for both."""
    pool, part = books.pools[0], plan.parts[0]
    if not part.lengths.size:
        return EMPTY, 0
    source, common = books.observers.begins_alike(pool, request, digests, plan.hit)
    if source.size:
        room = pool.available - pool.unreferenced(np.concatenate((part.held, source)))
        if part.lengths.size > room:
            return EMPTY, 0
    return source, common
