"""HashTable against a dict."""

from __future__ import annotations

import numpy as np
import pytest

from pc.cache.table import HashTable


def random_digests(rng, count, words=4, spread=1 << 63):
    return rng.integers(0, spread, (count, words), dtype=np.uint64)


def put(table, words, ids, one_by_one):
    parts = [ids[i : i + 1] for i in range(ids.size)] if one_by_one else [ids]
    known = [table.put(part, words[part]) for part in parts]
    assert all(k is None or (k >= 0).any() for k in known), "None says that nothing was there"
    return np.concatenate([np.full(p.size, -1) if k is None else k for p, k in zip(parts, known, strict=True)] or [ids])


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("spread", [1 << 63, 1 << 4], ids=["spread", "colliding"])
def test_churn_matches_a_dict(spread, one_by_one):
    """After many more insertions than its size, removed entries are swept out, and every lookup is right.

    If there are few different first words, most searches meet other hashes.
    """
    rng = np.random.default_rng(0)
    n = 64
    words = np.zeros((n, 4), np.uint64)
    table = HashTable(words)
    model: dict[bytes, int] = {}
    free = list(range(n))
    for step in range(150):
        count = int(rng.integers(0, len(free) + 1))
        digests = random_digests(rng, count)
        digests[:, 0] %= np.uint64(spread)
        ids = np.array([free.pop() for _ in range(count)], np.int32)
        words[ids] = digests
        assert (put(table, words, ids, one_by_one) == -1).all()
        model |= {digests[i].tobytes(): int(b) for i, b in enumerate(ids)}
        unknown = random_digests(rng, 5)
        asked = [*list(model)[:20], *(unknown[i].tobytes() for i in range(5))]
        queries = np.frombuffer(b"".join(asked), np.uint64).reshape(-1, 4)
        expected = [model.get(a, -1) for a in asked]
        assert table.find(queries).tolist() == expected, step
        assert table.leading(queries).tolist() == expected[: expected.index(-1)]
        assert table.find(queries[:0]).size == 0
        table.check()
        gone = [k for k in model if rng.random() < 0.5]
        ids = np.array([model.pop(k) for k in gone], np.int32)
        table.remove(ids)
        free += ids.tolist()
        assert not table.contains(ids).any()


@pytest.mark.parametrize("count", [3, 30], ids=["few", "many"])
def test_put_names_the_twin_of_a_hash_that_is_there(count):
    words = random_digests(np.random.default_rng(0), 2 * count)
    words[count:] = words[:count]
    words[-1] += np.uint64(1)
    table = HashTable(words)
    put(table, words, np.arange(count, dtype=np.int32), False)
    twins = put(table, words, np.arange(count, 2 * count, dtype=np.int32), False)
    assert twins.tolist() == [*range(count - 1), -1]
    assert table.listed.nonzero()[0].tolist() == [*range(count), 2 * count - 1]
    table.check()


def test_many_blocks_meet_others_and_none_has_a_twin():
    words = random_digests(np.random.default_rng(0), 8000)
    table = HashTable(words)
    for first in range(0, 8000, 2000):
        assert (put(table, words, np.arange(first, first + 2000, dtype=np.int32), False) == -1).all()
    table.check()


@pytest.mark.parametrize("count", [3, 60], ids=["few", "many"])
def test_a_twin_is_found_behind_a_slot_that_was_given_up(count):
    words = random_digests(np.random.default_rng(0), count + 2)
    words[1, 0] = words[0, 0] + np.uint64(1 << 50)  # their searches begin at the same slot
    words[2] = words[1]
    words[3:, 0] = words[0, 0] + np.arange(1, count, dtype=np.uint64)  # and no other search there
    table = HashTable(words)
    put(table, words, np.array([0], np.int32), False)
    put(table, words, np.array([1], np.int32), False)
    table.remove(np.array([0], np.int32))
    twins = put(table, words, np.arange(2, count + 2, dtype=np.int32), False)
    assert twins.tolist() == [1, *[-1] * (count - 1)]
    table.check()
