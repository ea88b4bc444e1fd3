"""pc.paged_attention: reference on the CPU, kernels in the interpreter or on a GPU, through one dispatcher."""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from attention_cases import Case, attend, build, check, dense, plan_of
from processes import in_threads

import pc
from pc.triton_ops._attention.plan import cached_with
from pc.triton_ops._core.runtime import INTERPRET

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
HEAD_DIMS = [16, 64, 80, 96, 128, 192, 256]


@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_grid(dtype, head_dim, device):
    """Every head_dim is tested with every dtype; block sizes and batches take turns."""
    turn = HEAD_DIMS.index(head_dim) + dtype.itemsize
    block_size = (8, 16, 1, 64, 48, 256, 5)[turn % 7]
    case = Case((70, 30), (1, 11) if turn % 2 else (9, 1), (2, 1), head_dim, block_size, dtype, seed=head_dim)
    batch = build(case).to(device)
    check(build(case), *attend(batch))


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, BF16, F16])
def test_a_negative_scale(dtype, device):
    batch = dataclasses.replace(build(Case(lens=(70, 9), queries=(1, 9), dtype=dtype)), scale=-0.125)
    check(batch, *attend(batch.to(device)))


@pytest.mark.interpreter
def test_threads_take_turns_in_the_interpreter(device):
    """The interpreter has one place for the number of the running program."""
    batch = build(Case(lens=(70, 9), queries=(1, 9))).to(device)
    expected = pc.paged_attention(*batch.tensors, batch.scale)

    def run(_):
        return [pc.paged_attention(*batch.tensors, batch.scale) for _ in range(3)]

    found = [out for outs in in_threads(run, *range(4)) for out in outs]
    assert len(found) == 12
    assert all(torch.equal(out, expected) for out in found)


def test_export(device):
    batch = build(Case(lens=(20, 9), queries=(1, 9))).to(device)
    expected = pc.paged_attention(*batch.tensors, batch.scale)

    class Layer(torch.nn.Module):
        def forward(self, query, key, value, tables, lens, starts):
            return pc.paged_attention(query, key, value, tables, lens, starts, 0.125)

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    exported = torch.export.export(Layer(), batch.tensors, dynamic_shapes=({0: tokens}, None, None, None, None, None))
    assert torch.equal(exported.module()(*batch.tensors), expected)


def test_bitwise_over_physical_blocks(device):
    """The places of blocks change no bit."""
    case = Case(lens=(300, 40), queries=(1, 20), dtype=F16)
    batch = build(case).to(device)
    query, key, value, tables, lens, starts = batch.tensors
    order = torch.randperm(key.shape[0], device=device)
    inverse = torch.argsort(order).to(torch.int32)
    moved = torch.where(tables < key.shape[0], inverse[tables.clamp(max=key.shape[0] - 1).long()], tables)
    first = pc.paged_attention(query, key, value, tables, lens, starts, batch.scale)
    second = pc.paged_attention(query, key[order], value[order], moved, lens, starts, batch.scale)
    assert torch.equal(first, second)


@pytest.fixture
def rowwise_dot(monkeypatch):
    """Compute dots row by row: the interpreter calls BLAS, whose rounding depends on a row's place."""
    if not INTERPRET:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, *options):
        product = np.matmul(a.data[:, None, :], b.data, dtype=d.data.dtype)[:, 0]
        return TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("split_keys", [64, 8192])
