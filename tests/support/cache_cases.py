"""Helpers shared by the cache's tests."""

from __future__ import annotations

import numpy as np

import pc


def drop(pool, ids):
    """Evict the blocks `ids`, as if the policy had chosen them as victims."""
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
    """Allocate, commit and free a request; return its allocation."""
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
    """Return the slots of runs, -1 where no run has one; fail if two runs have the same slot."""
    slots = np.full(count, -1, np.int64)
    for begin, first, end in runs:
        assert end > first
        assert (slots[begin : begin + end - first] == -1).all()
        slots[begin : begin + end - first] = np.arange(first, end)
    return slots.tolist()
