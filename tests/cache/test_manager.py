"""Wrong arguments of CacheManager's verbs and of groups, which are refused by name and change nothing."""

from __future__ import annotations

import numpy as np
import pytest
from cache_cases import recurrent

import pc

TEXT = list(range(100, 124))
MANAGERS = {
    "plain": lambda: pc.CacheManager(16, block_size=4),
    "states": lambda: recurrent(4),
    "groups": lambda: pc.CacheManager(16, 4, groups=[pc.FullAttention(), pc.SlidingWindow(window=8)]),
    "hints": lambda: pc.CacheManager(16, block_size=4, policy="priority"),
}
UNKNOWN = [
    *(lambda m: m.free("x"), lambda m: m.block_table("x"), lambda m: m.append("x", [1]), lambda m: m.commit("x", 0))
]
HINTS = [
    *({"priority": "x"}, {"priority": 1.5}, {"priority": None}, {"priority": True}),
    *({"ttl": "x"}, {"ttl": -1.0}, {"ttl": float("nan")}),
]
ONE_REQUEST = [
    lambda m, request: m.allocate(request, [1]),
    lambda m, request: m.append(request, [1]),
    lambda m, request: m.append_each([request], [1]),
    lambda m, request: m.commit(request, 4),
    lambda m, request: m.checkpoint(request, 4),
    lambda m, request: m.rollback(request, 1),
    lambda m, request: m.fork(request, "b"),
    *(getattr(pc.CacheManager, name) for name in ("free", "preempt", "resume", "block_table", "num_tokens")),
    pc.CacheManager.block_hashes,
]
NO_INTEGERS = (["x"], [1.5], np.array([1.5]), np.zeros((2, 2), int))
NO_SEQUENCES = [{1: 2}, {1, 2}, iter([1]), 5, None, "12", b"12", bytearray(b"12")]
SPANS = "segments: got .*, needs ascending spans"


def allocate(tokens=(1,), **options):
    return lambda m: m.allocate("b", tokens, **options)


def saving(manager):
    manager.on_evict = lambda *evicted: None
    return manager


def anywhere(**options):
    return allocate(TEXT, reuse="anywhere", **options)


