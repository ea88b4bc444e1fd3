"""Policies in vLLM's tier in host memory: what they evict, and that no chunk is lost."""

from __future__ import annotations

import functools
import random
from types import SimpleNamespace

import pytest

pytest.importorskip(
    "vllm", minversion="0.33", reason="needs vLLM 0.33, which takes policies from outside: make vllm-quick"
)

from vllm.v1.kv_offload.base import LookupResult, ReqContext, get_offload_block_hash, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from benchmarks.engines import vllm_replay
from pc.cache.policies import POLICIES
from pc.integrations.hints import retention_hints
from pc.integrations.vllm.offload import OffloadPolicy, policy_class

MODULE = "pc.integrations.vllm.offload"
CHUNK = 32  # tokens
make_context = functools.partial(vllm_replay.make_context, tokens=CHUNK)


def make_tier(policy, capacity=12):
    return CPUOffloadingManager(capacity, policy, MODULE)


def keys_of(*names, group=0):
    return [make_offload_key(str(name).encode().rjust(16), group) for name in names]


def evicted_by(tier, names, **fields):
    """Run a request that finds and stores chunks, and return what it evicted."""
    keys = keys_of(*names)
    context = make_context(str(names), keys, **fields)
    _, stored = vllm_replay.pass_through_tier(tier, keys, context)
    return None if stored is None else [get_offload_block_hash(key).decode().strip() for key in stored.evicted_keys]


class OurLRU(OffloadPolicy):
    policy_name = "lru"


def test_the_order_of_our_lru_is_that_of_vllms(monkeypatch):
    """The same evictions happen in the same order for single requests, so pc_lru is vLLM's own policy."""
    monkeypatch.setattr("pc.integrations.vllm.offload.OurLRU", OurLRU, raising=False)
    count = 0
    for seed in range(20):
        rng = random.Random(seed)
        theirs, ours = make_tier("lru"), make_tier("OurLRU")
        for _ in range(60):
            document = rng.randrange(6)
            names = [f"{document}.{n}" for n in range(rng.randint(1, 9))]
            expected = evicted_by(theirs, names)
            assert evicted_by(ours, names) == expected
            ours._policy.check()
            count += len(expected)
    assert count > 1000


class Traffic:
    """Concurrent requests whose transfers end late, fail, or are interrupted."""

    def __init__(self, policy, seed, capacity=24):
        self.rng = random.Random(seed)
        self.tier = make_tier(policy, capacity)
        self.capacity = capacity
        self.running = {}
        self.transfers = []
        self.there = set()
        self.counts = dict.fromkeys(("evicted", "refused", "failed", "hits"), 0)

    def step(self, number):
        choice = self.rng.random()
        if choice < 0.35 and len(self.running) < 5:
            self.begin(number)
        elif choice < 0.65 and self.running:
            self.store()
        elif choice < 0.85 and self.transfers:
            self.end_transfer()
        elif self.running:
            name = self.rng.choice(list(self.running))
            self.tier.on_request_finished(self.running.pop(name)[0])
        if self.rng.random() < 0.01:
            self.tier.reset_cache()
            self.transfers, self.there = [], set()
        self.check()

    def begin(self, number):
        document, group = self.rng.randrange(8), self.rng.randrange(2)
        keys = keys_of(*(f"{document}.{n}" for n in range(self.rng.randint(1, 14))), group=group)
        context = make_context(str(number), keys)
        self.tier.on_new_request(context)
        found = next((n for n, key in enumerate(keys) if self.tier.lookup(key, context) != LookupResult.HIT), len(keys))
        assert set(keys[:found]) <= self.there
        if found:
            self.tier.prepare_load(keys[:found], context)
            self.transfers.append(("load", keys[:found], context))
            self.counts["hits"] += found
        self.running[str(number)] = (context, keys, [found])

    def store(self):
        context, keys, done = self.rng.choice(list(self.running.values()))
        part = keys[done[0] : done[0] + self.rng.randint(1, 6)]
        if not part:
            return
        stored = self.tier.prepare_store(part, context)
        if stored is None:
            self.counts["refused"] += 1
            return
        assert not set(stored.evicted_keys) & set(part)
        assert set(stored.evicted_keys) <= self.there
        busy = {key for _, moved, _ in self.transfers for key in moved}
        assert not set(stored.evicted_keys) & busy
        self.there -= set(stored.evicted_keys)
        self.counts["evicted"] += len(stored.evicted_keys)
        done[0] += len(part)
        if stored.keys_to_store:
            self.transfers.append(("store", list(stored.keys_to_store), context))

    def end_transfer(self):
        kind, keys, context = self.transfers.pop(self.rng.randrange(len(self.transfers)))
        if kind == "load":
            self.tier.complete_load(keys, context)
            return
        success = self.rng.random() < 0.8
        self.tier.complete_store(keys, context, success)
        self.counts["failed"] += not success
        if success:
            self.there |= set(keys)

    def check(self):
        policy = self.tier._policy
        policy.check()
        storing = {key for kind, keys, _ in self.transfers if kind == "store" for key in keys}
        assert set(policy._chunks) == self.there | storing
        places = [chunk.block_id for chunk in policy._chunks.values()]
        assert len(places) + self.tier._get_num_free_chunks() == self.capacity


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {"lru"}))
def test_chunks_are_conserved(name):
    counts = dict.fromkeys(("evicted", "refused", "failed", "hits"), 0)
    for seed in range(4):
        traffic = Traffic(f"pc_{name}", seed)
        for number in range(300):
            traffic.step(number)
        for kind in counts:
            counts[kind] += traffic.counts[kind]
    assert min(counts.values()) > 10, counts


