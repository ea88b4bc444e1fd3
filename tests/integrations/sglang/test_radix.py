"""Our policies with SGLang's radix cache and allocator, called like SGLang's scheduler does, without a model."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="sglang is not installed: make sglang")

from sglang_traffic import Traffic, conversations

from benchmarks.engines import sglang_radix
from pc.cache.replay import replay
from pc.integrations.hints import retention_hints
from pc.integrations.sglang import enable

POOL = 128
"""Pages: room for four requests, and for few other pages."""


@pytest.fixture(scope="module", autouse=True)
def _registered():
    enable("eviction")


@pytest.mark.parametrize("policy", ["pc_default", "pc_lru", "pc_fifo", "pc_priority"])
@pytest.mark.parametrize("seed", [0, 1])
def test_random_traffic_conserves_everything(policy, seed):
    traffic = Traffic(policy, "pc", POOL, seed)
    for blocks in conversations(seed, 150).requests:
        traffic.step(blocks.tolist())
        traffic.check()
    while traffic.running:
        traffic.end(traffic.running[0])
    traffic.check()
    assert sum(traffic.hits) > 0
    cache = traffic.cache
    assert cache.full_protected_size() == 0
    free = cache.token_to_kv_pool_allocator.available_size()
    assert free + cache.full_evictable_size() == POOL * sglang_radix.PAGE


def test_everything_can_be_evicted_and_the_tree_begins_anew():
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    traffic = Traffic("pc_default", "pc", POOL, 0)
    for blocks in conversations(0, 30).requests:
        traffic.step(blocks.tolist())
    while traffic.running:
        traffic.end(traffic.running[0])
    traffic.cache.evict(EvictParams(num_tokens=1 << 20))
    traffic.check()
    assert traffic.cache.token_to_kv_pool_allocator.available_size() == POOL * sglang_radix.PAGE
    traffic.cache.reset()
    traffic.cache.token_to_kv_pool_allocator.clear()
    for blocks in conversations(1, 30).requests:
        traffic.step(blocks.tolist())
        traffic.check()


@pytest.mark.parametrize("policy", ["pc_lru", "pc_default"])
def test_no_more_pages_are_evicted_than_were_asked_for(policy):
    """`evict` names no room that the allocator needs, so only the number of tokens ends it."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    traffic = Traffic(policy, "pc", POOL, 0)
    for blocks in conversations(0, 30).requests:
        traffic.step(blocks.tolist())
    while traffic.running:
        traffic.end(traffic.running[0])
    page, before = sglang_radix.PAGE, traffic.cache.full_evictable_size()
    for asked, pages in ((1, 1), (page, 1), (page + 1, 2), (5 * page, 5)):
        assert traffic.cache.evict(EvictParams(num_tokens=asked)).num_tokens_evicted == pages * page
        traffic.check()
    assert traffic.cache.full_evictable_size() == before - 9 * page


@pytest.mark.parametrize("policy", ["lru", "default", "priority"])
def test_hits_are_those_of_a_replay(policy):
    """With single requests, hits are those of a replay, except for SGLang's last tokens, which have their own pages."""
    trace = conversations(3, 300)
    found = sglang_radix.run(trace, (f"pc_{policy}", "pc"), 148)
    assert found.hit_rate == pytest.approx(replay(trace, policy, 148).hit_rate, rel=0.02)


def test_half_of_a_leaf_is_enough():
    """If few pages are requested, the end of a long prompt is evicted and its beginning stays."""
    traffic = Traffic("pc_lru", "pc", 32, 0, at_once=1)
    traffic.rand = SimpleNamespace(random=lambda: 0.5, randrange=lambda n: 0, randint=lambda a, b: 1)
    traffic.step(list(range(20)))
    traffic.step(list(range(100, 115)))
    traffic.step(list(range(20)))
    traffic.check()
    page = sglang_radix.PAGE
    assert traffic.hits == [0, 0, 16 * page]
    whole = Traffic.__new__(Traffic)
    whole.__dict__ |= traffic.__dict__ | {"cache": sglang_radix.make_cache("lru", "python", 32, 1, 1 << 12)}
    whole.hits, whole.running, whole.rows = [], [], [1]
    for blocks in (range(20), range(100, 115), range(20)):
        whole.step(list(blocks))
    assert whole.hits == [0, 0, 0]


def context(policy, **changes):
    """Return the context from which SGLang makes a radix cache."""
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    made = sglang_radix.make_cache("lru", "python", POOL, 4, 1 << 12)
    fields = {field.name: None for field in dataclasses.fields(TreeCacheBuildContext)}
    fields |= dict.fromkeys(
        ("is_hybrid_swa", "is_hybrid_ssm", "enable_hierarchical_cache", "disable_radix_cache"), False
    )
    params = sglang_radix.init_params(policy, None, made.token_to_kv_pool_allocator, made.req_to_token_pool)
    return TreeCacheBuildContext(**fields | {"params": params} | changes)


