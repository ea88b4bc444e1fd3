"""Blocks with many different priorities cost little time and a bounded amount of memory."""

from __future__ import annotations

from cache_cases import serve

import pc


def test_queues_of_priorities_that_are_gone_are_removed():
    m = pc.CacheManager(64, block_size=4, policy="priority")
    for i in range(4000):
        serve(m, i, [i] * 8, priority=1 + i)
    policy = m.pools[0].policy
    assert len(policy._by_priority) <= 2 * 64 + 65
    for i in range(64):
        serve(m, ("plain", i), [i, 1] * 32)
    assert len(policy._by_priority) <= 64
    m.check()


def test_work_does_not_grow_with_the_number_of_priorities(monkeypatch):
    from pc.cache.policies.run_queue import RunQueue

    looks = []
    first = RunQueue.head
    monkeypatch.setattr(RunQueue, "head", lambda self: (looks.append(1), first(self))[1])
    counts = []
    for values in (10, 1000):
        m = pc.CacheManager(2048, block_size=4, policy="priority")
        for i in range(1000):
            serve(m, i, [i] * 8, priority=1 + i % values)
        looks.clear()
        for i in range(100):
            serve(m, ("plain", i), [i, 1] * 16)
        counts.append(len(looks))
    assert counts[1] < 4 * counts[0] + 400


def test_hints_that_were_renewed_are_dropped():
    m = pc.CacheManager(256, block_size=4, policy="priority")
    for i in range(3000):
        serve(m, i, [i % 5] * 32, priority=1, ttl=1e6 + i)
    policy = m.pools[0].policy
    assert sum(ids.size for _, _, ids in policy._ends) <= 2 * 256 + 64
    assert policy.nbytes < 40_000
