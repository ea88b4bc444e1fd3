"""Starting a request: cached blocks are held, and fresh blocks are allocated for the other tokens."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

import numpy as np

from .allocation import Allocation, AnyAllocation, Pairs
from .hashing import Chain
from .keys import EncodedKeys, approximate_from
from .lookup import Hit, complement, find_in_groups, find_prefix
from .pool import ONE, Hint
from .request import Request
from .runs import Span
from .state import ManagerState


def allocate(
    state: ManagerState,
    request_id: Hashable,
    tokens: array[int],
    keys: EncodedKeys,
    reuse: str,
    hint: Hint | None,
    wanted: int,
    segments: Sequence[Span] | None = None,
) -> AnyAllocation:
    """Start a request, and allocate blocks for at least its first `wanted` tokens; see `CacheManager.allocate`."""
    if request_id in state.running or request_id in state.preempted:
        state.check_new("request_id", request_id)
    size, num_tokens, pool = state.block_size, len(tokens), state.pools[0]
    chain = Chain(state.hasher, keys)
    digests = chain.extend(tokens, num_tokens // size)
    request = Request(tokens, chain, digests, keys, hint, num_tokens)
    if state.prefix_only and reuse != "gap":
        hit = find_prefix(pool.table.leading(digests), num_tokens, wanted, size)
    else:
        listed = [pool.table.find(digests) for pool in state.pools]
        hit = find_in_groups(state.groups, listed, size, num_tokens, wanted, reuse == "gap")
    if state.reuses:
        hit = state.extended(request, hit, reuse, segments)
    allocation = admit(state, request_id, request, hit)
    if reuse not in ("prefix", "gap") and reuse not in state.reuses:  # from now on published blocks are indexed
        state.reuses = state.with_reuse(reuse)
    state.count(
        requests=1,
        queried=num_tokens,
        prefix=hit.position - hit.copied,
        gap=allocation.num_cached_tokens - hit.position,
        partial=hit.copied,
        moved=sum([run.end - run.start for run in hit.moved]) if hit.moved else 0,
    )
    return allocation


def admit(state: ManagerState, request_id: Hashable, request: Request, hit: Hit) -> AnyAllocation:
    """Give a request its blocks: hold the cached blocks of its hit, and allocate fresh ones for the other tokens.

    This calls `ManagerState.begin` after it has checked that there are enough blocks.

    Raises:
        OutOfBlocks: There are too few blocks for the tokens that the hit does not cover. Nothing has changed.
    """
    for pool, part in zip(state.pools, hit.groups, strict=True):
        if part.fresh.size > pool.num_free:
            held = np.union1d(part.held, hit.borrowed) if hit.borrowed.size else part.held
            pool.check_available(part.fresh.size, held)
    state.begin()
    size, tables = state.block_size, request.tables
    # The request is inserted before blocks are allocated, because comparing ids calls their `__eq__`, which may raise.
    state.running[request_id] = request
    for pool, (table, held, fresh, _) in zip(state.pools, hit.groups, strict=True):
        if held.size:
            pool.hold(held, request.hint)
        if hit.borrowed.size:
            pool.hold(hit.borrowed)
        if fresh.size:
            first = fresh.item(0)
            index = slice(first, None) if first + fresh.size == table.size else fresh  # a slice is faster
            table[index] = pool.take(fresh + ONE, request.hint)
        tables.append(table)
    request.num_blocks = tables[0].size
    request.hit, request.published = hit.blocks, hit.published
    request.committed, request.computed = hit.committed, hit.position
    if hit.num_tokens < len(request.tokens):
        request.pending = request.tokens[hit.num_tokens :]
        request.tokens = request.tokens[: hit.num_tokens]
    if hit.borrowed.size:
        request.keep_replaced(0, hit.borrowed)
    known = hit.cached if not hit.moved else [*hit.cached, *[(run.start, run.end) for run in hit.moved]]
    allocation: AnyAllocation = Allocation(
        [*map(np.ndarray.copy, tables)],
        _first_block=0,
        _block_size=size,
        cached_spans=hit.cached,
        compute_spans=complement(known, hit.num_tokens),
        _written=hit.written,
        _copies=_copy_beginning(state, request, hit) if hit.copied else None,
        wait_for=state.start_writing(request_id, request, hit.blocks),
        junction=hit.attention_hit,
        approximate_from=approximate_from(request.keys) if request.keys.placed else None,
    )
    for start, end in hit.cached:
        allocation.num_cached_tokens += end - start
    for span in hit.moved:
        targets = allocation.slots_at(np.arange(span.start, span.end))
        allocation.moved.append(span._replace(targets=targets))
    return allocation


def _copy_beginning(state: ManagerState, request: Request, hit: Hit) -> list[Pairs]:
    """Return the pair (borrowed block, first fresh block) that the caller must copy, and tell the pool of the copy."""
    pair = hit.borrowed.item(0), request.tables[0].item(hit.blocks)
    state.pools[0].refill(pair[1], hit.copied, pair[0])
    return [[pair]]
