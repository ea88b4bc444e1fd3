"""The learned policy: which blocks it keeps, what it counts, and that wrong calls confuse it only for a while."""

from __future__ import annotations

import random
import types

import numpy as np
import pytest
from cache_cases import cached_of, serve
from processes import in_threads

import pc
from pc.cache.policies import Ghosts, Hazard
from pc.cache.policies.ghosts import NOTE_BITS
from pc.cache.policies.hazard.guard import ShadowGuard
from pc.cache.policies.hazard.model import AGES, EDGES, HazardModel, _count_cells
from pc.cache.policies.hazard.policy import _pieces
from pc.cache.policies.hazard.runs import USES, RunTable
from pc.cache.replay import Trace, replay


def trace_of(requests):
    requests = [np.array(r, np.int64) for r in requests]
    return Trace("t", 16, requests, [100] * len(requests), [0.0] * len(requests))


def rounds(count, documents=60, scans=4):
    """A few documents in turn, each between many that are never used again. Lru keeps none of them."""
    for i in range(count):
        if i % (scans + 1) == 0:
            document = i // (scans + 1) % documents
            yield [100 * document + k for k in range(8)]
        else:
            yield [10**6 + 100 * i + k for k in range(8)]


def test_learns_what_comes_back_after_lru_has_lost_it():
    trace = trace_of(rounds(1500))
    lru, hazard = replay(trace, "lru", 1200), replay(trace, "hazard", 1200)
    assert lru.hit_rate == 0
    assert hazard.hit_rate > 0.05


def agents(turns=20, beside=8):
    """Sessions in turn, each turn of which extends its prompt. Lru keeps none of them."""
    return [[10_000 * session + k for k in range(20 + 2 * turn)] for turn in range(turns) for session in range(beside)]


def test_of_sessions_in_turn_some_are_kept_whole():
    """The hits reach 80 % of Belady's, although there are only 160 requests to learn from."""
    trace = trace_of(agents())
    assert replay(trace, "lru", 130).hit_rate == 0
    assert replay(trace, "hazard", 130).hit_rate > 0.8 * replay(trace, "belady", 130).hit_rate > 0.2