def test_running_requests_give_way_before_a_store_fails():
    """As many chunks are evicted as with vLLM's lru, of running requests too, and none that the store offers."""
    tier = make_tier("pc_default", 6)
    contexts = []
    for name in ("a", "b"):
        keys = keys_of(*(f"{name}{n}" for n in range(3)))
        contexts.append(make_context(name, keys))
        stored = tier.prepare_store(keys, contexts[-1])
        tier.complete_store(stored.keys_to_store, contexts[-1])
    offer = keys_of("b0", "c0", "c1", "c2")
    stored = tier.prepare_store(offer, make_context("c", offer))
    assert [get_offload_block_hash(key).strip() for key in stored.evicted_keys] == [b"a2", b"a1", b"a0"]
    tier.complete_store(stored.keys_to_store, contexts[0])
    offer = keys_of(*(f"d{n}" for n in range(7)))
    assert tier.prepare_store(offer, make_context("d", offer)) is None
    tier._policy.check()
    for context in contexts:
        tier.on_request_finished(context)
    tier._policy.check()


def test_running_requests_that_share_chunks_give_way():
    """Two requests have the same chunks of two groups in different orders, and each evicts another chunk first."""
    tier = make_tier("pc_default", 2)
    both = [*keys_of("a0"), *keys_of("a0", group=1)]
    for keys in (both, both[::-1]):
        context = ReqContext(str(keys))
        for key in keys:
            context.set_offload_key_position(key, CHUNK)
        tier.complete_store(tier.prepare_store(keys, context).keys_to_store, context)
    offer = keys_of("b0")
    assert len(tier.prepare_store(offer, make_context("b", offer)).evicted_keys) == 1
    tier._policy.check()


def test_hints_of_the_caller_are_followed():
    keep = retention_hints(priority=5, ttl=600, token_ranges=[{"start": 0, "end": CHUNK}])
    tier = make_tier("pc_priority", 4)
    evicted_by(tier, ["a0", "a1"], kv_hints=keep)
    evicted_by(tier, ["b0", "b1"])
    assert evicted_by(tier, ["c0"]) == ["a1"]
    assert sorted(evicted_by(tier, ["d0", "d1"])) == ["b0", "b1"]
    assert evicted_by(tier, ["a0"]) == []


def test_returning_conversations_are_heard_of(monkeypatch):
    heard = []
    policy = POLICIES["hazard"]
    monkeypatch.setattr(policy, "returning", lambda self, probability: heard.append(probability))
    tier = make_tier("pc_hazard", 4)
    evicted_by(tier, ["a0"], kv_hints=retention_hints(returns=0.25))
    evicted_by(tier, ["b0"])
    assert heard == [0.25]


def test_a_hint_that_cannot_be_read_is_reported(warnings):
    tier = make_tier("pc_default", 4)
    assert evicted_by(tier, ["a0"], kv_hints=SimpleNamespace(actions=3)) == []
    assert "kv_hints of request ['a0'] are ignored" in warnings[0]


def test_a_policys_name():
    assert policy_class("pc_default").policy_name == "default"
    assert policy_class("pc_default") is policy_class("pc_default")
    with pytest.raises(AttributeError, match=r"eviction_policy: got 'pc_lur', needs one of pc_arc.*pc_lru"):
        make_tier("pc_lur")
