"""The loop of docs/cache_tiers.md: evicted blocks go to a tier, and a later prompt finds exactly their content."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from memory_store import MemoryStore

import pc
from pc.cache.tiers.disk import DiskTier
from pc.cache.tiers.mooncake import MooncakeTier
from pc.cache.tiers.tier import Layout
from pc.cache.tiers.writer import TierWriter

BLOCK = 4
LAYOUTS = [Layout(f"model@1, group {group}", {"kv": ((BLOCK,), torch.float64)}) for group in range(2)]
MANAGERS = {
    "full": {"groups": [pc.FullAttention()]},
    "parts of blocks": {"groups": [pc.FullAttention()], "partial_reuse": True},
    "full and window": {"groups": [pc.FullAttention(), pc.SlidingWindow(6)]},
    "full and window with sinks": {"groups": [pc.FullAttention(), pc.SlidingWindow(5, num_sink_tokens=3)]},
    "window": {"groups": [pc.SlidingWindow(5)]},
}


def rows_of(tokens):
    """Return rows in place of KV, each of which depends on all tokens up to its own."""
    state, rows = 7, []
    for token in tokens:
        state = (state * 31 + int(token) + 1) % 65521
        rows.append(float(state))
    return rows


class Engine:
    """The part of an engine that the loop needs. Its KV is `rows_of` the tokens."""

    def __init__(self, options, tiers, num_blocks=8, policy="lru"):
        self.manager = pc.CacheManager(num_blocks, BLOCK, policy=policy, **options)
        self.caches = [torch.full((num_blocks, BLOCK), float("nan"), dtype=torch.float64) for _ in options["groups"]]
        self.tiers = tiers
        self.loaded = self.computed = 0
        self.manager.on_evict = self.save

    def save(self, group, blocks, hashes):
        cache = self.caches[group]
        return self.tiers[group].put_many({h: {"kv": cache[n]} for n, h in zip(blocks.tolist(), hashes, strict=True)})

    def tables(self, request):
        return [self.manager.block_table(request, group) for group in range(len(self.caches))]

    def load(self, request, allocation):
        start = allocation.num_cached_tokens // BLOCK
        hashes = self.manager.block_hashes(request)[start:]
        found = [tier.get_many(hashes) for tier in self.tiers]
        count = next((i for i, row in enumerate(zip(*found, strict=True)) if None in row), len(hashes))
        for cache, table, rows in zip(self.caches, self.tables(request), found, strict=True):
            for number, tensors in zip(table[start : start + count].tolist(), rows[:count], strict=True):
                cache[number] = tensors["kv"]
        return max(allocation.num_cached_tokens, (start + count) * BLOCK)

    def serve(self, request, tokens):
        allocation = self.manager.allocate(request, tokens)
        for group, cache in enumerate(self.caches):
            for source, target in allocation.group_copies(group):
                cache[target] = cache[source]
        done = min(self.load(request, allocation), len(tokens) - 1)
        self.loaded += done - allocation.num_cached_tokens
        self.manager.commit(request, done)
        self.check_what_is_read(request, tokens, done)
        rows = rows_of(tokens)
        for cache, table in zip(self.caches, self.tables(request), strict=True):
            for position in range(done, len(tokens)):
                cache[table[position // BLOCK], position % BLOCK] = rows[position]
        self.check_what_is_read(request, tokens, len(tokens))
        self.computed += len(tokens) - done
        self.manager.commit(request, len(tokens))
        self.manager.free(request)
        self.manager.check()

    def check_what_is_read(self, request, tokens, done):
        """Check the KV before `done` that the query at `done`, or the last one, reads."""
        rows = rows_of(tokens)
        query = min(done, len(tokens) - 1)
        for group, cache, table in zip(self.manager.groups, self.caches, self.tables(request), strict=True):
            window = getattr(group, "window", len(tokens))
            sinks = getattr(group, "num_sink_tokens", 0)
            for position in range(min(query + 1, done)):
                if position > query - window or position < sinks:
                    number = int(table[position // BLOCK])
                    assert number >= 0, (group, position, query)
                    assert float(cache[number, position % BLOCK]) == rows[position]


def tiers_of(kind, path, store):
    if kind == "mooncake":
        return [MooncakeTier(MemoryStore(store), layout, batch_blocks=3) for layout in LAYOUTS]
    tiers = [DiskTier(path, layout) for layout in LAYOUTS]
    return tiers if kind == "disk" else [TierWriter(tier) for tier in tiers]


@pytest.mark.quick
@pytest.mark.parametrize("kind", ["disk", "writer", "mooncake"])
@pytest.mark.parametrize("options", MANAGERS.values(), ids=MANAGERS)
def test_evicted_blocks_come_back(tmp_path, options, kind):
    store = {}
    tiers = tiers_of(kind, tmp_path, store)[: len(options["groups"])]
    engine = Engine(options, tiers)
    prompt, other = list(range(18)), [99] * 30
    engine.serve("a", prompt)
    engine.serve("b", other)
    engine.serve("c", [*prompt, 50, 51])
    assert engine.loaded >= 8
    computed = engine.computed
    for tier in tiers:
        if kind == "writer":
            assert tier.close()
    again = Engine(options, tiers_of(kind, tmp_path, store)[: len(options["groups"])])  # another process
    again.serve("a", prompt)
    assert (again.loaded, again.computed) == (16, 2)
    assert computed > 20


@pytest.mark.parametrize("options", MANAGERS.values(), ids=MANAGERS)
@pytest.mark.parametrize("policy", ["lru", "default"])
def test_random_prompts_find_their_own_content(tmp_path, options, policy):
    random = np.random.default_rng(0)
    engine = Engine(options, [TierWriter(DiskTier(tmp_path, layout), 40 * BLOCK * 8) for layout in LAYOUTS], 10, policy)
    engine.tiers = engine.tiers[: len(options["groups"])]
    for number in range(120):
        engine.serve(number, random.integers(0, 2, int(random.integers(1, 36))).tolist())
        if number % 3 == 0:  # otherwise the disk's speed decides what the queue takes
            assert all(tier.flush() for tier in engine.tiers)
    assert engine.loaded > 100
    assert all(tier.close() for tier in engine.tiers)
