"""Random traffic with groups of layers: all that a hit promises is present in each group."""

from __future__ import annotations

import numpy as np
import pytest

import pc

BLOCK = 4
CASES = {
    "window": [pc.SlidingWindow(window=7)],
    "window and sinks": [pc.SlidingWindow(9, 5)],
    "hybrid": [pc.FullAttention(), pc.SlidingWindow(window=6, num_blocks=20)],
    "all": [pc.Tensors(), pc.SlidingWindow(window=5, num_sink_tokens=2), pc.SlidingWindow(window=1)],
}


def needed(group, position):
    """Return the positions whose KV a query at `position` reads, by the group's definition."""
    if isinstance(group, pc.SlidingWindow):
        return [t for t in range(position) if t > position - group.window or t < group.num_sink_tokens]
    return list(range(position))


@pytest.mark.parametrize("reuse", ["prefix", "gap"])
@pytest.mark.parametrize("groups", CASES.values(), ids=CASES)
def test_every_query_finds_what_it_reads(groups, reuse):
    rng = np.random.default_rng(0)
    m = pc.CacheManager(32, block_size=BLOCK, groups=groups, policy="lru")
    content = [{} for _ in groups]
    tokens, running = {}, []
    hits = 0

    def per_group(value):
        return value if len(groups) > 1 else [value]

    def compute(request, allocation):
        """Compute the spans like a model: read what each query needs, then write its KV."""
        slots = per_group(allocation.slot_mapping)
        positions = [p for span in allocation.compute_spans for p in range(*span)]
        for i, position in enumerate(positions):
            for g, group in enumerate(groups):
                table = m.block_table(request, g)
                for t in needed(group, position):
                    block = int(table[t // BLOCK])
                    assert block >= 0, (g, position, t)
                    got = content[g].get((block, t % BLOCK))
                    assert got == tuple(tokens[request][: t + 1]), (g, position, t)
                slot = int(slots[g][i])
                if slot >= 0:
                    content[g][divmod(slot, BLOCK)] = tuple(tokens[request][: position + 1])

    for i in range(500):
        root = [int(rng.integers(0, 3))] * int(rng.integers(0, 20))
        tokens[i] = [*root, *rng.integers(0, 2, int(rng.integers(1, 12))).tolist()]
        try:
            allocation = m.allocate(i, tokens[i], reuse=reuse)
        except pc.OutOfBlocks:
            allocation = None
        if allocation is not None:
            hits += allocation.num_cached_tokens
            compute(i, allocation)
            m.commit(i, len(tokens[i]))
            m.check()
            for _ in range(int(rng.integers(0, 7))):
                token = int(rng.integers(0, 2))
                try:
                    step = m.append(i, [token])
                except pc.OutOfBlocks:
                    break
                tokens[i].append(token)
                compute(i, step)
                m.commit(i, len(tokens[i]))
            running.append(i)
        while len(running) > 2 or (running and rng.random() < 0.3):
            m.free(running.pop(0))
        m.check()
    assert hits > 500
    assert m.stats().evictions > 100
    for request in running:
        m.free(request)
    m.check()


@pytest.mark.parametrize(
    ("make", "error", "named"),
    [
        (lambda: pc.SlidingWindow(window=2.5), TypeError, "window: got 2.5"),
        (lambda: pc.SlidingWindow(window=True), TypeError, "window: got True"),
        (lambda: pc.SlidingWindow(window=0), ValueError, "window: got 0, needs at least 1"),
        (lambda: pc.SlidingWindow(window=4, num_sink_tokens=-1), ValueError, "num_sink_tokens: got -1"),
        (lambda: pc.FullAttention(num_blocks=0), ValueError, "num_blocks: got 0, needs at least 1"),
        (lambda: pc.Recurrent(num_blocks="3"), TypeError, "num_blocks: got '3'"),
        (
            lambda: pc.CacheManager(4, groups=pc.FullAttention()),
            TypeError,
            r"groups: got FullAttention.*list of",
        ),
        (lambda: pc.CacheManager(4, groups=[]), TypeError, r"groups: got \[\]"),
        (lambda: pc.CacheManager(4, groups=["full"]), TypeError, "groups: got"),
    ],
    ids=[str(i) for i in range(9)],
)
def test_a_bad_spec_is_refused_where_it_is_made(make, error, named):
    with pytest.raises(error, match=named):
        make()


def test_numbers_of_numpy_are_numbers():
    assert pc.SlidingWindow(window=np.int64(4), num_blocks=np.int32(3)) == pc.SlidingWindow(window=4, num_blocks=3)
