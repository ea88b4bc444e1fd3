"""What policies promise."""

from __future__ import annotations

import numpy as np
import pytest

import pc
from pc.cache.hashing import BlockHasher
from pc.cache.policies import LRU, POLICIES, make_policy
from pc.cache.pool import BlockPool


def pool_of(name, num_blocks=4):
    return BlockPool(num_blocks, BlockHasher("sha256", 4), make_policy(name))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_acquire_returns_cached_then_fresh_blocks(name):
    pool = pool_of(name)
    first = pool.policy.acquire(list(range(10)))
    ids = np.array([b.number for b in first], np.int32)
    assert [b.cached for b in first] == [False] * 3
    assert [b.prefix_length for b in first] == [1, 2, 3]
    assert [b.ref_count for b in first] == [1] * 3
    assert first[2].hash is None
    pool.publish(ids[:2])
    pool.release(ids)
    again = pool.policy.acquire([b.hash for b in first[:2]])
    assert [(b.number, b.cached, b.access_count) for b in again] == [(ids[0], True, 2), (ids[1], True, 2)]
    pool.check(ids[:2])
    pool.release(ids[:2])
    other = pool.policy.acquire([7] * 16)
    assert [b.cached for b in other] == [False] * 4
    with pytest.raises(pc.OutOfBlocks):
        pool.policy.acquire([1])
    pool.check(np.array([b.number for b in other], np.int32))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_acquire_does_not_take_pending_blocks_for_cached(name):
    pool = pool_of(name)
    first = pool.policy.acquire([1] * 8)
    second = pool.policy.acquire([1] * 8)
    assert [b.cached for b in second] == [False, False]
    assert not {b.number for b in first} & {b.number for b in second}


def test_a_policy_may_be_given_by_name_class_or_instance():
    assert isinstance(make_policy("lru"), LRU)
    assert isinstance(make_policy(LRU), LRU)
    mine = LRU()
    assert make_policy(mine) is mine
    pc.CacheManager(4, policy=mine)
    with pytest.raises(ValueError, match="already serves"):
        pc.CacheManager(4, policy=mine)
    with pytest.raises(TypeError, match="policy"):
        pc.CacheManager(4, policy=3)
