"""The contract of eviction policies."""

from __future__ import annotations

import time

import numpy as np
import pytest
from cache_cases import cached_of, serve

import pc
from pc.cache.hashing import BlockHasher
from pc.cache.observe.check import check_pool
from pc.cache.policies import LRU, POLICIES, Priority, choose, make_policy
from pc.cache.pool import BlockPool


def prompt(i, blocks=2):
    return [i] * 4 * blocks


def pool_of(name, num_blocks=4):
    return BlockPool(num_blocks, BlockHasher("sha256", 4), make_policy(name))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_rolled_back_table_does_not_change_what_is_evicted(name):
    manager = pc.CacheManager(8, 1, policy=name)
    manager.allocate("a", [1, 2, 3, 4])
    manager.commit("a", 4)
    manager.rollback("a", 3)
    manager.append("a", [5, 6])
    manager.commit("a", 3)
    manager.free("a")
    assert sorted(manager.allocate("b", list(range(10, 18))).block_ids) == list(range(8))
    manager.check()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_acquire_returns_cached_then_fresh_blocks(name):
    pool = pool_of(name)
    first = pool.policy.acquire(list(range(10)))
    ids = np.array([b.number for b in first], np.int32)
    assert [b.cached for b in first] == [False] * 3
    assert [b.prefix_length for b in first] == [1, 2, 3]
    assert [b.ref_count for b in first] == [1] * 3
    assert first[2].hash is None
    pool.publish(ids[:2], np.frombuffer(b"".join(b.hash for b in first[:2]), np.uint64).reshape(2, -1))
    pool.release(ids)
    again = pool.policy.acquire([b.hash for b in first[:2]])
    assert [(b.number, b.cached, b.access_count) for b in again] == [(ids[0], True, 2), (ids[1], True, 2)]
    check_pool(pool, ids[:2])
    pool.release(ids[:2])
    other = pool.policy.acquire([7] * 16)
    assert [b.cached for b in other] == [False] * 4
    with pytest.raises(pc.OutOfBlocks):
        pool.policy.acquire([1])
    check_pool(pool, np.array([b.number for b in other], np.int32))


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


class MostRecent(pc.EvictionPolicy):
    """Evicts the block used last, as in the example of docs/policies.md."""

    def bind(self, pool):
        super().bind(pool)
        self.waiting = {}

    def accessed(self, ids, hit):
        self.removed(ids)

    def released(self, ids):
        self.waiting |= dict.fromkeys(ids.tolist())

    def victims(self, count):
        return np.array([self.waiting.popitem()[0] for _ in range(count)], np.int32)

    def removed(self, ids):
        for block in ids.tolist():
            self.waiting.pop(block, None)

    def clear(self):
        self.waiting.clear()