def test_the_guard_hands_over_to_lru_when_the_past_says_the_opposite():
    """Documents that were reused never are again, and those that never were are reused at once."""
    first = list(rounds(1500))
    then = [[10**8 + 100 * (i // 2) + k for k in range(8)] for i in range(1500)]
    trace = trace_of(first + then)
    policy = Hazard()
    lru, hazard = replay(trace, "lru", 1200), replay(trace, policy, 1200)
    assert hazard.hit_rate > 0.99 * lru.hit_rate


def judged(guard, *changes):
    """Return which order is in force after each change of the pool's lead and of the learned order's lead."""
    for pool, learned in changes:
        guard._pool_lead += pool
        guard._lead += learned
        guard.judge(0, RunTable())
        yield guard.learned


def guard_of(capacity, size=20):
    guard = ShadowGuard(capacity)
    guard._mean = float(size)
    guard.learned = guard._begun = True
    return guard


def test_lru_is_in_force_until_blocks_are_used_again_and_the_learned_order_is_not_behind():
    guard = guard_of(1000)
    guard.learned = guard._begun = False
    assert list(judged(guard, (0, 0), (0, 9))) == [False, False]
    guard._used = 20
    assert list(judged(guard, (0, -10), (0, 1), (0, -9))) == [False, True, True]
    assert guard.switches == 0


def test_the_learned_order_is_in_force_while_its_lead_excuses_what_the_pool_lost():
    guard = guard_of(1000)  # a slack of 50 hits, and leads of up to 125
    assert list(judged(guard, (-50, -50), (-1, -1), (0, 51), (0, 1))) == [True, False, False, True]
    assert guard.switches == 1


@pytest.mark.parametrize(("capacity", "limit"), [(8, 100), (1000, 125), (80_000, 200)])
def test_old_hits_do_not_hide_losses_for_long(capacity, limit):
    guard = guard_of(capacity)
    assert list(judged(guard, (10**6, 10**6))) == [True]
    assert guard._pool_lead == guard._lead == limit
    guard._pool_lead = guard._lead = 0.0
    assert list(judged(guard, (-(10**6), -(10**6)), (0, 3 * limit))) == [False, True]
    assert guard._pool_lead == -limit


def chats_in_turn(seed=3):
    """A few conversations that grow, of which few fit. Some return at once, some in turn."""
    r = random.Random(seed)
    chats: list[list[int]] = [[] for _ in range(4)]
    for i in range(600):
        at = r.randrange(4) if r.random() < 0.5 else i // 6 % 4
        chats[at] = [1000 * i] if len(chats[at]) > 40 else [*chats[at], *range(1000 * i, 1000 * i + r.randrange(1, 6))]
        yield chats[at]


def flipping():
    """Documents that return late, then at once, then late again, so that a policy has learned the wrong rule."""
    for part in range(4):
        if part % 2:
            yield from ([10**8 * part + 100 * (i // 2) + k for k in range(8)] for i in range(400))
        else:
            yield from ([10**8 * part + k for k in request] for request in rounds(400, documents=20))


TRAFFIC = [(chats_in_turn, 45), (chats_in_turn, 60), (chats_in_turn, 130), (flipping, 150), (flipping, 400)]
TRAFFIC += [(lambda: rounds(800, documents=6), 400), (agents, 130), (agents, 60)]


def hits_of(trace, policy, capacity):
    hits: list[int] = []
    replay(trace, policy, capacity, hits_of_each=hits)
    return sum(hits)


def always(monkeypatch, learned):
    """Let one order be in force from the start, whatever the guard sees."""
    begin = ShadowGuard.__init__

    def fixed(self, capacity):
        begin(self, capacity)
        self.learned = learned

    monkeypatch.setattr(ShadowGuard, "__init__", fixed)
    monkeypatch.setattr(ShadowGuard, "judge", lambda self, number, runs: None)


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize(("requests", "capacity"), TRAFFIC)
def test_the_guard_counts_exactly_what_lru_would_hit(monkeypatch, requests, capacity, learned):
    trace, policy = trace_of(requests()), Hazard()
    always(monkeypatch, learned)
    lru, ours = hits_of(trace, "lru", capacity), hits_of(trace, policy, capacity)
    policy._drain()
    assert policy.guard._pool_lead == ours - lru
    if not learned:
        assert ours == lru


@pytest.mark.parametrize("capacity", [45, 60, 130])
def test_the_shadow_cache_hits_what_the_learned_order_would_hit(monkeypatch, capacity):
    trace, policy = trace_of(chats_in_turn()), Hazard()
    with monkeypatch.context() as patch:
        always(patch, learned=False)
        lru = hits_of(trace, policy, capacity)
        policy._drain()
    always(monkeypatch, learned=True)
    learned = hits_of(trace, Hazard(), capacity)
    assert lru + policy.guard._lead == pytest.approx(learned, rel=0.04)
    assert learned != lru


@pytest.mark.parametrize(("requests", "capacity"), TRAFFIC)
def test_the_guard_loses_little_against_lru(requests, capacity):
    trace = trace_of(requests())
    assert hits_of(trace, Hazard(), capacity) >= 0.995 * hits_of(trace, "lru", capacity)


def growing(count, rng):
    """Concurrent conversations. Each turn continues one of the turns before, not always the last."""
    turns = [[] for _ in range(12)]
    for i in range(count):
        chat = turns[int(rng.integers(0, len(turns)))]
        before = chat[int(rng.integers(0, len(chat)))] if chat else []
        chat.append(before + [1000 * i + k for k in range(int(rng.integers(1, 9)))])
        yield chat[-1]


def whole(count, rng, prompts=40, blocks=5):
    """A few prompts, each of which is repeated many times."""
    return [[1000 * i + k for k in range(blocks)] for i in rng.integers(0, prompts, count).tolist()]


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize(
    "prompts",
    [growing, whole, lambda count, rng: whole(count, rng, 6, 300), lambda count, rng: whole(count, rng, 30, 1)],
    ids=["growing", "whole", "long", "short"],
)
def test_what_is_drained_together_comes_to_the_same_as_one_by_one(monkeypatch, prompts, at_once):
    from pc.cache.policies.hazard import policy

    states = []
    for requests in (1, 512):
        monkeypatch.setattr(policy, "LOG_REQUESTS", requests)
        rng = np.random.default_rng(0)
        m = pc.CacheManager(4000, block_size=4, policy="hazard")
        running = []
        for i, prompt in enumerate(prompts(230, rng)):
            m.allocate(i, np.repeat(prompt, 4))
            running.append(i)
            if len(running) == at_once:
                ended = running.pop(int(rng.integers(0, at_once)))
                m.commit(ended, m.num_tokens(ended))
                m.free(ended, [None, 0, 0.7][i % 3])
        m.check()
        hazard = m.pools[0].policy
        hazard._drain()
        m.check()
        runs = hazard.runs
        runs.shared = np.maximum(runs.shared, runs.start)  # a run no longer has what another run took over
        columns = ["serial", "start", "end", "size", "bounds", "last", "owned", "shared", "stratum", "covariates"]
        blocks = ["_owner", "_forked"]
        if at_once == 1:  # otherwise a request may release blocks in one batch with the request it continues
            columns, blocks = [*columns, "parent"], [*blocks, "_child_count", "_previous"]
        state = {name: getattr(runs, name)[: runs.count].tolist() for name in columns}
        state |= {name: getattr(hazard, name).tolist() for name in blocks}
        if at_once == 1:
            for prompt in prompts(230, np.random.default_rng(0)):
                ids = m.allocate("look", np.repeat(prompt, 4)).block_ids
                m.free("look")
                assert (hazard._previous[ids[1:]] == ids[:-1]).all()
        for name in ("_pool_lead", "_lead", "_inside", "_edge"):
            state[name] = getattr(hazard.guard, name)
        states.append(state)
        assert hazard.guard._lead == 0  # nothing was evicted: lru hit as much
    assert states[0] == states[1]


@pytest.mark.parametrize("batch", [1, 5, 60])
def test_the_log_knows_of_each_hit_who_had_the_blocks(batch):
    """Compare chains that overlap anywhere with a loop over single blocks."""
    rng = np.random.default_rng(batch)
    expected, told, found, counted = np.full(40, -1), [], [], []
    policy = Hazard()
    policy.bind(types.SimpleNamespace(num_blocks=40, access_count=np.ones(40, np.int32)))
    policy._log_limit = 10_000
    for now in range(240):
        ids = rng.permutation(40)[: int(rng.integers(1, 8))].astype(np.int32)
        if now % 3 == 0:  # consecutive blocks
            ids = (int(rng.integers(0, 30)) + np.arange(10)).astype(np.int32)
        hit = ids[: ids.size if now % 2 else int(rng.integers(0, ids.size + 1))]
        if now < 120 and not rng.integers(0, 8):  # a request that hits other blocks, and does not end yet
            hit = np.array([7, 11], np.int32)
        if hit.size:
            policy.accessed(hit, True)
        for block in hit.tolist():
            told.append((int(expected[block]), now))
            expected[block] = -1
        policy.released(ids)
        counted += [hit.size, ids.size]
        expected[ids] = (now << policy._place_bits) + np.arange(ids.size)
        if now % batch == batch - 1:
            policy._update_owners()
            assert (policy._owner == expected).all()
    for first, size, time in zip(*_pieces(policy._hits), strict=True):
        found += [(first + k if first >= 0 else -1, time) for k in range(size)]
    assert found == told
    assert 12 * policy._num_logged == policy.nbytes - super(Hazard, policy).nbytes == 12 * sum(counted)


def test_what_is_hit_while_others_hold_it_is_noted_within_bounds():
    m = pc.CacheManager(64, block_size=4, policy="hazard")
    policy = m.pools[0].policy
    serve(m, "first", [1] * 64)
    m.allocate("holds it all", [1] * 64)
    sizes = set()
    for i in range(300):
        assert serve(m, i, [1] * 64) == 63
        sizes.add(policy._num_logged)
    assert 100 < max(sizes) <= policy._log_limit + 32
    m.free("holds it all")
    m.check()
    assert serve(m, "again", [1] * 64) == 63


def test_rates_learned_after_a_long_time_are_not_made_up_for_by_the_factors():
    """All observations of the first thousand requests come at once, and are 50 times the assumed rate."""
    for stale in (False, True):
        model = HazardModel(RunTable())
        one = np.zeros(1, np.intp)
        lives = np.zeros((1, 2 * USES))
        lives[0, 0] = 1000.0
        model.reuse(one, one, one, np.array([EDGES[6]]), np.array([500.0]))
        model.expose(one, one, np.array([0.0]), np.array([EDGES[8]]), lives, stale)
        model.fit(1.0)
        factor = model.factor[0] * model.factor[8] * model.factor[16]
        assert (factor < 4) == stale


@pytest.mark.parametrize("returns", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_hint_that_is_no_probability_is_refused(returns):
    m = pc.CacheManager(4, block_size=4)
    m.allocate("a", [1] * 8)
    with pytest.raises(ValueError, match=r"returns: got .*needs 0 to 1"):
        m.free("a", returns)
    for wrong in ("1", True, [0.5], np.True_, np.array(0.5), 1j):
        with pytest.raises(TypeError, match="returns: got"):
            m.free("a", wrong)
    assert m.num_tokens("a") == 8
    m.free("a", np.float32(0.5))


def test_bookkeeping_survives_2_to_the_31_requests():
    for name in ("hazard", "lru"):
        m = pc.CacheManager(16, block_size=4, policy=name)
        policy = m.pools[0].policy
        if name == "hazard":
            policy._now = policy._last_fit = policy.guard._edge = (1 << 31) - 20
        for i in range(60):
            serve(m, i, [i % 7] * 16)
        m.check()


def test_random_access_patterns_leave_every_victim_findable():
    """Gaps, forks and rollbacks split runs into pieces; still every block can be evicted."""
    rng = np.random.default_rng(0)
    m = pc.CacheManager(48, block_size=4, policy="hazard")
    for i in range(400):
        tokens = [int(rng.integers(0, 5))] * 4 * int(rng.integers(1, 5)) + [i % 9] * 4 * int(rng.integers(0, 5))
        m.allocate(i, tokens, reuse="gap" if i % 2 else "prefix")
        m.commit(i, len(tokens))
        if i % 3 == 0:
            m.fork(i, ("child", i))
            m.append(("child", i), [7] * 5)
            m.free(("child", i), returns=float(rng.integers(0, 2)))
        if i % 5 == 0:
            m.rollback(i, 2)
        m.free(i, returns=None if i % 4 else 0)
        if i % 50 == 0:
            m.check()
    assert m.allocate("all", list(range(1000, 1000 + 48 * 4))).block_ids.size == 48
    m.check()


@pytest.mark.parametrize(
    "broken",
    [
        lambda p: p._child_count.__setitem__(0, 7),
        lambda p: p._owner.__setitem__((p._owner >= 0).nonzero()[0][:2], 0),
        lambda p: p.runs.last.__setitem__(p.runs.nonempty()[0], 99),
        lambda p: setattr(p.runs, "places", -1),
        lambda p: p.runs.serial.__setitem__(0, 1 << 40),
    ],
    ids=["child_count", "owner", "last", "places", "serial"],
)
def test_check_covers_the_state_of_the_policy(broken):
    m = pc.CacheManager(32, block_size=4, policy="hazard")
    for i in range(40):
        serve(m, i, [i % 7] * 8 + [i] * 4)
    policy = m.pools[0].policy
    policy._drain()
    m.check()
    broken(policy)
    with pytest.raises(AssertionError):
        m.check()


def test_a_policy_that_failed_once_goes_on(monkeypatch, cache_errors):
    """Logged requests are not drained twice, so one failure does not cause further ones."""
    m = pc.CacheManager(32, block_size=4, policy="hazard")
    policy = m.pools[0].policy
    with monkeypatch.context() as failing:
        failing.setattr(policy.guard, "follow", lambda *_: 1 / 0)
        for i in range(30):
            serve(m, i, [i] * 8)
    assert cache_errors
    cache_errors.clear()
    for i in range(30, 60):
        serve(m, i, [i] * 8)
    assert not policy._hits
    assert policy.runs.count > 5
    assert cached_of(m, [59] * 8) == 8


def test_requests_of_several_threads_with_preemption_and_resets_leave_the_state_whole():
    m = pc.CacheManager(64, block_size=4, policy="hazard")

    def work(thread):
        rng = np.random.default_rng(thread)
        for i in range(120):
            name = thread, i
            tokens = [int(rng.zipf(1.5)) % 20] * 4 * int(rng.integers(1, 5)) + [1000 * thread + i] * 4
            m.allocate(name, tokens, reuse="gap" if i % 3 == 0 else "prefix")
            m.commit(name, len(tokens))
            if i % 7 == 0:
                m.preempt(name)
                m.resume(name)
            m.free(name, [None, 0, np.float32(0.7)][i % 3])

    for _ in range(2):
        in_threads(work, *range(3))
        assert m.stats().evictions > 100
        m.check()
        m.reset()
        m.check()
        assert m.pools[0].policy.runs.count == 0
    assert serve(m, "after", [1] * 256) == 0
    assert serve(m, "again", [1] * 256) == 255


def test_ghosts_of_the_oldest_requests_give_way():
    ghosts = Ghosts(64, ways=8)
    keys = np.random.default_rng(0).integers(0, 1 << 63, 400, dtype=np.uint64)
    begin = (1 << 28) - 200  # times wrap around in the middle
    for i in range(0, 400, 20):
        ghosts.remember(keys[i : i + 20], np.full(20, begin + i << NOTE_BITS | 15), begin + i)
    recalled = ghosts.recall(keys)
    known, numbers = ghosts.take(keys)
    assert known.min() >= 200
    assert set(range(380, 400)) <= set(known.tolist())
    assert (numbers == (begin + known // 20 * 20 << NOTE_BITS | 15) & 0xFFFFFFFF).all()
    assert (recalled[known] == numbers).all()
    assert np.count_nonzero(recalled >= 0) == known.size
    assert (ghosts.recall(keys) == -1).all()


def test_evicted_blocks_that_come_again_are_counted_by_request(monkeypatch):
    """Counting one by one would be slow: with prompts of 300 blocks, each fit would look at ten thousand intervals."""
    intervals, recalled = [], []
    expose, again = HazardModel.expose, HazardModel.recalled
    monkeypatch.setattr(HazardModel, "expose", lambda self, *a: intervals.append(a[0].size) or expose(self, *a))
    monkeypatch.setattr(HazardModel, "recalled", lambda self, *a: recalled.append(a[0].size) or again(self, *a))
    requests = [[1000 * (i % 20) + k for k in range(300)] for i in range(800)]
    replay(trace_of(requests), "hazard", 5000)
    assert sum(recalled) > 40_000
    assert max(intervals) <= 3 * 50 + 20


def test_blocks_are_counted_by_their_uses_and_as_last_blocks():
    """Compare with a loop over single blocks, for parts of chains and for whole chains."""
    rng = np.random.default_rng(0)
    size = rng.integers(1, 12, 200).astype(np.int32)
    bounds = -np.sort(-rng.integers(0, size + 1, (3, 200)), axis=0)  # blocks used at least 2, 3 and 5 times
    first, last = np.sort(rng.integers(0, size + 1, (2, 200)), axis=0)
    first[:50], last[:50] = 0, size[:50]
    expected = np.zeros((200, 2 * USES), np.intp)
    for row in range(200):
        for place in range(first[row], last[row]):
            uses = sum(place < bound for bound in bounds[:, row])
            expected[row, 2 * uses + (place == size[row] - 1)] += 1
    some = last > first  # a use has one block or more
    assert (_count_cells(first, last, size, bounds)[some] == expected[some]).all()


def test_rates_are_what_was_seen():
    model = HazardModel(RunTable())
    one = np.zeros(1, np.intp)
    lives = np.zeros((1, 2 * USES))
    lives[0, 0] = 1000.0
    for _ in range(200):
        model.expose(one, one, np.array([0.0]), np.array([EDGES[8]]), lives)
        model.reuse(one, one, one, np.array([EDGES[6]]), np.array([30.0]))
        model.fit(1.0)
    width = EDGES[7] - EDGES[6]
    rate = model.rate[0, 6] * model.factor[0] * model.factor[8] * model.factor[16]
    assert rate == pytest.approx(30 / (1000 * width), rel=0.1)
    assert model.rate[0, 7] < 0.1 * model.rate[0, 6]
    here, there, long_ago = (model.score(0, 0, age) for age in (int(EDGES[5]), int(EDGES[7]), 1 << 20))
    assert there < here
    assert long_ago > 0
    ages = np.array([1 << 20, int(EDGES[7]), int(EDGES[5])])
    assert model.scores(one.repeat(3), one.repeat(3), ages) == pytest.approx([long_ago, there, here], rel=1e-5)
    assert model.scores(one.repeat(2), one.repeat(2), ages[1:]) == pytest.approx([there, here], rel=1e-5)
    assert model.rate.shape[1] == AGES