def test_batch_invariant(split_keys, device, monkeypatch, rowwise_dot):
    """A row's bits do not depend on its batch, on chunking, or on the width of the tables."""
    from pc.triton_ops._attention import build as building

    monkeypatch.setattr(building, "INVARIANT_SPLIT_KEYS", split_keys)
    batch = build(Case(lens=(140, 90), queries=(40, 1), heads=(2, 1), sinks=True, seed=3)).to(device)
    query, key, value, tables = batch.tensors[:4]
    options = {"batch_invariant": True, "sinks": batch.options["sinks"]}
    whole = pc.paged_attention(*batch.tensors, batch.scale, **options)

    def alone(length, begin, end):
        bounds = torch.tensor([0, end - begin], dtype=torch.int32, device=device)
        new_lens = torch.tensor([length], dtype=torch.int32, device=device)
        width = -(-length // key.shape[1])
        return pc.paged_attention(
            query[begin:end], key, value, tables[:1, :width], new_lens, bounds, batch.scale, **options
        )

    assert torch.equal(alone(120, 0, 20), whole[:20])
    assert torch.equal(alone(121, 20, 21), whole[20:21])
    assert torch.equal(alone(140, 21, 40), whole[21:40])

    size, heads = key.shape[1], key.shape[2]
    # As in a captured graph, some rows and sequences are padding, and bounds come from shapes.
    rows = torch.cat([query[21:22], query[40:41], torch.zeros_like(query[:2])])
    padded = torch.nn.functional.pad(tables, (0, 3, 0, 2), value=-1)
    step_lens = torch.tensor([122, 90, 0, 0], dtype=torch.int32, device=device)
    bounds = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32, device=device)
    step = (padded, step_lens, bounds)
    plan = pc.attention_plan(*step, size, num_kv_heads=heads, batch_invariant=True)
    for given in (None, plan):
        out = pc.paged_attention(rows, key, value, *step, batch.scale, plan=given, max_query_len=1, **options)
        assert torch.equal(out[:2], torch.cat([whole[21:22], whole[40:41]]))


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("operator", ["decode", "prefill", "lists"])
def test_query_heads_far_apart(operator, device):
    """A query's last head is 2**31 elements after its first, with smaller strides; memory is only partly backed."""
    num_tokens = 20 if operator == "prefill" else 1
    batch = build(Case(lens=(40,), queries=(num_tokens,), heads=(3, 1), dtype=BF16)).to(device)
    memory = torch.zeros(2**31 + 64 * num_tokens, dtype=BF16, device=device)
    far = memory.as_strided(batch.query.shape, (64, 2**30, 1)).copy_(batch.query)
    _, *others = batch.tensors
    if operator == "lists":
        every = torch.arange(3, dtype=torch.int32, device=device).expand(num_tokens, 1, 3)
        attend = functools.partial(pc.sparse_gap_attention, query_positions=None, scale=0.125, query_blocks=every)
    else:
        attend = functools.partial(pc.paged_attention, scale=0.125)
    assert torch.equal(attend(far, *others), attend(batch.query, *others))


@pytest.mark.slow
@pytest.mark.interpreter
@pytest.mark.parametrize("operator", ["decode", "prefill", "lists"])
@pytest.mark.parametrize("far", ["heads", "slots", "blocks"])
def test_cached_heads_slots_and_blocks_far_apart(far, operator, device):
    """A cache's last head, slot or block is at least 2**31 elements after the first, with smaller strides."""
    num_tokens = 20 if operator == "prefill" else 1
    case = Case(lens=(40,), queries=(num_tokens,), heads=(6, 3), dtype=BF16, cache_dtype=torch.int8)
    batch = build(case).to(device)
    query, *caches, tables, lens, starts = batch.tensors
    blocks, block_size, kv_heads, head_dim = caches[0].shape
    inner = blocks * block_size * kv_heads * head_dim
    strides = {
        "heads": (block_size * head_dim, head_dim, 2**30, 1),
        "slots": (kv_heads * head_dim, 2**28, head_dim, 1),
        "blocks": (2**29, kv_heads * head_dim, head_dim, 1),
    }[far]
    last = max(stride * (size - 1) for stride, size in zip(strides, caches[0].shape, strict=True))
    assert last >= 2**31
    memory = torch.zeros(last + inner, dtype=torch.int8, device=device)
    options = dict(batch.options)
    attend = functools.partial(pc.paged_attention, scale=0.125)
    if operator == "lists":
        every = torch.arange(3, dtype=torch.int32, device=device).expand(num_tokens, kv_heads, 3)
        attend = functools.partial(pc.sparse_gap_attention, query_positions=None, scale=0.125, query_blocks=every)
    # The values are the keys, so no second memory is needed.
    spread = memory.as_strided(caches[0].shape, strides).copy_(caches[0])
    expected = attend(query, caches[0], caches[0], tables, lens, starts, **options)
    assert torch.equal(attend(query, spread, spread, tables, lens, starts, **options), expected)