A, B, OLD, SHARED = [1] * 8, [2] * 8, [9] * 16, [3] * 8
OTHER, OVER = SHARED + [4] * 8, SHARED + [5] * 8
PROMPTS = {"A": A, "B": B, "A + B": A + B, "A + A": A + A, "OLD": OLD, "SHARED": SHARED, "OTHER": OTHER, "OVER": OVER}
# Policies, requests (time, prompt, options), the time of another request, how many blocks it takes, and how many
# blocks of each prompt are left.
VICTIMS = {
    "the oldest prompt loses its tail first": (
        ["lru", "priority"],
        [(0, A, {}), (1, B, {})],
        *(2, 1, {"A": 1, "B": 2}),
    ),
    "the oldest prompt goes before a later one": (
        ["lru", "priority"],
        [(0, A, {}), (1, B, {})],
        *(2, 3, {"A": 0, "B": 1}),
    ),
    "use does not count": (["fifo"], [(0, A, {}), (1, B, {}), (2, A, {})], 3, 1, {"A": 1, "B": 2}),
    "a prompt that was used more often stays": (
        ["lfu"],
        [(0, A, {}), (1, A, {}), (2, A, {}), (3, B, {})],
        *(4, 2, {"A": 2, "B": 0}),
    ),
    "a policy of one's own evicts the prompt that was used last": (
        [MostRecent],
        [(0, A, {}), (1, B, {})],
        *(2, 2, {"A": 2, "B": 0}),
    ),
    "a priority outlives recency": (
        ["priority"],
        [(0, A, {"priority": 5, "ttl": 10}), (0, B, {})],
        *(0, 2, {"A": 2, "B": 0}),
    ),
    "a priority that has expired is none": (
        ["priority"],
        [(0, A, {"priority": 5, "ttl": 10}), (0, B, {})],
        *(11, 2, {"A": 0, "B": 2}),
    ),
    "a priority pins nothing": (["priority"], [(0, A + B, {"priority": 9})], 0, 4, {"A + B": 0}),
    "an expired prompt loses its tail first": (
        ["priority"],
        [(0, A + B, {"priority": 1, "ttl": 10})],
        *(11, 1, {"A + B": 3}),
    ),
    "a shorter hint of the same priority does not end a longer one": (
        ["priority"],
        [(0, A, {"priority": 1, "ttl": 100}), (1, A, {"priority": 1, "ttl": 10}), (2, B, {})],
        *(50, 2, {"A": 2, "B": 0}),
    ),
    "a lower priority counts once a higher one has expired": (
        ["priority"],
        [(0, A, {"priority": 5, "ttl": 10}), (20, A, {"priority": 1}), (21, B, {})],
        *(30, 2, {"A": 2, "B": 0}),
    ),
    "a conversation that may resume is not evicted first": (
        ["priority"],
        [(0, A, {}), (1, B, {"returns": 0.3})],
        *(2, 2, {"A": 0, "B": 2}),
    ),
    "a conversation that is over goes first and takes no blocks along that others used": (
        ["hazard", "priority"],
        [(0, OLD, {}), (1, OTHER, {}), (2, OVER, {"returns": 0})],
        *(3, 4, {"OVER": 2, "OTHER": 4, "OLD": 2}),
    ),
    "a conversation that is over goes before an expired prompt": (
        ["priority"],
        [(0, A, {"priority": 1, "ttl": 10}), (1, B, {"returns": 0})],
        *(11, 2, {"A": 2, "B": 0}),
    ),
    "the end of a conversation does not end its priority": (
        ["priority"],
        [(0, A, {}), (1, B, {"priority": 1, "returns": 0})],
        *(2, 2, {"A": 0, "B": 2}),
    ),
    "the end of a conversation covers its earlier turns": (
        ["hazard"],
        [(0, OLD, {}), (1, A, {"returns": 1}), (2, A + A, {"returns": 0})],
        *(3, 4, {"OLD": 4, "A + A": 0}),
    ),
}