@pytest.fixture
def make(monkeypatch):
    """Return SGLang's choice of a radix cache with ours before it, and the calls that were left to SGLang."""
    from sglang.srt.mem_cache import registry

    from pc.integrations.sglang.eviction import make_cache

    memory = SimpleNamespace(enable_lmcache=False, enable_flexkv=False, enable_unified_cache_external_linker=False)
    monkeypatch.setattr("sglang.srt.runtime_context.get_memory", lambda: memory)
    monkeypatch.setattr(registry, "get_memory", lambda: memory)
    none = SimpleNamespace(disaggregation_decode_retraction_backup=None)
    monkeypatch.setattr(registry, "get_disagg", lambda: none)
    return lambda each: make_cache(each, registry.create_unified_radix_cache)


def test_pc_lru_evicts_as_sglangs_lru(make):
    """pc_lru makes the same object as SGLang's lru, so it makes the same evictions; here they are compared."""
    ours, own = (make(context(policy)) for policy in ("pc_lru", "lru"))
    assert type(ours) is type(own)
    assert type(ours.tree_core) is type(own.tree_core)
    found = []
    for cache in (ours, own):
        traffic = Traffic("lru", "python", POOL, 5)
        traffic.cache = cache
        for blocks in conversations(5, 200).requests:
            traffic.step(blocks.tolist())
            traffic.hits.append(int(cache.token_to_kv_pool_allocator.available_size()))
        found.append(traffic.hits)
    assert found[0] == found[1]
    assert sum(found[0][::2]) > 0


def test_ours_is_chosen_by_the_policys_name_alone(make):
    from pc.integrations.sglang.eviction import PolicyRadixCache

    assert type(make(context("pc_default"))) is PolicyRadixCache
    assert type(make(context("lru"))) is not PolicyRadixCache
    off = context("pc_default", disable_radix_cache=True)
    off.params.disable = True
    assert type(make(off)) is not PolicyRadixCache


def test_what_is_not_served_is_refused(make):
    from sglang.srt.mem_cache.utils import get_eviction_strategy

    with pytest.raises(ValueError, match="pc_default: got enable_hierarchical_cache"):
        make(context("pc_default", enable_hierarchical_cache=True))
    with pytest.raises(ValueError, match="pc_default: got a model with sliding windows, needs"):
        make(context("pc_default", is_hybrid_swa=True))
    configured = context("pc_default")
    configured.params.eviction_policy_config = {"threshold": 1}
    with pytest.raises(ValueError, match="pc_default: got eviction_policy_config, needs none"):
        make(configured)
    with pytest.raises(ValueError, match="pc_default: got a cache that asks for a single leaf"):
        get_eviction_strategy("pc_default")


def test_hints_of_callers_reach_the_policy():
    """SGLang passes the same envelope as vLLM. Pages with a priority outlive younger ones."""
    page = sglang_radix.PAGE
    for hinted in (False, True):
        traffic = Traffic("pc_priority", "pc", 32, 0, at_once=1)
        traffic.rand = SimpleNamespace(random=lambda: 0.5, randrange=lambda n: 0, randint=lambda a, b: 1)
        kept = sglang_radix.Request(0, np.append(np.arange(10 * page), 1 << 30), np.array([1]), 1)
        if hinted:
            kept.kv_hints = retention_hints(priority=5)
        sglang_radix.admit(traffic.cache, kept)
        sglang_radix.compute(traffic.cache, kept)
        sglang_radix.finish(traffic.cache, kept)
        for begin in (100, 200, 300):
            traffic.step(list(range(begin, begin + 18)))
        traffic.step(list(range(10)))
        assert traffic.hits[-1] == (10 * page if hinted else 0)
        traffic.check()


def test_a_hint_that_cannot_be_read_is_reported_and_ignored(caplog):
    traffic = Traffic("pc_default", "pc", 32, 0, at_once=1)
    request = sglang_radix.Request(0, np.arange(33), np.array([1]), 1)
    request.kv_hints = retention_hints(priority=5)
    request.kv_hints["actions"][0]["payload"]["priority"] = "high"
    sglang_radix.admit(traffic.cache, request)
    with caplog.at_level("WARNING", "sglang.pc"):
        sglang_radix.compute(traffic.cache, request)
    assert "kv_hints of request 0 are ignored: priority: got str" in caplog.text


def test_a_hint_that_expires_is_ignored_with_several_ranks(caplog):
    """Each rank reads its own clock, so ranks would choose other victims when a hint expires between two of them."""
    page = sglang_radix.PAGE
    for ranks, kept in ((1, 10), (2, 0)):
        traffic = Traffic("pc_priority", "pc", 32, 0, at_once=1)
        traffic.rand = SimpleNamespace(random=lambda: 0.5, randrange=lambda n: 0, randint=lambda a, b: 1)
        traffic.cache.num_ranks = ranks
        first = sglang_radix.Request(0, np.append(np.arange(10 * page), 1 << 30), np.array([1]), 1)
        first.kv_hints = retention_hints(priority=5, ttl=3600)
        sglang_radix.admit(traffic.cache, first)
        with caplog.at_level("WARNING", "sglang.pc"):
            sglang_radix.compute(traffic.cache, first)
        assert ("request 0 are ignored: ttl needs an engine of one rank" in caplog.text) == (ranks > 1)
        sglang_radix.finish(traffic.cache, first)
        for begin in (100, 200, 300):
            traffic.step(list(range(begin, begin + 18)))
        traffic.step(list(range(10)))
        assert traffic.hits[-1] == kept * page
    for field in ("pp_size", "attn_cp_size"):
        params = dataclasses.replace(context("pc_priority").params, **{field: 2})
        assert type(traffic.cache)(params).num_ranks == 2


