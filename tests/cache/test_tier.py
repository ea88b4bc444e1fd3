"""The contract of tiers, tested on disk, with a store, with a writer, and for the tier of a writer."""

from __future__ import annotations

import hashlib

import pytest
import torch
from memory_store import LAYOUT, MemoryStore, block, same
from processes import exit_status_of_child, in_threads
from torch.testing._internal.two_tensor import TwoTensor

from pc.cache.tiers.disk import DiskTier
from pc.cache.tiers.memory import MemoryTier
from pc.cache.tiers.mooncake import MooncakeTier
from pc.cache.tiers.payload import pack, unpack
from pc.cache.tiers.tier import Layout, Tier
from pc.cache.tiers.writer import TierWriter

KEYS = [bytes([i]) * 32 for i in range(8)]


@pytest.fixture(params=["disk", "mooncake", "writer", "memory"])
def tier(request, tmp_path):
    if request.param == "disk":
        yield DiskTier(tmp_path, LAYOUT)
    elif request.param == "mooncake":
        yield MooncakeTier(MemoryStore(), LAYOUT, batch_blocks=3)
    elif request.param == "memory":
        yield MemoryTier(8)
    else:
        with TierWriter(DiskTier(tmp_path, LAYOUT)) as writer:
            yield writer


def test_a_tier_gives_what_was_put(tier):
    assert isinstance(tier, Tier)
    assert tier.get(KEYS[0]) is None
    assert tier.put(KEYS[0], block())
    assert tier.put(KEYS[0], block())
    assert KEYS[0] in tier
    assert KEYS[1] not in tier
    assert "text" not in tier
    assert same(tier.get(KEYS[0]), block())
    tier.discard(KEYS[0])
    tier.discard(KEYS[1])
    assert KEYS[0] not in tier
    assert tier.get(KEYS[0]) is None


def test_batches(tier):
    assert tier.put_many({key: block(i) for i, key in enumerate(KEYS[:7])}) == set(KEYS[:7])
    assert tier.put_many({}) == set()
    assert tier.get_many([]) == tier.contains_many([]) == []
    order = [KEYS[6], KEYS[7], KEYS[0], KEYS[3], KEYS[6]]
    assert tier.contains_many(order) == [True, False, True, True, True]
    found = tier.get_many(order)
    assert found[1] is None
    assert all(same(found[i], block(value)) for i, value in ((0, 6), (2, 0), (3, 3), (4, 6)))


def test_tensors_that_were_put_or_returned_belong_to_the_caller(tier):
    mine = block(1.0)
    assert tier.put(KEYS[0], mine)
    mine["key"].zero_()
    mine["value"].zero_()
    got = tier.get(KEYS[0])
    assert same(got, block(1.0))
    got["key"].zero_()
    assert same(tier.get(KEYS[0]), block(1.0))


def test_host_memory_keeps_the_blocks_that_were_used_last():
    tier = MemoryTier(2)
    for key in KEYS[:2]:
        tier.put(key, block())
    assert tier.get(KEYS[0]) is not None
    tier.put(KEYS[2], block())
    assert tier.contains_many(KEYS[:3]) == [True, False, True]


@pytest.mark.parametrize(
    ("key", "error"), [("text", TypeError), (None, TypeError), (b"", ValueError), (b"x" * 65, ValueError)]
)
def test_invalid_keys_are_refused(tier, key, error):
    for call in (lambda: tier.put(key, block()), lambda: tier.get(key), lambda: tier.discard(key)):
        with pytest.raises(error, match="key: got"):
            call()
    with pytest.raises(error, match="key: got"):
        tier.put_many({KEYS[0]: block(), key: block()})
    assert KEYS[0] not in tier


@pytest.mark.parametrize("size", [2.5, True, "9"])
def test_a_size_that_is_no_integer_is_refused_by_name(tmp_path, size):
    for name, make in (
        ("max_blocks", MemoryTier),
        ("max_bytes", lambda size: TierWriter(MemoryTier(1), size)),
        ("capacity_bytes", lambda size: DiskTier(tmp_path, LAYOUT, size)),
        (r"tensors\['a'\]", lambda size: Layout("m", {"a": ([size], torch.int8)})),
    ):
        with pytest.raises(TypeError, match=f"{name}: got {size!r}, needs an int"):
            make(size)


@pytest.mark.parametrize("key", [bytearray(b"key"), [b"key"]])
def test_a_key_that_cannot_be_hashed_is_refused_by_name(tier, key):
    with pytest.raises(TypeError, match=f"key: got {type(key).__name__}, needs bytes"):
        tier.put(key, block())
    assert key not in tier


