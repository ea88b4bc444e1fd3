"""Starting a request: cached blocks are held, and fresh blocks are allocated for the other tokens."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

import numpy as np

from .allocation import BaseAllocation, Pairs
from .hashing import Chain
from .keys import EncodedKeys, approximate_from
from .lookup import Hit, complement, find_in_groups, find_prefix
from .request import Request
from .runs import Span
from .state import FIT_EVERY, ManagerState


def allocate(
    state: ManagerState,
    request_id: Hashable,
    tokens: array[int],
    keys: EncodedKeys,
    reuse: str,
    priority: int,
    ttl: float | None,
    wanted: int,
    segments: Sequence[Span] | None = None,
) -> BaseAllocation:
    """Start a request whose first `wanted` tokens, at least, get blocks; see `CacheManager.allocate`."""
    if request_id in state.running or request_id in state.preempted:
        state.check_new("request_id", request_id)
    size, num_tokens, pool = state.block_size, len(tokens), state.pools[0]
    chain = Chain(state.hasher, keys)
    digests = chain.extend(tokens, num_tokens // size)
    request = Request(tokens, chain, digests, keys, priority, ttl, num_tokens)
    if state.prefix_only and reuse != "gap":
        hit = find_prefix(pool.table.leading(digests), num_tokens, wanted, size)
    else:
        listed = [pool.table.find(digests) for pool in state.pools]
        hit = find_in_groups(state.groups, listed, state.block_size, num_tokens, wanted, reuse == "gap")
    if state.reuses:
        hit = state.extended(request, hit, reuse, segments)
    check_available(state, hit)
    state.begin()
    if reuse not in ("prefix", "gap") and reuse not in state.reuses:  # from now on published blocks are indexed
        state.reuses = state.with_reuse(reuse)
    allocation = admit(state, request_id, request, hit)
    begun, behind = hit.position - hit.copied, allocation.num_cached_tokens - hit.position
    moved = sum([run.end - run.start for run in hit.moved]) if hit.moved else 0
    counts = state.counts
    state.counts = counts | {
        "requests": counts["requests"] + 1,
        "queried": counts["queried"] + num_tokens,
        "prefix": counts["prefix"] + begun,
        "gap": counts["gap"] + behind,
        "partial": counts["partial"] + hit.copied,
        "moved": counts["moved"] + moved,
    }
    if not state.counts["requests"] % FIT_EVERY:
        state.fit_hashes()
    return allocation


def check_available(state: ManagerState, hit: Hit) -> None:
    """Raise OutOfBlocks if there are too few blocks for the tokens that a hit does not cover."""
    for pool, part in zip(state.pools, hit.groups, strict=True):
        if part.prefix_lengths.size > pool.num_free:
            held = np.union1d(part.held, hit.borrowed) if hit.borrowed.size else part.held
            pool.check_available(part.prefix_lengths.size, held)


def admit(state: ManagerState, request_id: Hashable, request: Request, hit: Hit) -> BaseAllocation:
    """Give a request its blocks. The caller has checked that there are enough, and has called `begin`."""
    size, tables = state.block_size, request.tables
    state.running[request_id] = request  # before blocks are allocated, because comparing ids runs the caller's code
    for pool, (table, held, fresh, prefix_lengths, _) in zip(state.pools, hit.groups, strict=True):
        if held.size:
            pool.hold(held)
        if hit.borrowed.size:
            pool.hold(hit.borrowed)
        if prefix_lengths.size:
            table[fresh] = pool.take(prefix_lengths)
        if request.priority or request.ttl is not None:
            pool.hinted(table, request.priority, request.ttl)
        tables.append(table)
        request.released.append(0)
    request.num_blocks = tables[0].size
    request.hit, request.published = hit.blocks, hit.published
    request.committed, request.computed = hit.committed, hit.position
    if hit.num_tokens < len(request.tokens):
        request.pending = request.tokens[hit.num_tokens :]
        request.tokens = request.tokens[: hit.num_tokens]
    if hit.borrowed.size:
        request.keep_replaced(0, hit.borrowed)
    known = hit.cached if not hit.moved else [*hit.cached, *[(run.start, run.end) for run in hit.moved]]
    allocation = state.allocation(
        [*map(np.ndarray.copy, tables)],
        _first_block=0,
        _block_size=size,
        cached_spans=hit.cached,
        compute_spans=complement(known, hit.num_tokens),
        _written=hit.written,
        _copies=_copy_beginning(state, request, hit) if hit.copied else None,
        wait_for=state.start_writing(request_id, request, hit.blocks),
        _loads=_load(state, hit) if hit.loads else None,
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
    """Record that the first tokens of a borrowed block are copied to the first fresh block; return the copy."""
    pair = hit.borrowed.item(0), request.tables[0].item(hit.blocks)
    state.pools[0].refill(pair[1], hit.copied, pair[0])
    return [[pair]]


def _load(state: ManagerState, hit: Hit) -> list[Pairs]:
    """Return, for each group, (host slot, block) of the blocks to load."""
    block, first = divmod(hit.committed, state.block_size)
    pairs = []
    for pool, part in zip(state.pools, hit.groups, strict=True):
        loaded = part.table[part.fresh][: len(part.slots)].tolist() if part.slots else []
        pairs.append(list(zip(part.slots, loaded, strict=True)))
        if first:  # tokens that were rolled back may have been swapped out behind the last one
            pool.refill(part.table.item(block), first)
    return pairs
