"""Keys: their encoding as bytes, the valid types, and that a caller cannot change them afterwards."""

from __future__ import annotations

import enum
import hashlib
import itertools
import struct

import numpy as np
import pytest
from cache_cases import Listener, run

import pc
from pc.cache.keys import encode_key


class Text(str):
    """A string that equals the str with the same characters."""

    __slots__ = ()


class Color(enum.IntEnum):
    RED = 1


KEYS = [
    *("1", 1, b"1", ("1",), (1,), ((1,),), ("",), "", b"", 0, "0", (), ((),), ("a", "b"), ("ab",)),
    *((("a",), "b"), (None,), None, -1, "-1", 10**30, "None", "n", 2**64),
]


def test_different_keys_are_different_bytes():
    assert len({encode_key(key) for key in KEYS}) == len(KEYS)
    assert encode_key(["a", ["b"]]) == encode_key(("a", ("b",)))


@pytest.mark.parametrize(
    "key",
    [
        *(True, 1.0, -0.0, np.int64(1), np.str_("1"), Text("1"), Color.RED, bytearray(b"1"), {"lora": "A"}, {"a"}),
        *((k for k in ["a"]), iter(["a"]), range(2), object(), np.array([1]), ["a", True], ("a", {"b": 1})),
    ],
    ids=lambda key: type(key).__name__,
)
def test_what_only_compares_equal_to_a_key_is_refused(key):
    manager = pc.CacheManager(8, block_size=4)
    with pytest.raises(TypeError, match="extra_keys: got"):
        manager.allocate("a", [1, 2, 3, 4], extra_keys=key)
    if type(key) is not list and type(key) is not tuple:
        with pytest.raises(TypeError, match="salt: got"):
            manager.allocate("a", [1, 2, 3, 4], salt=key)
    assert manager.stats().num_requests == 0


def test_a_list_of_keys_may_be_reused_by_its_owner():
    """Rollback, resume, hashes and events use the keys as they were when they were passed."""
    manager = pc.CacheManager(64, block_size=4)
    listener = Listener()
    manager.listeners.append(listener)
    keys = ["A", ["nested"]]
    manager.allocate("a", list(range(10)), extra_keys=keys)
    hashes = manager.block_hashes("a")
    keys[0] = "B"
    keys[1].append("more")
    assert manager.block_hashes("a") == hashes
    manager.rollback("a", 5)
    manager.append("a", list(range(5, 10)))
    manager.preempt("a")
    manager.resume("a")
    manager.commit("a", 10)
    manager.free("a")
    manager.check()
    assert [keys for kind, *_, keys in listener.events if kind == "stored"] == [("A", ("nested",))]
    assert manager.allocate("b", list(range(10)), extra_keys=["B", ["nested", "more"]]).num_cached_tokens == 0
    assert manager.allocate("c", list(range(10)), extra_keys=["A", ["nested"]]).num_cached_tokens == 8


def documented_key(key):
    if key is None:
        return b"n"
    tag, body = (b"s", key.encode()) if isinstance(key, str) else (b"i", str(key).encode())
    return tag + struct.pack("<Q", len(body)) + body


@pytest.mark.parametrize("position", [0, 3, 5, 11])
@pytest.mark.parametrize("algorithm", ["sha256", "blake2b"])
def test_documented_bytes_are_the_hash(algorithm, position):
    """The hash equals the one that hashlib gives for the bytes documented in `pc.cache.hashing`."""

    def digest(data):
        options = {} if algorithm == "sha256" else {"digest_size": 32}
        return getattr(hashlib, algorithm)(data, **options).digest()

    tokens = list(range(16))
    data = [struct.pack("<4I", *tokens[i : i + 4]) for i in range(0, 16, 4)]
    root = b"pc.block.1" + bytes([len(algorithm)]) + algorithm.encode() + struct.pack("<I", 4) + documented_key(7)
    root += documented_key("tenant") + struct.pack("<I", 1) + documented_key("lora")
    chain = list(itertools.accumulate(data, initial=root))
    expected = [digest(stream) for stream in chain[1:]]
    block = position // 4
    before = expected[block - 1] if block else digest(root)
    records = struct.pack("<I", 2)
    for key in sorted([documented_key("image"), documented_key(3)]):
        records += struct.pack("<Q", position) + key
    anew = list(itertools.accumulate(data[block:], initial=b"pc.extra.1" + before + records))
    expected[block:] = [digest(stream) for stream in anew[1:]]
    manager = pc.CacheManager(4, block_size=4, hash_algorithm=algorithm, seed=7)
    keys = ["lora", pc.KeyAt(position, "image"), pc.KeyAt(position, 3)]
    manager.allocate("a", tokens, extra_keys=keys, salt="tenant")
    assert manager.block_hashes("a") == expected


def test_salts_of_short_prompts_leave_nothing_behind():
    manager = pc.CacheManager(64, block_size=16)
    before = manager.nbytes
    for i in range(2000):
        manager.allocate(i, [1, 2, 3], salt=f"user {i}")
        manager.free(i)
    assert manager.nbytes == before


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"salt": "x"}, {"salt": "y"}),
        ({"salt": "x"}, {}),
        ({"extra_keys": "lora"}, {}),
        ({"extra_keys": ["a", "b"]}, {"extra_keys": ["ab"]}),
        ({"extra_keys": ["1"]}, {"extra_keys": [1]}),
        ({"extra_keys": pc.KeyAt(0, "image")}, {}),
        ({"extra_keys": pc.KeyAt(0, "image")}, {"extra_keys": pc.KeyAt(1, "image")}),
        ({"extra_keys": "x"}, {"salt": "x"}),
    ],
    ids=str,
)
def test_keys_and_salts_keep_requests_apart(manager, one, two):
    run(manager, "a", list(range(8)), **one)
    assert manager.allocate("b", list(range(8)), **two).num_cached_tokens == 0
    assert manager.allocate("c", list(range(8)), **one).num_cached_tokens == 7


def test_text_before_an_image_is_shared(manager):
    run(manager, "a", list(range(12)), extra_keys=pc.KeyAt(5, "image"))
    assert manager.allocate("b", list(range(12)), extra_keys=pc.KeyAt(6, "other")).num_cached_tokens == 4


def test_keys_that_hold_themselves_are_refused():
    endless = []
    endless.append(endless)
    manager = pc.CacheManager(4)
    for options in ({"extra_keys": endless}, {"extra_keys": [pc.KeyAt(0, endless)]}, {"salt": endless}):
        with pytest.raises(ValueError, match="extra_keys, salt: got keys that are nested too deeply"):
            manager.allocate("a", [1], **options)
    assert manager.stats().num_requests == 0
    assert encode_key((1 << 14000) - 1), "an integer as long as it may be"
