"""What becomes of blocks once they are written: findable, merged with equal ones, released behind a window."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from .books import Books
from .hashing import Words
from .request import Request

NO_WORDS: Words = np.empty((0, 0), np.uint64)

Replaced = list[list[tuple[int, int]]]
"""Per group, (old block, new block)."""


def commit(books: Books, request_id: Hashable, request: Request, num_tokens: int) -> Replaced:
    """Publishes the complete blocks before a position: see `CacheManager.commit`."""
    if request.retired is not None or request.loading:
        books.settle(request)
    first, last = request.published, num_tokens // books.block_size
    request.committed = max(request.committed, num_tokens)
    replaced: Replaced = [[] for _ in books.pools]
    if last > first:
        books.withdraw(request)
        digests = _digests_up_to(books, request, last)
        for group in range(len(books.pools)):
            replaced[group] = _publish(books, request, group, first, last, digests)
        request.published = last
        following = request.committed // books.block_size
        if request.chain is not None and request.chain.hashed > following:
            digest = books.pools[0].words[request.tables[0][following]].tobytes()
            books.announce(request_id, request, digest)
    if not books.simple:
        _leave_window(books, request)
    return replaced


def _digests_up_to(books: Books, request: Request, last: int) -> Words:
    """Hashes of blocks `last - n .. last - 1`, those not hashed before; all of them after a deep rollback."""
    if request.chain is None:
        request.chain = books.hasher.chain(*request.keys)
    elif request.chain.hashed >= last:
        return NO_WORDS
    return request.chain.extend(request.tokens, last)


def _publish(
    books: Books, request: Request, group: int, first: int, last: int, digests: Words
) -> list[tuple[int, int]]:
    """Makes blocks [first, last) findable and swaps in the twins of those that already were."""
    pool, table, observers = books.pools[group], request.tables[group], books.observers
    if digests.size:
        hashed = table[last - len(digests) : last]
        present = hashed >= 0
        pool.words[hashed[present]] = digests[present]
    ids = table[first:last]
    if not books.simple:  # a request that was swapped out comes back without what had left its windows
        ids = ids[ids >= 0]
    complete = pool.table.contains(ids) if observers.want_stored else None
    old, new = pool.publish(ids)
    if complete is not None:
        stored = np.isin(table[first:last], ids[~complete & ~np.isin(ids, old)]).nonzero()[0] + first
        observers.stored(group, pool, request, stored)
    if not old.size:
        return []
    where = first + np.isin(table[first:last], old).nonzero()[0]
    table[where] = new
    request.retire(group, old)
    books.merged += old.size
    return list(zip(old.tolist(), new.tolist(), strict=True))


def _leave_window(books: Books, request: Request) -> None:
    """Releases the blocks that no later query of the request reads."""
    size = books.block_size
    for group, spec in enumerate(books.groups):
        last = spec.first_needed(request.committed, size)
        first = max(request.released[group], spec.sink_blocks(size))
        if last > first:
            table = request.tables[group]
            ids = table[first:last]
            books.pools[group].release(ids[ids >= 0])
            table[first:last] = -1
            request.released[group] = last
