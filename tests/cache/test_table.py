"""HashTable against a dict."""

from __future__ import annotations

import numpy as np
import pytest

from pc.cache.table import HashTable


def random_digests(rng, count, words=4, spread=1 << 63):
    return rng.integers(0, spread, (words, count), dtype=np.uint64)


@pytest.mark.parametrize("spread", [1 << 63, 1 << 4], ids=["spread", "colliding"])
def test_churn_matches_a_dict(spread):
    """Many times its size in insertions: what was left behind is swept out, nothing is lost or found wrongly.

    With few different first words most searches meet other hashes on their way.
    """
    rng = np.random.default_rng(0)
    n = 64
    words = np.zeros((4, n), np.uint64)
    table = HashTable(words)
    model: dict[bytes, int] = {}
    free = list(range(n))
    for step in range(400):
        count = int(rng.integers(0, len(free) + 1))
        digests = random_digests(rng, count)
        digests[0] %= np.uint64(spread)
        ids = np.array([free.pop() for _ in range(count)], np.int32)
        words[:, ids] = digests
        table.insert(ids)
        model |= {digests[:, i].tobytes(): int(b) for i, b in enumerate(ids)}
        unknown = random_digests(rng, 5)
        asked = [*list(model)[:20], *(unknown[:, i].tobytes() for i in range(5))]
        queries = np.frombuffer(b"".join(asked), np.uint64).reshape(-1, 4).T
        assert table.find(queries).tolist() == [model.get(a, -1) for a in asked], step
        table.check()
        gone = [k for k in model if rng.random() < 0.5]
        ids = np.array([model.pop(k) for k in gone], np.int32)
        table.remove(ids)
        free += ids.tolist()
        assert not table.contains(ids).any()


def test_hashes_that_share_their_first_word_are_told_apart():
    words = np.zeros((2, 8), np.uint64)
    words[1] = np.arange(8)
    table = HashTable(words)
    table.insert(np.arange(6, dtype=np.int32))
    assert table.find(words).tolist() == [0, 1, 2, 3, 4, 5, -1, -1]


def test_empty_query():
    table = HashTable(np.zeros((4, 1), np.uint64))
    assert table.find(np.zeros((4, 0), np.uint64)).size == 0