REFUSED = {
    "plain": [
        (lambda m: m.allocate("a", [1]), ValueError, "request_id"),
        *(
            (
                lambda m, call=call, wrong=wrong: call(m, wrong),
                TypeError,
                f"^request_ids?: got {said}, needs a hashable",
            )
            for wrong, said in ((["b"], "list"), (("b", ["c"]), "tuple"))
            for call in ONE_REQUEST
        ),
        (lambda m: saving(m).allocate(["b"], [1]), TypeError, "^request_id: got list, needs a hashable"),
        (lambda m: m.fork("a", ["b"]), TypeError, "^new_request_id: got list, needs a hashable"),
        *(
            (lambda m, ids=ids: m.append_each(ids, [9]), TypeError, "^request_ids: got .*, needs a sequence of running")
            for ids in (None, "a", {"a"}, iter(["a"]), 5)
        ),
        *((call, KeyError, "request_id") for call in UNKNOWN),
        (lambda m: m.commit("a", 11), ValueError, "num_tokens"),
        (lambda m: m.rollback("a", 11), ValueError, "num_tokens"),
        *((lambda m, n=n: m.commit("a", n), TypeError, "num_tokens") for n in (1.0, "1", None, True)),
        *((lambda m, n=n: m.rollback("a", n), TypeError, "num_tokens") for n in (1.0, "1", None, True)),
        *((lambda m, n=n: m.block_table("a", n), TypeError, "group") for n in (1.0, "1", None, True)),
        (lambda m: m.checkpoint("a", 4), ValueError, "group"),
        (lambda m: m.append_each(["a", "a"], [9, 9]), ValueError, "twice"),
        (lambda m: m.append_each(["a"], [9, 9]), ValueError, "token_ids"),
        (lambda m: m.append_each(["a", "x"], [9, 9]), KeyError, "request_id"),
        (allocate(num_tokens=-1), ValueError, "num_tokens"),
        (allocate(reuse="everything"), ValueError, "reuse: got 'everything', needs one of prefix, gap, anywhere"),
        (allocate(segments=[(0, 4)]), ValueError, "segments: got some with reuse='prefix', needs reuse='anywhere'"),
        (anywhere(segments=[(4, 2)]), ValueError, r"segments: got \[\(4, 2\)\], needs ascending spans"),
        (anywhere(segments=[(2, 6), (4, 8)]), ValueError, SPANS),
        (anywhere(segments=[3]), TypeError, r"segments: got .*, needs pairs \(start, end\) of integers"),
        *((allocate(extra_keys=pc.KeyAt(n, "x")), ValueError, "position") for n in (-1, True, 2**64, 1.0, "1")),
        (allocate(salt=1 << 20000), ValueError, "salt: got an integer of 20001 bits, needs at most 14000"),
        *((allocate(tokens), ValueError, "token_ids") for tokens in ([-1], [1 << 32], np.array([-1]))),
        *((allocate(tokens), TypeError, "token_ids") for tokens in NO_INTEGERS),
        (allocate([np.int64(1), 2.5]), TypeError, "token_ids: got an element of type float, needs integers"),
        *(
            (allocate(tokens), TypeError, f"token_ids: got {type(tokens).__name__}, needs a sequence of integers")
            for tokens in NO_SEQUENCES
        ),
        (lambda _: pc.CacheManager(0), ValueError, "num_blocks"),
        (lambda _: pc.CacheManager(2**30), ValueError, "num_blocks: got .*below"),
        (lambda _: pc.CacheManager(1, policy="nonesuch"), ValueError, "policy"),
        (lambda _: pc.CacheManager(1, hash_algorithm="md4"), ValueError, "hash_algorithm"),
        (
            lambda _: pc.CacheManager(1, hash_algorithm=["sha256"]),
            ValueError,
            "hash_algorithm: got .*, needs one of sha256",
        ),
        (lambda _: pc.CacheManager(4, groups=pc.FullAttention()), TypeError, "groups: got FullAttention.*list of"),
        (lambda _: pc.CacheManager(4, groups=[]), TypeError, r"groups: got \[\]"),
        (lambda _: pc.CacheManager(4, groups=["full"]), TypeError, "groups: got"),
        (lambda _: pc.SlidingWindow(window=2.5), TypeError, "window: got 2.5"),
        (lambda _: pc.SlidingWindow(window=True), TypeError, "window: got True"),
        (lambda _: pc.SlidingWindow(window=0), ValueError, "window: got 0, needs at least 1"),
        (lambda _: pc.SlidingWindow(2**70), ValueError, "window: got .*below"),
        (lambda _: pc.SlidingWindow(window=4, num_sink_tokens=-1), ValueError, "num_sink_tokens: got -1"),
        (lambda _: pc.SlidingWindow(4, num_sink_tokens=2**70), ValueError, "num_sink_tokens: got .*below"),
        (lambda _: pc.FullAttention(num_blocks=0), ValueError, "num_blocks: got 0, needs at least 1"),
        (lambda _: pc.FullAttention(num_blocks=2**40), ValueError, "num_blocks: got .*below"),
        (lambda _: pc.Recurrent(num_blocks="3"), TypeError, "num_blocks: got '3'"),
        (lambda _: pc.Recurrent(num_blocks=2**30), ValueError, "num_blocks: got .*below"),
    ],
    "states": [
        *((lambda m, n=n: m.checkpoint("a", n), ValueError, "num_tokens") for n in (0, 6, 12, -4)),
        (lambda m: m.checkpoint("a", 4.0), TypeError, "num_tokens"),
        *((lambda m, g=g: m.checkpoint("a", 4, g), ValueError, "group") for g in (0, 2)),
    ],
    "groups": [(anywhere(), ValueError, "reuse: got 'anywhere' with several groups or a window")],
    "hints": [(allocate(**hint), (TypeError, ValueError), next(iter(hint))) for hint in HINTS],
}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("kind", "call", "error", "message"), [(kind, *row) for kind, rows in REFUSED.items() for row in rows]
)
def test_a_wrong_argument_is_refused_by_name_and_changes_nothing(kind, call, error, message):
    manager = MANAGERS[kind]()
    manager.allocate("a", range(10))
    before = manager.stats(), manager.num_tokens("a"), str(manager.block_table("a"))
    with pytest.raises(error, match=message):
        call(manager)
    assert (manager.stats(), manager.num_tokens("a"), str(manager.block_table("a"))) == before
    manager.check()


def test_numbers_of_numpy_are_numbers(manager):
    assert pc.SlidingWindow(window=np.int64(4), num_blocks=np.int32(3)) == pc.SlidingWindow(window=4, num_blocks=3)
    manager.allocate("a", [1, 2])
    manager.commit("a", np.int64(2))
    manager.rollback("a", np.int64(1))
    assert manager.num_tokens("a") == 1


def test_the_victim_is_the_youngest_of_the_lowest_priority():
    m = pc.CacheManager(8, block_size=4)
    assert m.victim() is None
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", 2)):
        m.allocate(name, [1], priority=priority)
    assert m.victim() == "c"
