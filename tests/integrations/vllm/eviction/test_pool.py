"""Policies in vLLM's block pool: lru takes the same blocks as vLLM, and others get all notifications they need."""

from __future__ import annotations

import numpy as np
import pytest
from vllm_traffic import make_manager, make_request, run_traffic

from pc.cache.policies import POLICIES, EvictionPolicy


def with_policy(policy, num_blocks=40, **options):
    from pc.integrations.vllm.eviction import install_policy

    manager = make_manager(num_blocks, **options)
    install_policy(manager.block_pool, policy)
    return manager


@pytest.fixture(params=[False, True], ids=["", "ahead"])
def ahead(request, monkeypatch):
    """Return whether a quarter of the pool is chosen ahead, as for large pools with a smaller share."""
    from pc.integrations.vllm.eviction import queue

    if request.param:
        monkeypatch.setattr(queue, "AHEAD_FROM", 0)
        monkeypatch.setattr(queue, "AHEAD", 4)
    return request.param


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("heard", [False, True], ids=["unheard", "heard"])
@pytest.mark.parametrize("hybrid", [False, True])
def test_lru_is_vllms_own(hybrid, heard):
    """Hits, block numbers, events or contents, and free blocks are the same after every step of random traffic."""
    evicted = reset = 0
    for seed in range(15 if heard else 8):
        expected, hits = run_traffic(make_manager(40, hybrid, heard=heard), seed)
        manager = with_policy("lru", hybrid=hybrid, heard=heard)
        found, same_hits = run_traffic(manager, seed)
        assert found == expected, seed
        assert hits == same_hits
        evicted += sum(str(entry).count("BlockRemoved") for entry in expected)
        reset += expected.count(True)
        assert manager.block_pool.has_vllms_table
    assert evicted > 500 or not heard
    assert reset > 0


class WrongOrder(POLICIES["lru"]):
    """Evicts the first blocks of a sequence first."""

    def released(self, ids):
        super().released(ids[::-1].copy())


def test_a_policy_decides():
    same = sum(
        run_traffic(with_policy(WrongOrder), seed)[0] == run_traffic(make_manager(40), seed)[0] for seed in range(8)
    )
    assert same == 0


class Watching(POLICIES["lru"]):
    """Checks that every call is consistent with the calls before."""

    def bind(self, pool):
        super().bind(pool)
        self.held, self.waiting, self.done = set(), set(), set()
        self.given, self.returned = set(), 0
        self.calls = dict.fromkeys(("fresh", "hit", "completed", "released", "victims"), 0)

    def note(self, kind, ids):
        self.calls[kind] += 1
        blocks = ids.tolist()
        assert ids.dtype == np.int32
        assert len(set(blocks)) == len(blocks) > 0
        assert 0 not in blocks, "the null block"
        return set(blocks)

    def accessed(self, ids, hit):
        blocks = self.note("hit" if hit else "fresh", ids)
        assert (self.pool.ref_count[ids] >= 1).all()
        assert (self.pool.access_count[ids] >= (2 if hit else 1)).all()
        assert (self.pool.last_access[ids] == self.pool.clock).all()
        if not hit:
            assert not blocks & self.waiting
            self.returned += bool((self.pool.access_count[ids] > 1).all())
            self.done -= blocks
        assert hit <= (not blocks & self.given), "a hit on a block that was evicted"
        self.given -= blocks
        self.held |= blocks
        self.waiting -= blocks
        super().accessed(ids, hit)

    def completed(self, ids):
        self.done |= self.note("completed", ids)
        assert (self.pool.prefix_length[ids] >= 1).all()
        assert (self.pool.keys_of(ids) != 0).all()
        super().completed(ids)

    def released(self, ids):
        blocks = self.note("released", ids)
        assert not self.pool.ref_count[ids].any()
        assert blocks <= self.held
        assert blocks <= self.done
        self.held -= blocks
        self.waiting |= blocks
        super().released(ids)

    def victims(self, count):
        ids = super().victims(count)
        blocks = self.note("victims", ids)
        assert blocks <= self.waiting
        self.waiting -= blocks
        self.given |= blocks
        return ids

    def clear(self):
        self.held, self.waiting, self.done, self.given = set(), set(), set(), set()
        super().clear()


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_policy_is_notified_of_what_the_pool_does(hybrid, ahead):
    returned = 0
    for seed in range(6):
        manager = with_policy(Watching, hybrid=hybrid)
        run_traffic(manager, seed)
        pool = manager.block_pool
        state = pool.policy_state
        state.flush()
        refs = [0 if block.is_null else block.ref_cnt for block in pool.blocks]
        assert state.ref_count.tolist() == refs
        assert (
            state.num_held == sum(count > 0 for count in refs) == pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        )
        assert all(state.policy.calls.values())
        returned += state.policy.returned
    assert (returned > 0) == ahead


