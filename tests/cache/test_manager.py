"""The contract of CacheManager, with one fact in each test."""

from __future__ import annotations

import numpy as np
import pytest

import pc


def test_bad_arguments_are_refused_by_name(manager):
    manager.allocate("a", [1])
    with pytest.raises(ValueError, match="request_id"):
        manager.allocate("a", [1])
    with pytest.raises(ValueError, match="reuse"):
        manager.allocate("b", [1], reuse="everything")
    with pytest.raises(ValueError, match="num_tokens"):
        manager.commit("a", 2)
    with pytest.raises(ValueError, match="num_tokens"):
        manager.rollback("a", 2)
    for call in (manager.free, manager.block_table, lambda r: manager.append(r, [1]), lambda r: manager.commit(r, 0)):
        with pytest.raises(KeyError, match="request_id"):
            call("unknown")
    with pytest.raises(ValueError, match="num_blocks"):
        pc.CacheManager(0)
    with pytest.raises(ValueError, match="policy"):
        pc.CacheManager(1, policy="nonesuch")
    with pytest.raises(ValueError, match="hash_algorithm"):
        pc.CacheManager(1, hash_algorithm="md4")


@pytest.mark.parametrize(
    "hint",
    [
        {"priority": "x"},
        {"priority": 1.5},
        {"priority": None},
        {"priority": True},
        {"ttl": "x"},
        {"ttl": -1.0},
        {"ttl": float("nan")},
    ],
)
def test_a_bad_hint_changes_nothing(hint):
    m = pc.CacheManager(4, block_size=4, policy="priority")
    with pytest.raises((TypeError, ValueError), match=next(iter(hint))):
        m.allocate("a", [1], **hint)
    m.check()
    assert m.stats().num_requests == 0


@pytest.mark.parametrize("value", [1.0, "1", None, True])
def test_positions_are_integers(manager, value):
    manager.allocate("a", [1, 2])
    for call in (manager.commit, manager.rollback):
        with pytest.raises(TypeError, match="num_tokens"):
            call("a", value)
    with pytest.raises(TypeError, match="group"):
        manager.block_table("a", value)
    manager.commit("a", np.int64(2))
    manager.rollback("a", np.int64(1))


def test_the_victim_is_the_youngest_of_the_lowest_priority():
    m = pc.CacheManager(8, block_size=4)
    assert m.victim() is None
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", 2)):
        m.allocate(name, [1], priority=priority)
    assert m.victim() == "c"
