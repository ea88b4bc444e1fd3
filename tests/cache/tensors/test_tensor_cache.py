"""TensorCache: its results equal those of a run without caching, and never include another request's rows."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from cache_cases import drop

import pc
from pc.cache.tensors import rows as rows_module
from pc.cache.tensors import step as step_module
from pc.cache.tensors.rows import MissingRowsError

BLOCK = 4


def rows_of(tokens):
    """Return the rows of a sequence from a causal model, in which each row depends on all tokens up to its own."""
    state, rows = 7, []
    for token in tokens:
        state = (state * 31 + int(token) + 1) % 65521
        rows.append((state, state % 251, state % 13))
    return torch.tensor(rows, dtype=torch.int64).view(-1, 3)


def outputs_of(tokens, positions):
    """Return the output of a forward pass over some positions: two per-token tensors, and the last logits."""
    rows = rows_of(tokens)[torch.as_tensor(positions, dtype=torch.long)]
    return {"hidden": rows.double(), "mm": {"feature": rows[:, :2].to(torch.int16)}, "logits": torch.zeros(3, 9)}


def expected(tokens):
    rows = rows_of(tokens)
    return {"hidden": rows.double(), "mm.feature": rows[:, :2].to(torch.int16)}


def same(got, want):
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def positions_of(allocation):
    return [p for start, end in allocation.compute_spans for p in range(start, end)]


def run(manager, tensors, request, tokens, **options):
    """Allocate, compute, store and commit a request; return the result of join."""
    allocation = manager.allocate(request, tokens, **options)
    tensors.prepare(allocation)
    step = pc.Step.of({request: allocation}, outputs_of(tokens, positions_of(allocation)))
    joined = tensors.join(step)[request]
    tensors.store(step)
    manager.commit(request, len(tokens))
    return joined


@pytest.fixture
def pair():
    manager = pc.CacheManager(16, BLOCK)
    return manager, pc.TensorCache(manager, 16, BLOCK, exclude=("logits",))


def test_a_prompt_cached_whole_computes_one_token_and_stores_none(pair):
    manager, tensors = pair
    tokens = list(range(8))
    run(manager, tensors, "a", tokens)
    before = tensors.rows("hidden").clone()
    assert same(run(manager, tensors, "b", tokens), expected(tokens))
    assert torch.equal(tensors.rows("hidden").nan_to_num(), before.nan_to_num())
    assert same(tensors.load("b"), expected(tokens))


def test_outputs_that_are_not_per_token_are_passed_through(pair):
    manager, tensors = pair
    allocation = manager.allocate("a", list(range(6)))
    outputs = {**outputs_of(range(6), range(6)), "text": "x", "scalar": torch.tensor(1), "list": [torch.zeros(6), 5]}
    others = tensors.store(pc.Step.of({"a": allocation}, outputs))
    assert set(others) == {"logits", "text", "scalar", "list.1"}
    assert tensors.names == ("hidden", "mm.feature", "list.0")


@pytest.mark.parametrize("as_step", ["of allocations", "of slots", "of slots and requests"])
@pytest.mark.parametrize("count", [1, 3])
def test_a_first_step_that_decodes_discovers_no_name(count, as_step):
    manager = pc.CacheManager(16, BLOCK)
    tensors = pc.TensorCache(manager, 16, BLOCK, exclude=())
    for request in range(count):
        manager.allocate(request, [request])
    allocations = {request: manager.append(request, [7]) for request in range(count)}
    outputs = {"h": torch.ones(count, 2), "logits": torch.zeros(count, 9)}
    step = pc.Step.of(allocations, outputs)
    if as_step != "of allocations":
        step = pc.Step(outputs, step.slot_mapping, step.requests if "requests" in as_step else ())
    assert set(tensors.store(step)) == {"h", "logits"}
    assert tensors.names == ()
    more = manager.append(0, [8, 9])
    outputs = {"h": torch.ones(2, 2), "logits": torch.zeros(1, 9)}
    assert set(tensors.store(pc.Step.of({0: more}, outputs))) == {"logits"}
    assert tensors.names == ("h",)
    last = pc.Step.of({0: manager.append(0, [5])}, {"h": torch.full((1, 2), 4.0), "logits": torch.zeros(1, 9)})
    assert set(tensors.store(last)) == {"logits"}
    assert tensors.stored("h").sum() == 3


def test_logits_are_cached_only_if_they_are_registered():
    tensors = pc.TensorCache(None, 16, BLOCK)
    step = pc.Step({"h": torch.ones(3, 2), "logits": torch.ones(3, 9)}, np.arange(3))
    assert set(tensors.store(step)) == {"logits"}
    tensors.register("logits", (9,), torch.float32)
    assert set(tensors.store(pc.Step({**step.outputs, "text": "x"}, np.arange(3)))) == {"text"}
    assert tensors.names == ("h", "logits")


def test_a_discovered_tensor_without_room_is_not_cached(caplog):
    tensors = pc.TensorCache(None, 16, BLOCK, max_bytes=1 << 10)
    with caplog.at_level(logging.WARNING, "pc.cache"):
        for start in (0, 3):
            outputs = {"scores": torch.ones(3, 152_000), "h": torch.ones(3, 2)}
            assert set(tensors.store(pc.Step(outputs, np.arange(start, start + 3)))) == {"scores"}
    assert tensors.names == ("h",)
    assert tensors.stored("h").sum() == 6
    assert caplog.text.count("scores: needs 38912000 bytes") == 1


def test_padded_outputs_are_not_stored(pair, caplog):
    manager, tensors = pair
    allocation = manager.allocate("a", [1, 2, 3])
    tensors.store(pc.Step.of({"a": allocation}, {"h": torch.ones(3, 2)}))
    with caplog.at_level(logging.WARNING, "pc.cache"):
        for token in (4, 5):
            step = pc.Step.of({"a": manager.append("a", [token])}, {"h": torch.ones(8, 2)})
            assert set(tensors.store(step)) == {"h"}
    assert caplog.text.count("h: got 8 rows for 1 tokens, none is kept") == 1
    assert tensors.available("a") == 3
    tensors.store(pc.Step.of({"a": manager.append("a", [6])}, {"h": torch.ones(1, 2)}))
    assert tensors.names == ("h",)
    assert tensors.stored("h").sum() == 4


ONES = torch.ones(3, 2)
SECOND_STEPS = {
    "one row too few": (4, {"h": torch.ones(4, 2), "batch": torch.ones(3, 5)}, {"batch"}, ("h",)),
    "padded": (2, {"h": torch.ones(2, 2), "batch": torch.ones(3, 5)}, {"batch"}, ("h", "batch")),
    "sparse": (3, {"h": torch.eye(3).to_sparse(), "mask": torch.eye(3).to_sparse()}, {"h", "mask"}, ("batch",)),
    "empty": (0, {"h": torch.ones(0, 2), "x": torch.ones(0, 5)}, {"h", "x"}, ("h", "batch")),
}


@pytest.mark.quick
@pytest.mark.parametrize(("count", "outputs", "others", "names"), SECOND_STEPS.values(), ids=SECOND_STEPS)
def test_a_discovered_name_is_dropped_if_a_later_output_is_not_per_token(count, outputs, others, names, caplog):
    tensors = pc.TensorCache(None, 16, BLOCK)
    assert tensors.store(pc.Step({"h": ONES, "batch": torch.ones(3, 5)}, np.arange(3))) == {}
    with caplog.at_level(logging.WARNING, "pc.cache"):
        assert set(tensors.store(pc.Step(outputs, np.arange(4, 4 + count)))) == others
    assert tensors.names == names
    for name in ("h", "batch"):
        assert (f"TensorCache: {name} [" in caplog.text) == (name not in names)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("outputs", "error", "message"),
    [
        ({"h": torch.ones(3, 7)}, ValueError, r"h: got rows \[7\] torch.float32, needs \[2\] torch.float32"),
        ({"h": torch.ones(3, 2).half()}, ValueError, r"h: got rows \[2\] torch.float16, needs \[2\] torch.float32"),
        ({"h": torch.ones(4, 2)}, ValueError, r"h: got shape \[4, 2\], needs 3 rows"),
        ({"x": torch.ones(3), "h": torch.ones(3)}, ValueError, r"h: got rows \[\]"),
        ({"a.b": torch.ones(3), "a": {"b": torch.ones(3)}}, ValueError, r"two values named a\.b"),
    ],
)
def test_outputs_that_do_not_fit_are_refused_and_nothing_changes(outputs, error, message):
    tensors = pc.TensorCache(None, 16, BLOCK, max_bytes=1 << 20)
    tensors.register("h", (2,), torch.float32)
    tensors.store(pc.Step({"h": torch.full((3, 2), 5.0)}, np.arange(3)))
    with pytest.raises(error, match=message):
        tensors.store(pc.Step(outputs, np.arange(3)))
    assert tensors.names == ("h",)
    assert torch.equal(tensors.load([0], num_tokens=3)["h"], torch.full((3, 2), 5.0))


def store_at(*slots):
    return lambda tensors: tensors.store(pc.Step({"h": torch.ones(2, 2)}, np.array(slots)))


WRONG = [
    (store_at(63, 64), ValueError, "slot_mapping: got values from 63 to 64, needs -1 to 63"),
    (store_at(0, -2), ValueError, "needs -1 to 63"),
    (store_at([0, 1]), ValueError, r"slot_mapping: got shape \[1, 2\]"),
    (store_at(0.0, 1.0), TypeError, "slot_mapping: got float64, needs integers"),
    (
        lambda tensors: tensors.store(pc.Step(ONES, np.arange(3))),
        TypeError,
        "outputs: got Tensor, needs a mapping by name",
    ),
    (lambda tensors: tensors.join(pc.Step({}, np.empty(0, np.int64))), ValueError, "step: got one without requests"),
    (
        lambda tensors: tensors.load([0, 16], num_tokens=5),
        ValueError,
        "request: got block numbers from 0 to 16, needs -1",
    ),
    (lambda tensors: tensors.load([-2, 0], num_tokens=5), ValueError, "request: got block numbers from -2 to 0"),
    (lambda tensors: tensors.load([6, 2]), ValueError, "num_tokens: got None"),
    (lambda tensors: tensors.load([6, 2], num_tokens=9), ValueError, "num_tokens: got 9, needs 0 to 8"),
    (lambda tensors: tensors.load([6], num_tokens=1, missing="no"), ValueError, "missing: got 'no', needs 'raise' or"),
    (lambda tensors: tensors.register("h", (-1,), torch.float32), ValueError, r"feature_shape: got \[-1\]"),
    (lambda tensors: tensors.forget([-2]), ValueError, "block_ids: got numbers from -2 to -2, needs -1 to 15"),
    (lambda tensors: tensors.forget([1.0]), TypeError, "block_ids: got float64"),
    (lambda tensors: tensors.forget([True]), TypeError, "block_ids: got bool"),
    (lambda tensors: tensors.forget(None), TypeError, "block_ids: got None, needs integers"),
    (lambda tensors: tensors.load([0.5, 1.9], num_tokens=5), TypeError, "request: got float64, needs integers"),
    (lambda tensors: tensors.load([[0, 1]], num_tokens=5), ValueError, r"request: got shape \[1, 2\], needs \[n\]"),
    (lambda tensors: tensors.load([0, 1], num_tokens=1.5), TypeError, "num_tokens: got 1.5, needs an int"),
    *(
        (
            lambda tensors, pair=pair: tensors.copy([pair]),
            ValueError,
            f"pairs: got numbers from {min(pair)} to {max(pair)}, needs 0",
        )
        for pair in ((-1, 0), (0, -1), (16, 0), (0, 16))
    ),
    (lambda tensors: tensors.forget(3), ValueError, r"block_ids: got shape \[\], needs \[n\]"),
    (lambda tensors: tensors.forget(1.5), TypeError, "block_ids: got float64"),
    (lambda tensors: tensors.register("x", None, torch.float32), TypeError, "feature_shape: got None, needs integers"),
    (lambda tensors: tensors.register("x", (2.0,), torch.float32), TypeError, "feature_shape: got float64"),
    (lambda tensors: tensors.register("x", (2,), "float32"), TypeError, "dtype: got 'float32', needs a torch.dtype"),
    (lambda tensors: tensors.cost(["2"], torch.float32), TypeError, "feature_shape: got <U1, needs integers"),
    (lambda tensors: tensors.cost((-2,), torch.float32), ValueError, r"feature_shape: got \[-2\], needs sizes"),
    (lambda tensors: tensors.cost((2,), None), TypeError, "dtype: got None, needs a torch.dtype"),
    (lambda tensors: tensors.prepare(None), TypeError, "allocation: got NoneType, needs an Allocation"),
    (lambda tensors: tensors.swap_out(None), TypeError, "pairs: got None, needs integers"),
    (lambda tensors: tensors.swap_out([(0, 1, 2)]), ValueError, r"pairs: got shape \[1, 3\], needs \[n, 2\]"),
    (lambda _: pc.Step.of(None, {}), TypeError, "allocations: got NoneType, needs a mapping by request id"),
    (lambda tensors: tensors.copy([(0.0, 1.0)]), TypeError, "pairs: got float64, needs integers"),
    (lambda tensors: tensors.copy([(0, 1, 2)]), ValueError, r"pairs: got shape \[1, 3\], needs \[n, 2\]"),
    (lambda tensors: tensors.rows("x"), KeyError, "names: got 'x', needs one of"),
    (lambda tensors: tensors.stored("x"), KeyError, "names: got 'x', needs one of"),
    (lambda tensors: tensors.available([0], ["x"], 1), KeyError, "names: got 'x', needs one of"),
    *(
        (lambda tensors, call=call: call(tensors, ONES), TypeError, "step: got Tensor, needs a pc.Step")
        for call in (pc.TensorCache.store, lambda tensors, step: tensors.read(step, ["h"]), pc.TensorCache.join)
    ),
    (lambda _: pc.TensorCache(None, 0, BLOCK), ValueError, "num_blocks: got 0, needs at least 1"),
    (lambda _: pc.TensorCache(None, 16, 0), ValueError, "block_size: got 0, needs at least 1"),
    (lambda _: pc.TensorCache(None, "16", BLOCK), TypeError, "num_blocks: got '16', needs an int"),
    (lambda _: pc.TensorCache(None, 16, 4.0), TypeError, "block_size: got 4.0, needs an int"),
    (lambda _: pc.TensorCache(pc.CacheManager(16, BLOCK), 8, BLOCK), ValueError, "num_blocks: got 8, needs 16"),
    (lambda _: pc.TensorCache(pc.CacheManager(16, BLOCK), 16, 8), ValueError, "block_size: got 8, needs 4"),
    (lambda _: pc.TensorCache(pc.CacheManager(16, BLOCK), 16, BLOCK, group=1), ValueError, "group: got 1"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_wrong_arguments_are_refused(call, error, message):
    tensors = pc.TensorCache(None, 16, BLOCK)
    with pytest.raises(error, match=message):
        call(tensors)
    assert tensors.names == ()


def test_registering_twice_needs_the_same_rows():
    tensors = pc.TensorCache(None, 16, BLOCK)
    tensors.register("h", (2, 3), torch.float16)
    tensors.register("h", [2, 3], torch.float16)
    with pytest.raises(ValueError, match=r"h: got rows \[2, 3\] torch.float32, needs \[2, 3\] torch.float16"):
        tensors.register("h", (2, 3), torch.float32)


def test_a_discovered_name_may_be_registered_later():
    tensors = pc.TensorCache(None, 16, BLOCK)
    tensors.store(pc.Step({"h": torch.ones(3, 2)}, np.arange(3)))
    tensors.register("h", (2,), torch.float32)
    with pytest.raises(ValueError, match=r"h: got shape \[4, 2\], needs 3 rows"):
        tensors.store(pc.Step({"h": torch.ones(4, 2)}, np.arange(3)))
    assert tensors.names == ("h",)


def test_memory_is_reported_before_it_is_taken(caplog):
    tensors = pc.TensorCache(None, 16, BLOCK, max_bytes=1000)
    assert tensors.max_bytes == 1000
    assert tensors.cost((2,), torch.float32) == 512
    with caplog.at_level(logging.INFO, "pc.cache"):
        tensors.register("h", (2,), torch.float32)
    assert "h [2] torch.float32 takes 512 bytes on cpu, 512 of 1000 in all" in caplog.text
    assert tensors.nbytes == 512
    with pytest.raises(MemoryError, match="h2: needs 512 bytes"):
        tensors.register("h2", (2,), torch.float32)
    assert tensors.nbytes == 512


def test_a_reused_block_shows_nothing_of_its_former_request():
    manager = pc.CacheManager(2, BLOCK)
    tensors = pc.TensorCache(manager, 2, BLOCK)
    run(manager, tensors, "a", list(range(8)))
    manager.free("a")
    manager.allocate("b", list(range(50, 58)))
    with pytest.raises(pc.MissingRowsError, match="hidden: 8 of 8 rows of 'b' are missing, from 0 on"):
        tensors.load("b", ["hidden"])
    assert tensors.load("b") == {}
    assert not bool(tensors.load("b", ["hidden"], missing="zero")["hidden"].any())
    assert not tensors.stored("hidden").any()


def test_a_name_that_a_step_lacks_is_missing_there(pair):
    manager, tensors = pair
    first = manager.allocate("a", list(range(8)))
    tensors.store(pc.Step.of({"a": first}, outputs_of(range(8), range(8))))
    manager.commit("a", 8)
    tokens = [*range(8), 60, 61]
    second = manager.allocate("b", tokens)
    outputs = outputs_of(tokens, positions_of(second))
    del outputs["mm"]
    tensors.store(pc.Step.of({"b": second}, outputs))
    assert tensors.available("b", ["hidden"]) == 10
    assert tensors.available("b") == 8
    with pytest.raises(pc.MissingRowsError, match=r"mm\.feature: 2 of 10 rows of 'b' are missing, from 8 on"):
        tensors.load("b")
    zeros = tensors.load("b", missing="zero")["mm.feature"]
    assert torch.equal(zeros[:8], expected(tokens)["mm.feature"][:8])
    assert not bool(zeros[8:].any())
    with pytest.raises(KeyError, match=r"needs one of hidden, mm\.feature"):
        tensors.load("b", ["nothing"])


def test_join_needs_rows_of_the_cached_part(pair):
    manager, tensors = pair
    tokens = list(range(8))
    manager.allocate("a", tokens)
    manager.commit("a", 8)
    allocation = manager.allocate("b", [*tokens, 9, 10])
    step = pc.Step.of({"b": allocation}, outputs_of([*tokens, 9, 10], [8, 9]))
    with pytest.raises(pc.MissingRowsError, match="hidden: 8 of 10 rows of 'b' are missing, from 0 on"):
        tensors.join(step)


def test_join_refuses_a_step_of_more_tokens_than_the_request_has(pair):
    manager, tensors = pair
    step = pc.Step.of({"a": manager.allocate("a", [1, 2, 3])}, outputs_of([1, 2, 3], range(3)))
    manager.rollback("a", 1)
    with pytest.raises(ValueError, match="positions: got 3 tokens of 'a', needs at most 2"):
        tensors.join(step)


def test_rows_behind_a_gap_are_joined():
    manager = pc.CacheManager(16, BLOCK)
    tensors = pc.TensorCache(manager, 16, BLOCK, exclude=("logits",))
    tokens = list(range(16))
    run(manager, tensors, "a", tokens)
    table = manager.block_table("a")
    manager.free("a")
    drop(manager.pools[0], table[1:2])
    allocation = manager.allocate("b", tokens, reuse="gap")
    assert allocation.compute_spans == [(4, 8), (15, 16)]
    step = pc.Step.of({"b": allocation}, outputs_of(tokens, positions_of(allocation)))
    assert same(tensors.join(step)["b"], expected(tokens))
    tensors.store(step)
    assert same(tensors.join(step)["b"], expected(tokens))
    assert same(tensors.load("b"), expected(tokens))


def test_rejected_tokens_that_were_swapped_out_do_not_come_back():
    manager = pc.CacheManager(8, BLOCK, host_blocks=8)
    tensors = pc.TensorCache(manager, 8, BLOCK, exclude=("logits",))
    run(manager, tensors, "a", list(range(7)))
    manager.rollback("a", 2)
    tensors.swap_out(manager.preempt("a", "swap"))
    manager.allocate("other", list(range(50, 82)))
    manager.free("other")
    tensors.prepare(manager.resume("a"))
    assert tensors.available("a") == 5
    manager.append("a", [70, 71])
    assert tensors.available("a") == 5


def test_a_swap_of_a_block_that_does_not_exist_copies_nothing():
    manager = pc.CacheManager(8, BLOCK, host_blocks=8)
    tensors = pc.TensorCache(manager, 8, BLOCK, exclude=("logits",))
    run(manager, tensors, "a", list(range(7)))
    tensors.swap_out([])
    with pytest.raises(ValueError, match="pairs: got blocks from 0 to 8, needs 0 to 7"):
        tensors.swap_out([*manager.preempt("a", "swap"), (8, 5)])
    manager.allocate("other", list(range(50, 82)))
    manager.free("other")
    tensors.prepare(manager.resume("a"))
    assert tensors.available("a") == 0


def test_a_copied_part_of_a_block_brings_no_rows_behind_it():
    manager = pc.CacheManager(16, BLOCK, partial_reuse=True)
    tensors = pc.TensorCache(manager, 16, BLOCK, exclude=("logits",))
    run(manager, tensors, "a", list(range(8)))
    manager.free("a")
    run(manager, tensors, "b", [*range(5), 50])
    assert manager.stats().hit_tokens_by_cause["partial"] == 1
    manager.append("b", [77, 78])
    assert tensors.available("b") == 6
    with pytest.raises(pc.MissingRowsError, match="2 of 8 rows of 'b' are missing, from 6 on"):
        tensors.load("b")


@pytest.mark.parametrize("decode", [False, True], ids=["append", "append_each"])
def test_a_copied_block_of_a_fork_brings_no_rows_behind_it(pair, decode):
    manager, tensors = pair
    run(manager, tensors, "a", list(range(8)))
    manager.fork("a", "b")
    manager.rollback("b", 3)
    for token in (60, 61):
        if decode:
            _, pairs = manager.append_each(["b"], [token])
            tensors.copy(pairs)
        else:
            tensors.copy(manager.append("b", [token]).copies)
    assert tensors.available("b") == 5
    assert same(tensors.load("a"), expected(list(range(8))))


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("each", [False, True], ids=["append", "append_each"])
def test_a_copy_has_the_rows_that_its_source_held_when_it_was_planned(pair, order, each):
    manager, tensors = pair
    run(manager, tensors, "a", [1, 2, 3])
    manager.fork("a", "b")
    manager.rollback("b", 1)
    token, tokens = {"a": 7, "b": 8}, {"a": [1, 2, 3, 7], "b": [1, 2, 8]}
    if each:  # b continues in the block that a copies from
        step = manager.append_each(list(order), [token[request] for request in order])
        tensors.copy(step.copies)
        slots = step.slot_mapping
    else:
        allocations = [manager.append(request, [token[request]]) for request in order]
        for allocation in allocations[::-1]:
            tensors.prepare(allocation)
        slots = np.concatenate([allocation.slot_mapping for allocation in allocations])
    assert [tensors.available(request) for request in "ab"] == [3, 2]
    rows = torch.cat([expected(tokens[request])["hidden"][-1:] for request in order])
    tensors.store(pc.Step({"hidden": rows}, slots))
    for request in "ab":
        assert torch.equal(tensors.load(request, ["hidden"])["hidden"], expected(tokens[request])["hidden"])


def test_without_a_manager_a_block_written_from_its_start_loses_its_rows():
    for slots in (np.array([4, 5]), np.arange(4, 6, dtype=np.int32), np.array([5, 40, 4, 9, 30, 20, 22, 24, 26, 28])):
        tensors = pc.TensorCache(None, 16, BLOCK)
        tensors.store(pc.Step({"h": torch.ones(16, 2)}, np.arange(16)))
        tensors.store(pc.Step({"h": torch.zeros(len(slots), 2)}, slots))
        assert tensors.stored("h")[1].tolist() == [True, True, False, False]
        assert tensors.stored("h")[2].all()


@pytest.mark.parametrize("count", [1, 6, 64])
@pytest.mark.parametrize("scattered", [False, True])
def test_the_rows_of_a_step_are_read_in_its_order(count, scattered):
    generator = torch.Generator().manual_seed(count)
    tensors = pc.TensorCache(None, 40, BLOCK)
    slots = torch.randperm(160, generator=generator)[:count].numpy() if scattered else np.arange(3, 3 + count)
    step = pc.Step({"h": torch.randn(count, 3, generator=generator), "n": torch.arange(count)[:, None]}, slots)
    tensors.register("h", (3,), torch.float32)
    tensors.register("n", (1,), torch.int64)
    tensors.store(step)
    found = tensors.read(step, ["n", "h"])
    assert list(found) == ["n", "h"]
    assert same(found, dict(step.outputs))
    found["h"].zero_()
    assert same(tensors.read(step, ["h"]), {"h": step.outputs["h"]})
    part = pc.Step({}, np.array([slots[0], -1, slots[-1]]))
    wanted = torch.stack([step.outputs["h"][0], torch.zeros(3), step.outputs["h"][-1]])
    assert torch.equal(tensors.read(part, ["h"])["h"], wanted)
    with pytest.raises(KeyError, match="names: got 'x', needs one of h, n"):
        tensors.read(step, ["x"])
    with pytest.raises(ValueError, match="slot_mapping: got values from 160"):
        tensors.read(pc.Step({}, np.array([160])), ["h"])
    tensors.forget([int(slots[-1]) // BLOCK])
    with pytest.raises(MissingRowsError, match="h: a row of the step's slots is missing"):
        tensors.read(step, ["h"])


def test_rows_are_written_to_slots_that_were_checked_before():
    tensors = pc.TensorCache(None, 8, BLOCK)
    slots = step_module.StepSlots(5, [(0, 2, 4), (2, 9, 12)])
    tensors.register("h", (2,), torch.float32)
    tensors.write(slots, {"h": torch.arange(10.0).view(5, 2)})
    assert slots.array.tolist() == [2, 3, 9, 10, 11]
    assert torch.equal(tensors.read(pc.Step({}, slots.array), ["h"])["h"], torch.arange(10.0).view(5, 2))
    tensors.write(slots, {})
    assert not tensors.stored("h").any()


def test_rows_of_blocks_that_others_fill_can_be_forgotten(pair):
    manager, tensors = pair
    run(manager, tensors, "a", list(range(12)))
    blocks = manager.block_table("a")
    for ids in (blocks[1:2], [-1, int(blocks[1])], iter(blocks[1:2]), {int(blocks[1])}, torch.from_numpy(blocks[1:2])):
        tensors.forget(ids)
        assert tensors.available("a") == 4
        assert tensors.stored("hidden")[blocks].tolist() == [[True] * 4, [False] * 4, [True] * 4]
    tensors.forget([])
    with pytest.raises(ValueError, match="block_ids: got numbers from 0 to 16"):
        tensors.forget([int(blocks[0]), 16])
    assert tensors.available("a") == 4


def test_two_groups_follow_tables_of_their_own():
    manager = pc.CacheManager(16, BLOCK, groups=[pc.FullAttention(), pc.Tensors(num_blocks=9)])
    tensors = pc.TensorCache(manager, 9, BLOCK, group=1)
    first, second = list(range(10)), [*range(8), 50]
    for request, tokens in (("a", first), ("b", second)):
        allocation = manager.allocate(request, tokens)
        outputs = outputs_of(tokens, positions_of(allocation))
        step = pc.Step.of({request: allocation}, {"hidden": outputs["hidden"]}, group=1)
        assert torch.equal(tensors.join(step)[request]["hidden"], expected(tokens)["hidden"])
        tensors.store(step)
        manager.commit(request, len(tokens))
    assert torch.equal(tensors.load("b")["hidden"], expected(second)["hidden"])


def test_slots_and_tables_without_a_manager():
    tensors = pc.TensorCache(None, 8, BLOCK)
    table, tokens = np.array([6, 2], np.int32), list(range(7))
    slots = np.array([6 * 4, 6 * 4 + 1, 6 * 4 + 2, 6 * 4 + 3, 8, 9, 10])
    tensors.store(pc.Step({"hidden": expected(tokens)["hidden"]}, slots))
    assert torch.equal(tensors.load(table, num_tokens=7)["hidden"], expected(tokens)["hidden"])
    tensors.forget([2])
    assert tensors.available(table, num_tokens=7) == 4
    padded = np.array([-1, 8, -1])
    tensors.store(pc.Step({"hidden": expected(tokens)["hidden"][2:5]}, padded))
    assert tensors.stored("hidden").sum() == 5


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "hidden",
    [
        torch.arange(30.0).view(3, 10).t(),
        torch.arange(60.0).view(20, 3)[::2],
        torch.nn.Parameter(torch.arange(30.0).view(10, 3)),
        torch._neg_view(torch.arange(30.0).view(10, 3)),
        torch.view_as_complex(torch.arange(20.0).view(10, 1, 2)).conj(),
        torch.arange(30.0).view(10, 3).to(torch.float8_e4m3fn),
        torch.zeros(10, 0),
        torch.arange(10) % 3 == 0,
    ],
    ids=["transposed", "every other row", "parameter", "negated", "conjugated", "float8", "no features", "bool"],
)
def test_outputs_of_any_layout(hidden, threads, monkeypatch):
    if threads > 1:
        monkeypatch.setattr(rows_module, "_ALONE_BYTES", -1)
        monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    manager = pc.CacheManager(16, BLOCK)
    tensors = pc.TensorCache(manager, 16, BLOCK)
    tokens = list(range(10))
    step = pc.Step.of({"a": manager.allocate("a", tokens)}, {"h": hidden})
    tensors.store(step)
    manager.commit("a", 10)
    want = hidden.detach().resolve_conj().resolve_neg()
    for got in (tensors.load("a")["h"], tensors.join(step)["a"]["h"]):
        assert got.dtype == want.dtype
        assert not got.requires_grad
        assert got.tolist() == want.tolist()
    again = pc.Step.of({"b": manager.allocate("b", [*tokens[:8], 70, 71])}, {"h": hidden[:2]})
    joined = tensors.join(again)["b"]["h"]
    assert joined.tolist() == torch.cat([want[:8], want[:2]]).tolist()
    assert not joined.requires_grad


def test_a_cache_made_in_inference_mode_is_written_outside(monkeypatch):
    monkeypatch.setattr(rows_module, "_ALONE_BYTES", -1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    tensors = pc.TensorCache(None, 16, BLOCK)
    with torch.inference_mode():
        tensors.store(pc.Step({"h": torch.ones(3, 2)}, np.arange(3)))
    tensors.store(pc.Step({"h": torch.ones(3, 2)}, np.arange(3, 6)))
    assert torch.equal(tensors.load([0, 1], num_tokens=6)["h"], torch.ones(6, 2))


def test_a_hole_in_a_table_has_no_rows():
    tensors = pc.TensorCache(None, 16, BLOCK)
    tensors.store(pc.Step({"h": torch.ones(8, 2)}, np.arange(8)))
    with pytest.raises(pc.MissingRowsError, match="h: 4 of 12 rows"):
        tensors.load([0, -1, 1], num_tokens=12)
    assert tensors.load([0, -1, 1], num_tokens=12, missing="zero")["h"][:, 0].tolist() == [1] * 4 + [0] * 4 + [1] * 4


def test_a_step_that_fails_while_it_writes_leaves_no_rows(monkeypatch):
    tensors = pc.TensorCache(None, 16, BLOCK)
    tensors.store(pc.Step({"h": torch.ones(3, 2)}, np.arange(3)))

    def fail(*args):
        raise KeyboardInterrupt

    for way in ("write_rows", "scatter_slots_list"):
        monkeypatch.setattr(rows_module, way, fail)
    with pytest.raises(KeyboardInterrupt):
        tensors.store(pc.Step({"h": torch.zeros(1, 2)}, np.arange(1, 2)))
    assert tensors.stored("h").ravel()[:4].tolist() == [True, False, True, False]


def test_host_rows_are_read_after_every_stream_that_accessed_them(monkeypatch):
    passed, streams = [], []

    class Stream:  # stands for a device's stream, so that the test needs no device
        def record_event(self):
            number = len(streams)
            return type("Event", (), {"synchronize": lambda event: passed.append(number)})()

    tensors = pc.TensorCache(None, 16, BLOCK)
    tensors.store(pc.Step({"h": torch.ones(8, 2)}, np.arange(8)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    one, other = Stream(), Stream()
    for stream in (one, other, one):
        streams.append(stream)
        tensors._store._accessed_on(torch.device("cuda"))
    assert not passed
    tensors.load([0, 1], num_tokens=8)
    assert sorted(passed) == [2, 3]  # the last access on each stream
    tensors.load([0, 1], num_tokens=8)
    assert len(passed) == 2


@pytest.mark.gpu
def test_pinned_rows_are_written_and_read_by_a_device():
    manager = pc.CacheManager(64, 16)
    tensors = pc.TensorCache(manager, 64, 16)
    tokens = list(range(200))
    for request, prompt in (("a", tokens), ("b", [*tokens[:160], *range(900, 950)])):
        allocation = manager.allocate(request, prompt)
        outputs = {"hidden": outputs_of(prompt, positions_of(allocation))["hidden"].cuda()}
        step = pc.Step.of({request: allocation}, outputs)
        joined = tensors.join(step)[request]["hidden"]
        assert joined.is_cuda
        assert torch.equal(joined.cpu(), expected(prompt)["hidden"])
        tensors.store(step)
        manager.commit(request, len(prompt))
        assert torch.equal(tensors.load(request)["hidden"], expected(prompt)["hidden"])
        assert torch.equal(tensors.load(request, device="cuda")["hidden"].cpu(), expected(prompt)["hidden"])