@pytest.mark.parametrize("hybrid", [False, True])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_serves(policy, hybrid):
    """With every policy, free and held blocks are all blocks, and no block is in two places."""
    for seed in range(4):
        manager = with_policy(policy, hybrid=hybrid)
        run_traffic(manager, seed)
        pool = manager.block_pool
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        held = [block.block_id for block in pool.blocks if block.ref_cnt > 0 and not block.is_null]
        assert sorted([*free, *held]) == list(range(1, pool.num_gpu_blocks))
        assert len(free) == pool.get_num_free_blocks()


def serve(manager, name, tokens, **params):
    """Run a request from start to end, and return its hits."""
    request = make_request(name, tokens, **params)
    blocks, hit = manager.get_computed_blocks(request)[:2]
    assert manager.allocate_slots(request, len(tokens) - hit, hit, blocks) is not None
    manager.free(request)
    return hit


def test_frequency_is_seen_through_hits_on_held_blocks():
    """A prefix is hit while another request uses it. vLLM's queue is not notified of that, lfu is."""
    manager = with_policy("lfu", 13)
    often, seldom = list(range(16)), list(range(100, 116))
    serve(manager, "a", often)
    holder = make_request("holder", [*often, 1])
    blocks, hit = manager.get_computed_blocks(holder)[:2]
    manager.allocate_slots(holder, 1, hit, blocks)
    for n in range(3):
        serve(manager, f"b{n}", [*often, 2])
    manager.free(holder)
    serve(manager, "c", seldom)
    serve(manager, "d", list(range(200, 225)))
    assert serve(manager, "e", [*often, 3]) == 16
    assert serve(manager, "f", [*seldom, 3]) < 16


class Empty(EvictionPolicy):
    def victims(self, count):
        return np.empty(0, np.int32)


class Twice(POLICIES["lru"]):
    def victims(self, count):
        return np.repeat(super().victims(count)[:1], count)


def test_a_policy_that_gives_wrong_victims_is_caught():
    """No request gets a block that another request holds."""
    for policy, error in ((Empty, "Empty.victims: got 0, needs 6 blocks"), (Twice, "Twice.victims: got a block twice")):
        manager = with_policy(policy, 9)
        serve(manager, "a", list(range(32)))
        with pytest.raises(RuntimeError, match=error):
            serve(manager, "b", list(range(100, 124)))


def test_pools_in_use_and_other_things_are_refused():
    from pc.integrations.vllm.eviction import install_policy

    manager = make_manager(8)
    manager.block_pool.get_new_blocks(1)
    with pytest.raises(ValueError, match="pool: got one in use"):
        install_policy(manager.block_pool, "lru")
    with pytest.raises(TypeError, match="pool: got int"):
        install_policy(3, "lru")
    fresh = make_manager(8)
    with pytest.raises(ValueError, match="policy: got 'best'"):
        install_policy(fresh.block_pool, "best")
    assert type(fresh.block_pool).__name__ == "BlockPool"
    install_policy(fresh.block_pool, "lru")
    with pytest.raises(TypeError, match="pool: got PolicyBlockPool"):
        install_policy(fresh.block_pool, "lru")


def test_looking_ahead_is_refused():
    with pytest.raises(NotImplementedError, match="iter_blocks_after"):
        with_policy("lru").block_pool.free_block_queue.iter_blocks_after(None)