@pytest.mark.quick
@pytest.mark.parametrize(("policy", "case"), [(policy, case) for case, row in VICTIMS.items() for policy in row[0]])
def test_victims(policy, case):
    """Requests run in a pool that they fill; then another one takes blocks, and is found after that."""
    _, requests, time, count, kept = VICTIMS[case]
    now = [0.0]
    total = len({tuple(tokens[:end]) for _, tokens, _ in requests for end in range(4, len(tokens) + 1, 4)})
    policy = Priority(now=lambda: now[0]) if policy == "priority" else policy
    m = pc.CacheManager(total, block_size=4, policy=policy)
    for number, (now[0], tokens, options) in enumerate(requests):
        cached = cached_of(m, tokens)
        assert serve(m, number, tokens, **options) == min(cached, len(tokens) - 1)
    now[0] = time
    new = [7] * 4 * count
    assert serve(m, "new", new) == 0
    assert {name: cached_of(m, PROMPTS[name]) // 4 for name in kept} == kept
    assert serve(m, "again", new) == len(new) - 1
    m.check()
    m.reset()


@pytest.mark.parametrize("policy", ["hazard", "priority"])
def test_a_conversation_that_is_over_takes_no_blocks_of_the_next_request_along(policy):
    """All blocks of the request that ended are still held, so the next release is another request's."""
    m = pc.CacheManager(3, block_size=4, policy=policy)
    serve(m, "old", [5] * 4)
    for request, token in (("over", 1), ("same", 1), ("next", 2)):
        m.allocate(request, [token] * 4)
        m.commit(request, 4)
    m.free("over", returns=0)
    m.free("next")
    serve(m, "new", [7] * 4)
    assert (cached_of(m, [5] * 4), cached_of(m, [2] * 4)) == (0, 4)
    m.check()


def test_fifo_gives_up_what_was_held_at_its_turn_first():
    m = pc.CacheManager(4, block_size=4, policy="fifo")
    m.allocate(1, prompt(1))
    m.commit(1, 8)
    serve(m, 2, prompt(2))
    serve(m, 3, prompt(3, 1))
    assert cached_of(m, prompt(1)) == 8
    m.free(1)
    serve(m, 4, prompt(4, 1))
    assert (cached_of(m, prompt(1)), cached_of(m, prompt(3, 1))) == (4, 4)
    m.check()


@pytest.mark.parametrize("name", ["s3fifo", "arc"])
def test_a_scan_does_not_wash_out_what_is_used_again_and_again(name):
    m = pc.CacheManager(40, block_size=4, policy=name)
    for i in range(200):
        serve(m, ("hot", i % 4, i), prompt(i % 4))
        serve(m, ("cold", i), prompt(100 + i, 6))
    assert sum(cached_of(m, prompt(i)) for i in range(4)) == 32
    m.check()


def test_segmented_is_a_deprecated_name_of_default():
    assert "segmented" in POLICIES
    assert "segmented" not in list(POLICIES)
    with pytest.warns(DeprecationWarning, match="'segmented' is a deprecated name of 'default'"):
        manager = pc.CacheManager(4, block_size=4, policy="segmented")
    assert type(manager.pools[0].policy) is POLICIES["default"]
    with pytest.raises(ValueError, match="policy: got 'segment', needs one of arc, default"):
        pc.CacheManager(4, block_size=4, policy="segment")


def test_a_policy_is_notified_of_the_end_of_each_request():
    heard = []

    class Hears(LRU):
        def returning(self, probability):
            heard.append(probability)

        def finished(self, output_tokens):
            heard.append(output_tokens)

    m = pc.CacheManager(4, block_size=4, policy=Hears)
    m.allocate("a", prompt(1))
    m.append("a", [5, 6, 7])
    m.free("a", returns=0.25)
    serve(m, "b", prompt(2))
    assert heard == [0.25, 3, 0]


@pytest.mark.parametrize("hook", ["accessed", "hinted", "completed", "released", "victims"])
def test_a_policy_may_write_to_the_arrays_that_it_gets_and_returns(hook):
    """The blocks of requests stay in the order of their sequences."""

    class Writes(MostRecent):
        def victims(self, count):
            self.chosen = super().victims(count)
            return self.chosen

    def write(policy, ids, *arguments):
        getattr(super(Writes, policy), hook)(ids, *arguments)
        ids[:] = ids[::-1].copy()

    def overwrite(policy, ids, hit):
        if not hit and hasattr(policy, "chosen"):
            policy.chosen[:] = policy.chosen[::-1].copy()

    setattr(Writes, "accessed" if hook == "victims" else hook, overwrite if hook == "victims" else write)
    managers = [pc.CacheManager(6, 4, policy) for policy in (MostRecent, Writes)]
    for number, tokens in enumerate([prompt(1, 6), prompt(2, 3), prompt(1, 6), prompt(3, 6), prompt(3, 6)]):
        tables = []
        for m in managers:
            allocation = m.allocate(number, tokens, priority=1)
            tables.append((allocation.block_ids.tolist(), m.block_table(number).tolist(), allocation.num_cached_tokens))
            m.commit(number, len(tokens))
            m.free(number)
            m.check()
        assert tables[0] == tables[1]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_random_traffic_keeps_every_policy_consistent(name):
    """In a pool that is always full, each policy's victims are released blocks, and none is chosen twice."""
    rng = np.random.default_rng(1)
    m = pc.CacheManager(64, block_size=4, policy=name)
    running = []
    for i in range(600):
        tokens = [int(rng.zipf(1.5)) % 50] * 4 * int(rng.integers(1, 4)) + [i] * int(rng.integers(0, 20))
        m.allocate(i, tokens, priority=int(rng.integers(0, 3)), ttl=None if i % 2 else 0.001)
        if rng.random() < 0.9:
            m.commit(i, len(tokens))
        running.append(i)
        if len(running) > 5:
            m.free(running.pop(int(rng.integers(0, 6))))
        if i % 20 == 0:
            m.check()
    assert m.stats().evictions > 500
    assert m.stats().hit_tokens > 0
    for i in running:
        m.free(i)
    m.check()
    m.reset()
    assert m.allocate("after", [1] * 256).block_ids.size == 64
    m.check()


def test_ghosts_recall_what_was_noted_lately():
    ghosts = pc.cache.policies.Ghosts(100)
    keys = np.random.default_rng(0).integers(0, 1 << 63, 50, dtype=np.uint64)
    assert (ghosts.recall(keys) == -1).all()
    ghosts.remember(keys, np.arange(50, dtype=np.int32))
    known = ghosts.recall(keys)
    assert np.count_nonzero(known == np.arange(50)) > 30
    assert set(known.tolist()) <= {-1, *range(50)}
    ghosts.clear()
    assert (ghosts.recall(keys) == -1).all()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_finds_the_last_block_among_held_ones(policy: str) -> None:
    # S3-FIFO once searched forever, because its main queue had only blocks in use.
    manager = pc.CacheManager(num_blocks=20, block_size=4, policy=policy)
    manager.allocate("held", list(range(40)))
    manager.commit("held", 40)
    for number, length in enumerate((36, 8)):
        manager.allocate(number, [100 + number] * length)
        manager.commit(number, length)
        manager.free(number)
    manager.allocate("many", [102] * 36)
    manager.allocate("last", [103] * 4)
    assert manager.stats().held_blocks == 20
    manager.check()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_asked_for_more_than_was_released_a_policy_says_so(name):
    m = pc.CacheManager(8, block_size=4, policy=name)
    serve(m, 1, [1] * 16)
    with pytest.raises((RuntimeError, IndexError)):
        m.pools[0].policy.victims(5)


def history(m):
    """Return the bytes of what is remembered for explanations, whose limits are those of docs/cache_misses.md."""
    count, history = m.pools[0].num_blocks, m._state.history
    assert history.nbytes <= max(64 * count, 1 << 16) + max(32 * count, 1 << 16)
    return history.nbytes


@pytest.mark.parametrize("name", ["lru", "hazard"])
@pytest.mark.parametrize("num_blocks", [10_000, 21_846, 100_000])  # 21,846: most table slots a block
def test_bookkeeping_stays_under_256_bytes_a_block_and_a_mebibyte(name, num_blocks):
    """The bytes include all that is counted, with a full pool and as many remembered hashes as allowed."""
    m = pc.CacheManager(num_blocks, block_size=16, policy=name)
    rng = np.random.default_rng(0)
    for i in range(3 * num_blocks // 1000):
        serve(m, i, rng.integers(0, 150_000, 16_000).astype(np.int32))
    assert m.stats().cached_blocks == num_blocks
    assert m.nbytes < 256 * num_blocks + (1 << 20) + history(m)
    assert m._state.memory.nbytes > 50 * num_blocks


def test_memory_for_ghosts_is_allocated_at_the_first_eviction():
    """While all prompts fit, no memory is allocated for the learned policy's evicted blocks, but for their hashes."""
    prompts = np.random.default_rng(0).integers(0, 150_000, (100, 1024)).astype(np.int32)
    m = pc.CacheManager(16_384, block_size=16, policy="hazard")
    for i in range(200):
        serve(m, i, prompts[i % 100])
    assert m._state.memory.nbytes > 9 * prompts.nbytes // 4  # tokens, and 32 bytes of hash for each 16 of them
    ghosts = m.pools[0].policy._ghosts
    assert not ghosts.nbytes
    for i in range(16):
        serve(m, i, np.arange(i << 16, (i << 16) + 16_384, dtype=np.int32))
    assert ghosts.nbytes > 0
    assert m.nbytes < 256 * 16_384 + (1 << 20) + history(m)


@pytest.mark.parametrize("shared", [0, 100])
def test_many_small_requests_stay_under_256_bytes_a_block_too(shared):
    """There is a request for every two blocks; the memory for requests and shared prefixes is bounded too."""
    num_blocks, most = 10_000, 0
    m = pc.CacheManager(num_blocks, block_size=1, policy="hazard")
    prefix = list(range(shared))
    for i in range(6000):
        serve(m, i, [*prefix, 1000 + i, 5])
        if i % 500 == 0:
            most = max(most, m.nbytes)
    assert m.stats().cached_blocks == num_blocks
    assert max(most, m.nbytes) < 256 * num_blocks + (1 << 20) + history(m)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_queues_do_not_grow_with_traffic(name):
    """A prompt that is served many times takes no more memory than one served as often as a policy remembers."""
    m = pc.CacheManager(64, block_size=4, policy=name)

    def most(count):
        used = 0
        for i in range(count):
            serve(m, i, prompt(1, 30))
            used = max(used, m.nbytes)
        return used

    before = most(1400)
    assert most(1400) <= before + 4 * (2 * 64 + 64)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_block_costs_the_same_in_a_large_pool(name):
    """With every block cached, an operation takes O(1) or O(log n) for each block, far less than 50 times as long."""
    costs = []
    for num_blocks in (10_000, 500_000):
        hasher = pc.cache.hashing.BlockHasher("blake2b", 16)
        pool = pc.cache.pool.BlockPool(num_blocks, hasher, POLICIES[name]())
        rng = np.random.default_rng(0)

        def request(count, pool=pool, rng=rng):
            ids = pool.take(np.arange(1, count + 1, dtype=np.int32))
            pool.publish(ids, rng.integers(1, 1 << 63, (count, 4), np.uint64))
            pool.release(ids)

        for _ in range(10):
            request(num_blocks // 10)
        assert pool.num_cached == num_blocks
        times = []
        for _ in range(40):
            began = time.thread_time_ns()
            request(16)
            times.append(time.thread_time_ns() - began)
        costs.append(min(times))
    assert costs[1] < 4 * costs[0]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "got None, needs a 1-D array"),
        ([0, 1], r"got \[0, 1\], needs a 1-D array"),
        (np.zeros((2, 1), np.int32), "needs a 1-D array"),
        (np.array([0.0, 1.0]), "needs a 1-D array"),
        (np.array([0], np.int32), "got 1, needs 2 blocks"),
        (np.array([-1, 0], np.int32), "got blocks -1 to 0, needs 0 to 7"),
        (np.array([0, 8]), "got blocks 0 to 8, needs 0 to 7"),
        (np.array([1, 1], np.int32), "got a block twice"),
        (np.array([1, 3], np.int32), "got a block that is referenced"),
    ],
    ids=str,
)
def test_an_engine_gets_no_wrong_victims_of_a_policy(answer, told):
    manager = pc.CacheManager(8, 4, type("Mine", (pc.EvictionPolicy,), {"victims": lambda self, count: answer}))
    for request, num_tokens in (("a", 12), ("holds block 3", 4)):
        manager.allocate(request, [len(request)] * num_tokens)
        manager.commit(request, num_tokens)
    manager.free("a")
    with pytest.raises(RuntimeError, match=r"(?s)Mine\.victims: .*" + told):
        choose(manager.pools[0].policy, 2)