@pytest.mark.parametrize(
    "tensors",
    [
        *([torch.ones(1)], {"key": [1]}, {1: torch.ones(1)}, {"key": torch.eye(2).to_sparse()}),
        *(
            {"key": TwoTensor(torch.ones(1), torch.ones(1))},
            {"key": torch.ones(1, device="meta")},
        ),  # no memory of theirs
    ],
)
def test_invalid_tensors_are_refused(tier, tensors):
    with pytest.raises(TypeError, match="tensors: got"):
        tier.put_many({KEYS[0]: block(), KEYS[1]: tensors})
    assert KEYS[0] not in tier


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"key": b["key"]}, r"got \['key'\], needs \['key', 'value'\]"),
        (lambda b: {**b, "key": b["key"].float()}, r"got key \[4, 2\] torch.float32, needs \[4, 2\] torch.bfloat16"),
        (lambda b: {**b, "value": b["value"][:3]}, r"got value \[3\] torch.int64, needs \[4\]"),
    ],
)
def test_tensors_of_another_layout_are_refused(tmp_path, change, message):
    for tier in (DiskTier(tmp_path, LAYOUT), MooncakeTier(MemoryStore(), LAYOUT)):
        with pytest.raises(ValueError, match=message):
            tier.put(KEYS[0], change(block()))
        assert KEYS[0] not in tier


@pytest.mark.parametrize(
    "other",
    [
        Layout("model@2", LAYOUT.tensors),
        Layout("model@1", {"key": ((4, 2), torch.float16), "value": ((4,), torch.int64)}),
        Layout("model@1", {"key": ((2, 4), torch.bfloat16), "value": ((4,), torch.int64)}),
        Layout("model@1", {"value": ((4, 2), torch.bfloat16), "key": ((4,), torch.int64)}),
        None,
    ],
)
def test_entries_of_another_layout_are_never_read(tmp_path, other):
    values = {}
    DiskTier(tmp_path, LAYOUT).put(KEYS[0], block())
    MooncakeTier(MemoryStore(values), LAYOUT).put(KEYS[0], block())
    tiers = [DiskTier(tmp_path, other)] + ([MooncakeTier(MemoryStore(values), other)] if other else [])
    for tier in tiers:
        assert KEYS[0] not in tier
        assert tier.get(KEYS[0]) is None
    data = pack(KEYS[0], block(), LAYOUT)
    with pytest.raises(ValueError, match="another layout"):
        unpack(data, KEYS[0], other)
    with pytest.raises(ValueError, match="another key"):
        unpack(data, KEYS[1], LAYOUT)


def test_layouts_are_equal_in_every_process():
    again = Layout.of("model@1", block())
    assert again == LAYOUT
    assert hash(again) == hash(LAYOUT)
    text = "('model@1', [('key', (4, 2), torch.bfloat16), ('value', (4,), torch.int64)])"
    assert again.digest == hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    assert LAYOUT.nbytes == sum(tensor.nbytes for tensor in block().values())
    tensors = {"a": ([2], torch.int8)}
    layout = Layout("m", tensors)
    tensors["b"] = ([2], torch.int8)
    assert dict(layout.tensors) == {"a": ((2,), torch.int8)}
    with pytest.raises(TypeError):
        layout.tensors["b"] = 1
    for bad, error in ((5, TypeError), ({"a": torch.ones(1)}, TypeError), ({"a": ([1.5], torch.int8)}, TypeError)):
        with pytest.raises(error):
            Layout("m", bad)
    with pytest.raises(ValueError, match=r"tensors\['a'\]: got -1, needs at least 0"):
        Layout("m", {"a": ([-1], torch.int8)})
    with pytest.raises(TypeError, match="model: got int"):
        Layout(1, {})


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int64, torch.float16, torch.bfloat16),
    *(torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_payload_of_every_dtype(dtype):
    rows = torch.arange(24).reshape(2, 3, 4).to(dtype)
    for tensor in (rows, rows.transpose(0, 2), rows[1], rows[0, 0, 0], rows[:0], rows[:, ::2]):
        got = unpack(pack(b"k", {"x": tensor}, None), b"k", None)["x"]
        assert got.dtype == dtype
        assert got.shape == tensor.shape
        assert (
            got.view(torch.uint8).tolist() == tensor.contiguous().view(torch.uint8).tolist() if tensor.dim() else True
        )


def test_payload_of_tensors_that_share_memory_or_are_views():
    base = torch.arange(12.0).view(3, 4)
    cases = {
        "twice": {"a": base, "b": base},
        "parts": {"a": base[0], "b": base[1]},
        "parameter": {"a": torch.nn.Parameter(base.clone())},
        "conjugated": {"a": torch.complex(base, base).conj()},
        "negated": {"a": torch._neg_view(base)},
        "expanded": {"a": base[:1].expand(3, 4)},
        "none": {},
        "name": {"läyer.0": base},
    }
    for tensors in cases.values():
        assert same(unpack(pack(b"k", tensors, None), b"k", None), {k: v.detach().clone() for k, v in tensors.items()})


def test_every_changed_byte_is_found():
    data = pack(b"key", {"a": torch.arange(4)}, LAYOUT)
    for at in range(len(data)):
        changed = data.copy()
        changed[at] ^= 1
        with pytest.raises(ValueError, match=r"checksum|another"):
            unpack(changed, b"key", LAYOUT)
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"checksum|fewer than"):
            unpack(data[:length], b"key", LAYOUT)


