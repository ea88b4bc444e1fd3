"""What tests of the cache share."""

from __future__ import annotations

import numpy as np

import pc


def drop(pool, ids):
    """Evicts blocks of a test's choice: they are free from now on, as if their policy had named them."""
    ids = np.asarray(ids, np.int32)
    pool.policy.removed(ids)
    policy_choice = pool.policy.victims
    pool.policy.victims = lambda count: ids
    try:
        pool._evict(ids.size)
    finally:
        pool.policy.victims = policy_choice
    pool._free[pool.num_free : pool.num_free + ids.size] = ids[::-1]
    pool.num_free += ids.size


def run(manager, request_id, tokens, **options):
    """A request from start to end."""
    allocation = manager.allocate(request_id, tokens, **options)
    manager.commit(request_id, len(tokens))
    manager.free(request_id)
    return allocation


def window_groups(**options):
    return [pc.FullAttention(), pc.SlidingWindow(window=8, **options)]


def recurrent(num_blocks=16, **options):
    return pc.CacheManager(
        num_blocks, block_size=4, groups=[pc.FullAttention(), pc.Recurrent()], policy="lru", **options
    )


def slots_of(runs, count):
    """Slots of runs, -1 where there is none; a slot that two runs give shows as an error."""
    slots = np.full(count, -1, np.int64)
    for begin, first, end in runs:
        assert end > first
        assert (slots[begin : begin + end - first] == -1).all()
        slots[begin : begin + end - first] = np.arange(first, end)
    return slots.tolist()
