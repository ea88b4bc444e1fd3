"""What becomes of blocks once they are written: findable, merged with equal ones, released behind a window."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from .hashing import Words
from .request import Request
from .state import ManagerState

NO_WORDS: Words = np.empty((0, 0), np.uint64)

Replaced = list[list[tuple[int, int]]]
"""Per group, (old block, new block)."""


def commit(state: ManagerState, request_id: Hashable, request: Request, num_tokens: int) -> Replaced:
    """Publishes the complete blocks before a position: see `CacheManager.commit`."""
    if request.replaced is not None or request.loading:
        state.end_step(request)
    first, last = request.published, num_tokens // state.block_size
    request.committed = max(request.committed, num_tokens)
    replaced: Replaced = [[] for _ in state.pools]
    if last > first:
        state.stop_writing(request)
        digests = _digests_up_to(state, request, last)
        for group in range(len(state.pools)):
            replaced[group] = _publish(state, request, group, first, last, digests)
        request.published = last
        following = request.committed // state.block_size
        if request.chain is not None and request.chain.hashed > following:
            digest = state.pools[0].words[request.tables[0][following]].tobytes()
            state.start_writing(request_id, request, digest)
    if not state.simple:
        _leave_window(state, request)
    return replaced


def _digests_up_to(state: ManagerState, request: Request, last: int) -> Words:
    """Hashes of blocks `last - n .. last - 1`, those not hashed before; all of them after a deep rollback."""
    if request.chain is None:
        request.chain = state.hasher.chain(*request.keys)
    elif request.chain.hashed >= last:
        return NO_WORDS
    return request.chain.extend(request.tokens, last)


def _publish(
    state: ManagerState, request: Request, group: int, first: int, last: int, digests: Words
) -> list[tuple[int, int]]:
    """Makes blocks [first, last) findable and swaps in the duplicates of those that already were."""
    pool, table, listeners = state.pools[group], request.tables[group], state.listeners
    if digests.size:
        hashed = table[last - len(digests) : last]
        present = hashed >= 0
        pool.words[hashed[present]] = digests[present]
    ids = table[first:last]
    if not state.simple:  # a request that was swapped out comes back without what had left its windows
        ids = ids[ids >= 0]
    complete = pool.table.contains(ids) if listeners.want_stored else None
    old, new = pool.publish(ids)
    if complete is not None:
        stored = np.isin(table[first:last], ids[~complete & ~np.isin(ids, old)]).nonzero()[0] + first
        listeners.stored(group, pool, request, stored)
    if not old.size:
        return []
    where = first + np.isin(table[first:last], old).nonzero()[0]
    table[where] = new
    request.keep_replaced(group, old)
    state.merged += old.size
    return list(zip(old.tolist(), new.tolist(), strict=True))


def _leave_window(state: ManagerState, request: Request) -> None:
    """Releases the blocks that no later query of the request reads."""
    size = state.block_size
    for group, spec in enumerate(state.groups):
        last = spec.first_needed(request.committed, size)
        first = max(request.released[group], spec.sink_blocks(size))
        if last > first:
            table = request.tables[group]
            ids = table[first:last]
            state.pools[group].release(ids[ids >= 0])
            table[first:last] = -1
            request.released[group] = last