@pytest.mark.parametrize("cache_dtype", [E4M3, pytest.param(torch.int8, marks=pytest.mark.slow)])
def test_codes_are_read_as_exactly_for_queries_of_any_size(cache_dtype, device):
    """Quantized keys are multiplied in float16, to whose range bfloat16 queries are scaled row by row."""
    batch = build(Case(lens=(150, 90), queries=(1, 20), cache_dtype=cache_dtype, dtype=BF16))
    out, lse = attend(batch.to(device))
    # Powers of two change no rounding, so they change no bit of the result.
    size = 2.0 ** torch.randint(-60, 60, (batch.query.shape[0],)).to(torch.float32)
    for row in range(batch.query.shape[0]):
        batch.query[row] *= size[row]
    for row in range(0, batch.query.shape[0], 5):
        again = attend(batch.to(device), scale=batch.scale / size[row].item())
        assert torch.equal(again[0][row], out[row])
        assert torch.equal(again[1][row], lse[row])


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "options", [{}, {"holes": 0.5}, {"block_size": 48}, {"block_size": 64, "window": 150}], ids=str
)
def test_steps_of_two_tiles(options, device, monkeypatch, chosen):
    """Without a mask, a step may take 128 keys, from tiles that need not be adjacent."""
    from pc.triton_ops._attention import build as building

    tiles = building.prefill_tiles
    wide = lambda *args: dataclasses.replace(tiles(*args), block_n=128, two_loops=True)  # noqa: E731
    monkeypatch.setattr(building, "prefill_tiles", wide)
    case = Case(lens=(700, 450), queries=(40, 20), heads=(2, 1), head_dim=16, **options)
    if "holes" in options:  # only whole tiles are absent
        case = dataclasses.replace(case, block_size=64)
    batch = build(case).to(device)
    check(build(case), *attend(batch, "sliding_window_attention" if case.window else "paged_attention"))
    (call,) = chosen
    assert call.prefill.constants["BLOCK_N"] == 128


@pytest.mark.interpreter
def test_prefills_alone_have_no_splits_of_decodes(device, chosen):
    """With one long chunk no sequence has few queries, so decodes need no launch, no sum and no memory."""
    batch = build(Case(lens=(300, 200), queries=(100, 100), bounds=True, padding=0)).to(device)
    check(build(batch.case), *attend(batch))
    (call,) = chosen
    assert call.decode is None
    assert call.prefill is not None


@pytest.mark.interpreter
def test_partial_results_are_cached_with_the_plan(device, chosen):
    batch = build(Case(lens=(1000, 300), queries=(1, 1), heads=(2, 1))).to(device)
    plan = plan_of(batch)
    first = pc.paged_attention(*batch.tensors, batch.scale, plan=plan)
    ((parts, lse),) = cached_with(plan).values()
    assert torch.equal(pc.paged_attention(*batch.tensors, batch.scale, plan=plan), first)
    assert cached_with(plan).popitem()[1] == (parts, lse)
    (call,) = chosen
    assert parts.shape == call.decode_parts
    # The interpreter of Triton 3.6 does not support bool.
    assert bool not in {type(number) for number in (*call.decode.numbers, *call.merge.numbers)}


@pytest.mark.interpreter
def test_parts_of_layers_of_other_shapes_stay_where_a_graph_may_read_them(device):
    plan = None
    for head_dim in (64, 32, 64):
        batch = build(Case(lens=(1000, 300), queries=(1, 1), heads=(2, 1), head_dim=head_dim)).to(device)
        plan = plan_of(batch) if plan is None else plan
        check(build(batch.case), *attend(batch, plan=plan))
    assert [parts.shape[2] for parts, _ in cached_with(plan).values()] == [64, 32]


