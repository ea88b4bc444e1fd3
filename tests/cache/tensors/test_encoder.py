"""EncoderCache: holders, budget and policies, and an image that ends inside a block."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import pc

ROW = 4 * 3  # bytes of a float32 row of 3


def output(length, value=1.0):
    return torch.full((length, 3), value)


def item(name, length=2, start=0):
    return pc.EncoderItem(name, start, length)


def test_cached_outputs_are_not_computed_again():
    cache = pc.EncoderCache(100 * ROW)
    first, again = item("cat", 2), item("cat", 2, start=5)
    assert cache.missing("a", [first, again], [(0, 10)]) == [first]
    cache.put("a", first, output(2))
    assert cache.missing("b", [first], [(0, 10)]) == []
    assert (cache.hits, cache.misses) == (1, 2)


def test_items_outside_of_the_computed_spans_are_not_needed():
    cache = pc.EncoderCache(100 * ROW)
    items = [item("cat", 4, 0), item("dog", 4, 4), item("cow", 4, 8)]
    assert cache.missing("a", items, [(7, 8)]) == [items[1]]
    assert cache.missing("a", items, [(0, 4), (8, 9)]) == [items[0], items[2]]
    assert cache.missing("a", items, []) == []


@pytest.mark.quick
@pytest.mark.parametrize(
    ("policy", "gone"),
    [("lru", "b"), ("fifo", "a"), ("lfu", "b"), ("largest", "c"), (lambda entry: -entry.inserted_at, "c")],
)
def test_policies_choose_among_what_no_request_holds(policy, gone):
    cache = pc.EncoderCache(7 * ROW, policy)
    for name, length in (("a", 1), ("b", 1), ("c", 5)):
        cache.put(name, item(name, length), output(length))
        cache.release(name)
    for name, length in (("a", 1), ("c", 5), ("c", 5)):
        cache.missing("r", [item(name, length)], [(0, 9)])
        cache.release("r")
    cache.put("d", item("d", 1), output(1))
    assert [name for name in "abc" if name not in cache] == [gone]
    cache.check()


def test_held_outputs_stay_and_an_output_without_room_changes_nothing():
    cache = pc.EncoderCache(4 * ROW)
    cache.put("a", item("cat", 2), output(2))
    cache.put("b", item("dog", 2), output(2))
    cache.release("b")
    with pytest.raises(MemoryError, match="'cow': needs 36 bytes, 24 of 48 bytes are held by requests"):
        cache.put("c", item("cow", 3), output(3))
    assert "dog" in cache
    cache.put("c", item("cow", 2), output(2))
    assert "dog" not in cache
    assert (len(cache), cache.nbytes, cache.evictions) == (2, 4 * ROW, 1)
    cache.check()


EMBEDDINGS, WIDE = torch.zeros(9, 3), torch.zeros(9, 4)
WRONG = [
    (
        lambda cache: cache.put("a", item("dog", 2), output(3)),
        ValueError,
        r"'dog': got an output of shape \[3, 3\], needs 2",
    ),
    (
        lambda cache: cache.missing("b", [item("cat", 3)], [(0, 3)]),
        ValueError,
        r"'cat': got an output of shape \[2, 3\], needs 3",
    ),
    (
        lambda cache: cache.missing("b", [item("cat", 2), item("dog", 2), item("dog", 3, start=5)], [(0, 10)]),
        *(ValueError, "'dog': got lengths 2 and 3, needs one length for one content"),
    ),
    (lambda cache: cache.output(item("dog")), KeyError, "item: got 'dog', needs a cached one"),
    (lambda cache: place(cache, EMBEDDINGS, item("dog", 2, start=4)), KeyError, "item: got 'dog', needs a cached one"),
    (lambda cache: place(cache, EMBEDDINGS, item("cat", 3, start=4)), ValueError, r"'cat': got .*, needs 3 rows"),
    (lambda cache: place(cache, WIDE, item("cat", 2, start=4)), ValueError, r"'cat': got rows \[3\], needs \[4\]"),
    (lambda cache: pc.EncoderCache(1, "best"), ValueError, "policy: got 'best', needs one of lru, fifo, lfu, largest"),
    (lambda cache: pc.EncoderCache(1, None), ValueError, "policy: got None, needs one of lru, fifo, lfu, largest"),
    (lambda cache: pc.EncoderCache(-1), ValueError, "max_bytes: got -1, needs at least 0"),
    (lambda cache: item("cat", start=-1), ValueError, "start: got -1, needs at least 0"),
    (lambda cache: item("cat", 0), ValueError, "length: got 0, needs at least 1"),
    (lambda cache: item("cat", start=1.0), TypeError, "start: got 1.0, needs an int"),
]


def place(cache, embeddings, wrong):
    cache.place(embeddings, np.arange(9), [item("cat", 2), wrong] if embeddings is EMBEDDINGS else [wrong])


@pytest.mark.quick
@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_invalid_arguments_are_refused_and_change_nothing(call, error, message):
    cache = pc.EncoderCache(2 * ROW)
    cache.put("a", item("cat", 2), output(2, 5.0))
    cache.release("a")
    with pytest.raises(error, match=message):
        call(cache)
    assert not EMBEDDINGS.any()
    assert (cache.hits, cache.misses, len(cache), cache.nbytes) == (0, 0, 1, 2 * ROW)
    cache.put("b", item("cow", 2), output(2))  # the cat is not held
    assert "cat" not in cache


def test_a_part_of_a_batch_does_not_keep_the_batch():
    cache, batch = pc.EncoderCache(100 * ROW), torch.randn(50, 3)
    cache.put("a", item("cat", 2), batch[10:12])
    kept = cache.output(item("cat", 2))
    assert torch.equal(kept, batch[10:12])
    assert kept.untyped_storage().nbytes() == 2 * ROW


def test_a_part_of_a_batch_on_the_right_device_does_not_keep_the_batch(monkeypatch):
    """`to("cuda")` returns a tensor on cuda:0 itself, although these devices are not equal."""
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device: self)
    cache, batch = pc.EncoderCache(1 << 20, device="cpu:0"), torch.zeros(100, 8)
    cache.put("a", pc.EncoderItem("x", 0, 2), batch[:2])
    assert cache.output(pc.EncoderItem("x", 0, 2)).untyped_storage().nbytes() == cache.nbytes


def test_an_image_that_ends_inside_a_block():
    """The first block is a prefix hit. The rest of the image comes from the encoder cache."""
    manager = pc.CacheManager(8, 4)
    tensors = pc.TensorCache(manager, 8, 4)
    encoder = pc.EncoderCache(1 << 20)
    image, pixels, runs = pc.EncoderItem("sha256 of the pixels", 0, 6), torch.randn(6, 3), []

    def encode(what):
        runs.append(what)
        return pixels

    def forward(embeddings, past):
        """A causal model, each row of which depends on all embeddings before it."""
        return torch.cat([past, embeddings]).cumsum(0)[len(past) :] if len(past) else embeddings.cumsum(0)

    def serve(request, words):
        pad, vocabulary = 99, {"foo": 1, "bar": 2, "baz": 3}
        prompt = [pad] * image.length + [vocabulary[word] for word in words]
        key = pc.KeyAt(image.start, image.content_hash)
        allocation = manager.allocate(request, prompt, extra_keys=key)
        for lacking in encoder.missing(request, [image], allocation.compute_spans):
            encoder.put(request, lacking, encode(lacking))
        positions = np.concatenate([np.arange(*span) for span in allocation.compute_spans])
        embeddings = torch.tensor(prompt, dtype=torch.float32)[positions, None].repeat(1, 3)
        encoder.place(embeddings, positions, [image])
        cached = tensors.load(request, ["embeds"], num_tokens=allocation.num_cached_tokens) if tensors.names else {}
        past = cached.get("embeds", torch.empty(0, 3))
        step = pc.Step.of({request: allocation}, {"hidden": forward(embeddings, past), "embeds": embeddings})
        tensors.store(step)
        manager.commit(request, len(prompt))
        return allocation.num_cached_tokens, tensors.load(request)["hidden"]

    assert serve("first", ["foo"])[0] == 0
    hit, hidden = serve("second", ["bar", "baz"])
    assert hit == 4
    assert runs == [image]
    whole = torch.cat([pixels, torch.tensor([[2.0] * 3, [3.0] * 3])])
    assert torch.equal(hidden, whole.cumsum(0))


@pytest.mark.parametrize("key", [lambda entry: 1 / 0, lambda entry: object()], ids=["raises", "does not compare"])
def test_a_policy_that_fails_changes_nothing(key):
    cache = pc.EncoderCache(3 * ROW, policy=key)
    for name in "abc":
        cache.put(name, item(name, 1), output(1))
        cache.release(name)
    before = len(cache), cache.nbytes
    for _ in range(2):
        with pytest.raises((ZeroDivisionError, TypeError)):
            cache.put("d", item("d", 1), output(1))
        assert (len(cache), cache.nbytes) == before
        cache.check()
    cache._key = lambda entry: entry.last_access
    cache.put("d", item("d", 1), output(1))
    assert [name for name in "abcd" if name in cache] == ["b", "c", "d"]
    cache.check()


def test_equal_hashes_of_other_types_are_other_contents():
    cache = pc.EncoderCache(100 * ROW)
    cache.put("a", item(1, 2), output(2))
    for other in (True, 1.0):
        assert other not in cache
        assert cache.missing("b", [item(other, 2)], [(0, 9)]) == [item(other, 2)]
    cache.put("a", item((1, "x"), 2), output(2))
    assert (True, "x") not in cache
    assert (1, "x") in cache


class Holders(RuleBasedStateMachine):
    """Random puts, lookups and releases. Bytes, holders and the budget agree after each."""

    def __init__(self):
        super().__init__()
        self.cache = pc.EncoderCache(10 * ROW)
        self.held = {}

    @rule(request=st.integers(0, 3), name=st.integers(0, 6))
    def use(self, request, name):
        what = item(name, 1 + name % 3)
        lacking = self.cache.missing(request, [what], [(0, 9)])
        try:
            if lacking:
                self.cache.put(request, what, output(what.length, float(name)))
        except MemoryError:
            return
        self.held.setdefault(request, set()).add(name)

    @rule(request=st.integers(0, 3))
    def release(self, request):
        self.cache.release(request)
        self.held.pop(request, None)

    @invariant()
    def what_is_held_is_there(self):
        self.cache.check()
        for names in self.held.values():
            for name in names:
                assert torch.equal(self.cache.output(item(name, 1 + name % 3)), output(1 + name % 3, float(name)))


Holders.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestHolders = Holders.TestCase
