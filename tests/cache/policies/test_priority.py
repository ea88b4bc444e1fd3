"""Blocks with many different priorities cost little time and a bounded amount of memory."""

from __future__ import annotations

import pytest
from cache_cases import cached_of, serve

import pc
from pc.cache.policies import Priority

A, B = [1] * 8, [2] * 8
SHARED = [3] * 8
VICTIMS = {
    "the tail of a prompt goes first": ([(0, A + B, {})], 1, 1, {"A+B": 3}),
    "an expired prompt loses its tail first": ([(0, A + B, {"priority": 1, "ttl": 10})], 11, 1, {"A+B": 3}),
    "a shorter hint of the same priority does not end a longer one": (
        [(0, A, {"priority": 1, "ttl": 100}), (1, A, {"priority": 1, "ttl": 10}), (2, B, {})],
        *(50, 2, {"A": 2, "B": 0}),
    ),
    "a lower priority counts once a higher one has expired": (
        [(0, A, {"priority": 5, "ttl": 10}), (20, A, {"priority": 1}), (21, B, {})],
        *(30, 2, {"A": 2, "B": 0}),
    ),
    "a conversation that may resume is not evicted first": (
        [(0, A, {}), (1, B, {"returns": 0.3})],
        *(2, 2, {"A": 0, "B": 2}),
    ),
    "the end of a conversation takes no blocks along that others used": (
        [(0, [8] * 4, {}), (1, SHARED + [9] * 4, {}), (2, [*SHARED, 4, 4, 4, 4], {"returns": 0})],
        *(3, 1, {"SHARED": 2}),
    ),
    "a conversation that is over goes before an expired prompt": (
        [(0, A, {"priority": 1, "ttl": 10}), (1, B, {"returns": 0})],
        *(11, 2, {"A": 2, "B": 0}),
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize("case", VICTIMS)
def test_victims_by_priority_time_and_hints(case):
    """Requests run at these times in a pool that they fill; then another takes blocks."""
    requests, time, count, kept = VICTIMS[case]
    now = [0.0]
    total = len({tuple(tokens[: end + 4]) for _, tokens, _ in requests for end in range(0, len(tokens), 4)})
    manager = pc.CacheManager(total, block_size=4, policy=Priority(now=lambda: now[0]))
    for number, (now[0], tokens, options) in enumerate(requests):
        serve(manager, number, tokens, **options)
    now[0] = time
    assert serve(manager, "new", [7] * 4 * count) == 0
    prompts = {"A": A, "B": B, "A+B": A + B, "SHARED": SHARED}
    assert {name: cached_of(manager, prompts[name]) // 4 for name in kept} == kept
    manager.check()


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


@pytest.mark.parametrize("name", sorted(pc.cache.policies.POLICIES))
def test_asked_for_more_than_was_released_a_policy_says_so(name):
    m = pc.CacheManager(8, block_size=4, policy=name)
    serve(m, 1, [1] * 16)
    with pytest.raises((RuntimeError, IndexError)):
        m.pools[0].policy.victims(5)