def test_hints_of_a_chunk_that_the_tree_declines_go_to_the_locked_pages():
    """A streaming session sets `last_node` to a node that is not in the tree. An insertion may leave it there."""
    traffic, hinted = Traffic("pc_priority", "pc", 32, 0, at_once=1), []
    request = sglang_radix.Request(0, np.arange(33), np.array([1]), 1)
    request.kv_hints = retention_hints(priority=5)
    sglang_radix.admit(traffic.cache, request)
    sglang_radix.compute(traffic.cache, request)
    request.last_node = object()
    traffic.cache.tree_core.pages.policy.hinted = lambda ids, priority, ttl: hinted.append(len(ids))
    traffic.cache.checkpoint(request, up_to=0)
    assert hinted == [2]


def test_the_hit_of_each_request_is_reported():
    """Of requests that share a prefix and run together, too."""
    page, traffic, hits = sglang_radix.PAGE, Traffic("pc_lru", "pc", POOL, 0), []

    def request(number):
        own = np.arange(page) + 1000 * (1 + number)
        return sglang_radix.Request(number, np.append(np.arange(8 * page), own), np.array([1]), 1 + number % 4)

    first = request(4)
    sglang_radix.admit(traffic.cache, first)
    sglang_radix.compute(traffic.cache, first)
    sglang_radix.finish(traffic.cache, first)
    policy = traffic.cache.tree_core.pages.policy
    policy.accessed = lambda ids, hit: hits.append(len(ids)) if hit else None
    together = [request(number) for number in range(4)]
    for each in together:
        sglang_radix.admit(traffic.cache, each)
    for each in together:
        sglang_radix.compute(traffic.cache, each)
    assert hits == [8] * 4


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("eagle", [False, True])
def test_pages_are_identified_as_sglangs_tree_identifies_them(page, eagle):
    """With EAGLE the tree's keys are pairs of tokens, so the token after a page belongs to the page."""
    from array import array

    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    params = dataclasses.replace(context("pc_default").params, page_size=page, is_eagle=eagle)
    found = []
    for last in (50, 50, 60):
        cache = Traffic("pc_default", "pc", POOL, 0).cache.__class__(params)
        tokens = array("q", [*range(2 * page), last])
        cache.insert(InsertParams(key=RadixKey(tokens[: 2 * page + eagle]), value=torch.arange(2 * page)))
        (node,) = cache.tree_core.root_node.children.values()
        found.append(cache.tree_core.pages.keys_of(node.pc_pages).tolist())
    assert len(set(found[0])) == 2
    assert found[0] == found[1]
    assert [same == other for same, other in zip(found[0], found[2], strict=True)] == [True, not eagle]


def test_pages_that_are_held_otherwise_are_passed_over():
    """SGLang can pin a node without a request's lock."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    traffic = Traffic("pc_lru", "pc", POOL, 0, at_once=1)
    traffic.rand = SimpleNamespace(random=lambda: 0.5, randrange=lambda n: 0, randint=lambda a, b: 1)
    for begin in (0, 100):
        traffic.step(list(range(begin, begin + 8)))
    traffic.end(traffic.running[0])
    cache, page = traffic.cache, sglang_radix.PAGE
    key = RadixKey(sglang_radix.Request(9, np.arange(8 * page), np.array([1]), 1).fill_ids, None)
    pinned = cache.match_prefix(MatchPrefixParams(key=key)).last_device_node
    cache.tree_core.inc_full_pin(pinned)
    assert cache.evict(EvictParams(num_tokens=page)).num_tokens_evicted == page
    assert cache.evict(EvictParams(num_tokens=1 << 20)).num_tokens_evicted == 7 * page
    cache.tree_core.dec_full_pin(pinned)
    assert cache.evict(EvictParams(num_tokens=1 << 20)).num_tokens_evicted == 8 * page
    traffic.check()


def test_a_policy_that_chooses_badly_is_an_error():
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    traffic = Traffic("pc_lru", "pc", 32, 0, at_once=1)
    traffic.rand = SimpleNamespace(random=lambda: 0.5, randrange=lambda n: 0, randint=lambda a, b: 1)
    traffic.step(list(range(8)))
    traffic.end(traffic.running[0])
    traffic.cache.tree_core.pages.policy.victims = lambda count: np.zeros(0, np.int32)
    with pytest.raises(RuntimeError, match=r"LRU\.victims: got 0, needs 1 blocks"):
        traffic.cache.evict(EvictParams(num_tokens=1))