def test_grad_is_allowed_without_grad_mode():
    batch = build(Case())
    with torch.no_grad():
        out = pc.paged_attention(batch.query.requires_grad_(), *batch.tensors[1:], batch.scale)
    assert not out.requires_grad


def test_misuse_is_refused_while_tracing():
    batch = build(Case())
    compiled = torch.compile(pc.paged_attention, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="seq_lens: got int64"):
        compiled(*batch.tensors[:4], batch.seq_lens.long(), batch.query_start_loc, batch.scale)


@pytest.mark.gpu
def test_captured_graph_replays_with_other_lengths_and_holes(device):
    case = Case(lens=(300, 200), queries=(1, 1), holes=0.3)
    batch = build(case).to(device)
    other = build(Case(lens=(17, 310), queries=(1, 1), holes=0.6, seed=5)).to(device)
    query, key, value, tables, lens, starts = (t.clone() for t in batch.tensors)
    spare = max(0, other.key_cache.shape[0] - key.shape[0])  # the caches have room for the blocks of both
    key, value = (torch.cat((cache, cache.new_zeros(spare, *cache.shape[1:]))) for cache in (key, value))
    pc.paged_attention(query, key, value, tables, lens, starts, batch.scale, max_query_len=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pc.paged_attention(query, key, value, tables, lens, starts, batch.scale, max_query_len=1)
    width = min(tables.shape[1], other.block_tables.shape[1])
    key[: other.key_cache.shape[0]], value[: other.key_cache.shape[0]] = other.key_cache, other.value_cache
    tables.fill_(-1)
    tables[:, :width] = other.block_tables[:, :width]
    lens.copy_(other.seq_lens)
    query.copy_(other.query)
    graph.replay()
    check(other.to(torch.device("cpu")), out)


def test_dense_oracle_is_attention():
    """The reference itself equals PyTorch's attention."""
    batch = build(Case(lens=(50,), queries=(50,), heads=(2, 2)))
    t = torch.arange(50)
    block = batch.block_tables[0, t // 16].long()
    key, value = batch.key_cache[block, t % 16].double(), batch.value_cache[block, t % 16].double()
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.double().transpose(0, 1) for x in (batch.query, key, value)), is_causal=True
    )
    assert torch.allclose(dense(batch)[0], expected.transpose(0, 1))
    assert math.isfinite(dense(batch)[1].sum())


@pytest.mark.parametrize("q_len", [2, 40])
def test_lengths_without_the_new_tokens_are_refused(q_len, device):
    """Formerly, seq_lens without this call's tokens gave rows of zeros and no error."""
    batch = build(Case(lens=(64, 64), queries=(1, q_len))).to(device)
    batch.seq_lens[1] = q_len - 1
    pc.set_debug_mode(True)
    for call in (
        lambda: pc.paged_attention(*batch.tensors, batch.scale),
        lambda: pc.attention_plan(*batch.tensors[3:], 16),
    ):
        with pytest.raises(ValueError, match=rf"seq_lens: got {q_len - 1} in row 1, needs 0 or at least {q_len}"):
            call()
    batch.seq_lens[1] = 0
    assert not pc.paged_attention(*batch.tensors, batch.scale)[1:].any()


def test_a_head_major_cache_is_told_apart_from_a_wrong_query():
    batch = build(Case(lens=(40,), queries=(1,), heads=(4, 2)))
    query, key, value, *rest = batch.tensors
    key, value = key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous()
    with pytest.raises(ValueError, match=r"^key_cache: got 16 KV heads, needs .*cache.transpose\(1, 2\)$"):
        pc.paged_attention(query, key, value, *rest, batch.scale)
    assert torch.equal(
        pc.paged_attention(query, key.transpose(1, 2), value.transpose(1, 2), *rest, batch.scale),
        pc.paged_attention(*batch.tensors, batch.scale),
    )