@pytest.mark.parametrize("failure", [-900, -800, RuntimeError("gone"), OSError("gone")], ids=str)
def test_a_store_that_fails_is_a_miss_and_is_left_alone(failure):
    store = MemoryStore()
    tier = MooncakeTier(store, LAYOUT, retry_seconds=60.0)
    tier.put(KEYS[0], block())
    store.fail_with = failure
    with pytest.warns(RuntimeWarning, match="the Mooncake store is not used for 60"):
        assert tier.get(KEYS[0]) is None
    calls = store.calls
    assert not tier.put(KEYS[1], block())
    assert KEYS[0] not in tier
    tier.discard(KEYS[0])
    assert (store.calls, tier.failures) == (calls, 1)
    store.fail_with = None
    tier._left_alone_until = 0.0
    assert same(tier.get(KEYS[0]), block())


@pytest.mark.parametrize("answer", [None, [None, None], ["0", "0"], [0], [float("nan"), 0.0]], ids=repr)
def test_an_answer_that_is_no_list_of_codes_is_a_failure_of_the_store(answer):
    store = MemoryStore()
    tier = MooncakeTier(store, LAYOUT, retry_seconds=0.0)
    store.batch_is_exist = store.batch_put_from = store.batch_get_into = lambda *_: answer
    store.remove = lambda key: answer
    calls = [
        lambda: tier.get_many(KEYS[:2]) == [None, None],
        lambda: tier.put_many(dict.fromkeys(KEYS[:2], block())) == set(),
        lambda: tier.contains_many(KEYS[:2]) == [False, False],
        lambda: tier.discard(KEYS[0]) is None,
    ]
    for call in calls:
        with pytest.warns(RuntimeWarning, match="the Mooncake store is not used"):
            assert call()


def test_a_child_process_leaves_the_store_of_its_parent_alone():
    """It lacks the store's threads, and the thread that held the tier's lock."""
    store = MemoryStore()
    tier = MooncakeTier(store, LAYOUT)
    tier.put(KEYS[0], block())

    def use():
        calls = store.calls
        assert tier.get(KEYS[0]) is None
        assert not tier.put(KEYS[1], block())
        tier.close()
        assert (store.calls, len(store.registered)) == (calls, 1)

    with tier._lock:
        assert exit_status_of_child(use) == 0
    assert same(tier.get(KEYS[0]), block())


def test_a_store_without_room_takes_nothing_and_is_read_on():
    store = MemoryStore()
    tier = MooncakeTier(store, LAYOUT)
    tier.put(KEYS[0], block())
    store.batch_put_from = lambda keys, addresses, sizes: [-200] * len(keys)
    assert not tier.put(KEYS[1], block())
    assert same(tier.get(KEYS[0]), block())
    assert tier.failures == 0


def test_a_damaged_value_of_a_store_is_a_miss_and_is_dropped():
    store = MemoryStore()
    tier = MooncakeTier(store, LAYOUT)
    tier.put_many({KEYS[0]: block(), KEYS[1]: block(2)})
    name = next(name for name in store.values if KEYS[0].hex() in name)
    store.values[name] = store.values[name][:-1] + b"?"
    with pytest.warns(RuntimeWarning, match="a block of the store is dropped"):
        found = tier.get_many(KEYS[:2])
    assert found[0] is None
    assert same(found[1], block(2))
    assert name not in store.values


def test_a_closed_mooncake_tier_finds_nothing_and_gives_its_buffer_back():
    store = MemoryStore()
    tier = MooncakeTier(store, LAYOUT)
    tier.put(KEYS[0], block())
    tier.close()
    tier.close()
    assert store.registered == []
    assert tier.get(KEYS[0]) is None
    assert not tier.put(KEYS[1], block())
    assert store.values
    for options, message in (({"batch_blocks": 0}, "batch_blocks: got 0"), ({"retry_seconds": -1}, "retry_seconds")):
        with pytest.raises(ValueError, match=message):
            MooncakeTier(store, LAYOUT, **options)
    with pytest.raises(TypeError, match="layout: got NoneType"):
        MooncakeTier(store, None)
    store.register_buffer = lambda address, size: -600
    with pytest.raises(ConnectionError, match=r"register_buffer of \d+ bytes gave -600"):
        MooncakeTier(store, LAYOUT)


def test_threads_take_turns_at_the_buffer():
    tier = MooncakeTier(MemoryStore(), LAYOUT, batch_blocks=2)
    wrong = []

    def work(number):
        keys = [bytes([number, i]) * 16 for i in range(6)]
        for _ in range(20):
            tier.put_many({key: block(number * 10 + i) for i, key in enumerate(keys)})
            found = tier.get_many(keys)
            wrong.extend(key for i, key in enumerate(keys) if not same(found[i], block(number * 10 + i)))

    in_threads(work, *range(4))
    assert wrong == []
