"""Attention on CPU tensors: caches of any layout, gathers of any size, and bounded memory."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from attention_cases import Case, attend, build, check, random_case, with_random_lengths
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pc
from pc.triton_ops._attention import cpu, cpu_cache, cpu_sparse
from pc.triton_ops._attention.arguments import AttentionArgs
from pc.triton_ops._attention.operator import attention_cpu
from pc.triton_ops._core.runtime import KERNELS_ON_CPU

pytestmark = pytest.mark.skipif(KERNELS_ON_CPU, reason="kernels run on CPU tensors here")

OP = "sparse_gap_attention"
F16, BF16, E4M3, INT8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8


def sparse_case(seed: int) -> Case:
    """Return a random case with a block table per KV head, or with lists of blocks."""
    rand = random.Random(seed)
    own = {"top_k": rand.choice([1, 3, 9])} if rand.random() < 0.4 else {"head_tables": True}
    own |= {"heads": rand.choice([(4, 2), (6, 1), (3, 3), (12, 1)]), "head_dim": rand.choice([48, 64, 80])}
    if rand.random() < 0.6:  # most of the paths are those of plain attention
        own |= {"softcap": 0.0, "alibi": False, "tree": False, "scattered": rand.random() < 0.2}
        own |= {"window": rand.choice([0, 0, 0, 40]), "holes": rand.choice([0.0, 0.3, 0.5, 1.0])}
    return with_random_lengths(dataclasses.replace(random_case(rand), **own), rand, 50_000)


# In the first case a part of the queries' own tokens is absent; in the next two, whole windows of some queries are.
CASES = [
    Case(lens=(200,), queries=(40,), head_tables=True, holes=0.4),
    Case(lens=(400,), queries=(100,), window=8, holes=0.5),
    Case(lens=(400,), queries=(100,), window=8, holes=0.5, alibi=True),
    *map(sparse_case, range(50)),
]
BLOCK = 16 * 64 * 4
# Limits of what is read and computed at once. The first are the library's own; the others cut every case in parts.
LIMITS = {
    "own": (cpu_cache.GATHER_BYTES, cpu_sparse.FEW_QUERIES, cpu_sparse._MAX_SCORES),
    "three blocks": (3 * BLOCK, 0, 1 << 18),
    "ten tokens": (10 * 64 * 4, 8, 1 << 18),
    "200 scores": (cpu_cache.GATHER_BYTES, 8, 200),
}


HALF = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in (BF16, F16)]
# Of the 50 random cases, half are quick with each of the limits.
WITHIN = [
    pytest.param(case, limits, id=f"{case}-{limits}", marks=[pytest.mark.slow] * (number > 0 and (number + turn) % 2))
    for number, case in enumerate(CASES)
    for turn, limits in enumerate(LIMITS)
]


@pytest.mark.quick
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize(("case", "limits"), WITHIN)
def test_numerics(case, limits, dtype, monkeypatch):
    """Keys are gathered whole and in parts. All keys that no query attends to are NaN."""
    gather, few, scores = LIMITS[limits]
    monkeypatch.setattr(cpu_cache, "GATHER_BYTES", gather)
    monkeypatch.setattr(cpu_sparse, "_SEGMENT_KEYS", 24 if limits == "200 scores" else cpu_sparse._SEGMENT_KEYS)
    monkeypatch.setattr(cpu, "FEW_QUERIES", few)
    monkeypatch.setattr(cpu_sparse, "_MAX_SCORES", scores)
    batch = build(dataclasses.replace(case, dtype=dtype))
    check(batch, *attend(batch, OP))


IN_PLACE = [
    Case(lens=(640,), queries=(1,), head_tables=True, holes=0.5),
    Case(lens=(513, 0, 40), queries=(1, 0, 1), head_tables=True, holes=0.5, padding=3),
    Case(lens=(513, 200), queries=(1, 1), head_tables=True, holes=0.3, window=100, num_sink_tokens=20),
    Case(lens=(513, 200), queries=(1, 1), top_k=9, head_tables=True, holes=0.5),
    Case(lens=(90, 60), queries=(40, 20), top_k=3, window=50, padding=2),
]


@pytest.mark.quick
@pytest.mark.parametrize("case", IN_PLACE, ids=str)
def test_few_queries_of_a_list_copy_no_keys(case, monkeypatch):
    """A copy would take as long as the arithmetic."""

    def refuse(*_):
        raise AssertionError("keys are copied")

    for name in ("read", "gather"):
        monkeypatch.setattr(cpu_cache.Cache, name, refuse)
    batch = build(case)
    check(batch, *attend(batch, OP))


@pytest.mark.quick
@pytest.mark.parametrize("place", ["halves", "pairs", "offset", "columns", "padded", "mixed"])
def test_keys_and_values_in_parts_of_one_tensor(place):
    batch = build(Case(lens=(513, 40), queries=(1, 1), head_tables=True, holes=0.5))
    key, value = batch.key_cache, batch.value_cache
    if place == "halves":
        batch.key_cache, batch.value_cache = torch.stack([key, value])
    elif place == "pairs":
        batch.key_cache, batch.value_cache = torch.stack([key, value], 1).unbind(1)
    elif place == "offset":
        batch.key_cache, batch.value_cache = (torch.cat([x[:1], x])[1:] for x in (key, value))
    elif place == "mixed":
        batch.value_cache = value.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        wide = torch.cat([key, value, key], 3)[..., : 128 + 3 * (place == "padded")].contiguous()
        batch.key_cache, batch.value_cache = wide[..., :64], wide[..., 64:128]
    check(build(batch.case), *attend(batch, OP))


def test_a_cache_of_more_vectors_than_32_bits_can_count():
    """A vector is the key of a token and head. Untouched pages of numpy's zeros need no memory."""
    blocks, heads = (1 << 24) + 1, 8
    cache = torch.from_numpy(np.zeros((blocks, 16, heads, 1), np.int8))
    cache[-1] = torch.randint(-99, 99, cache[-1].shape, dtype=torch.int8)
    tables = torch.full((1, heads, 1), blocks - 1, dtype=torch.int32)
    query, one = torch.randn(1, heads, 1), torch.ones(1)
    rest = (torch.tensor([16], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), None, 1.0)
    far = pc.sparse_gap_attention(query, cache, cache, tables, *rest, k_scale=one, v_scale=one)
    near = cache[-1:].clone()
    assert torch.equal(far, pc.sparse_gap_attention(query, near, near, tables * 0, *rest, k_scale=one, v_scale=one))


class _Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation makes. Views make none."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given, made = (
            [x.untyped_storage() for x in tree_leaves(t) if isinstance(x, torch.Tensor) and x.layout == torch.strided]
            for t in (args, result)
        )
        known = {storage.data_ptr() for storage in given}
        self.bytes = max([self.bytes, *(storage.nbytes() for storage in made if storage.data_ptr() not in known)])
        return result


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("order", ["adjacent", "scattered", "by head"])
@pytest.mark.parametrize("cache_dtype", [INT8, E4M3, torch.float32], ids=str)
def test_gathers_of_long_contexts_are_bounded(cache_dtype, order, softcap):
    """Converted or copied keys take at most the budget, however long the context is; adjacent ones too."""
    blocks, heads, width = 1024, 2, 64
    cache = torch.randint(-9, 9, (blocks, 16, heads, width), dtype=INT8).to(cache_dtype)
    table = torch.arange(blocks, dtype=torch.int32)
    tables = (table if order == "adjacent" else table.flip(0))[None]
    if order == "by head":
        tables = torch.stack([table, table.roll(7)])[None]
    scale = None if cache_dtype == torch.float32 else torch.ones(1)
    lens, query = torch.tensor([blocks * 16], dtype=torch.int32), torch.randn(3, 4, width)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    assert blocks * 16 * heads * width * 4 > cpu_cache.GATHER_BYTES
    options = {"softcap": softcap, "k_scale": scale, "v_scale": scale}
    call = AttentionArgs(query, cache, cache, tables, lens, starts, 0.125, **options)
    with _Largest() as largest:  # a mode sees nothing inside of an operator, so its function for CPU tensors is called
        attention_cpu(call)
    assert 0 < largest.bytes <= cpu_cache.GATHER_BYTES


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("form", ["tables", "lists"])
def test_changes_between_calls_are_seen(queries, form):
    """Tables, lists and lengths are changed in place, through numpy too, which changes no version."""
    batch = build(Case(lens=(200, 200), queries=(queries, queries), head_tables=form == "tables"))
    for cache in (batch.key_cache, batch.value_cache):
        cache.nan_to_num_()
    if form == "lists":
        batch.options["query_blocks"] = torch.arange(13, dtype=torch.int32).expand(2 * queries, 2, 13).contiguous()
        batch.case = dataclasses.replace(batch.case, top_k=13)
    for change in ("none", "tables", "numpy", "lengths", "lists"):
        if change == "tables":
            batch.block_tables[0, ..., 1] = 3
        elif change == "numpy":
            batch.block_tables.numpy()[1, ..., 2] = 4
        elif change == "lengths":
            batch.seq_lens.sub_(3)
            batch.case = dataclasses.replace(batch.case, lens=(197, 197))
        elif change == "lists" and form == "lists":
            batch.options["query_blocks"][:, :, 0] = -1
            batch.options["query_blocks"] = batch.options["query_blocks"].sort(2).values.roll(-1, 2)
        check(batch, *attend(batch, OP))


@pytest.mark.parametrize("setting", ["float64 by default", "deterministic", "inference", "two threads"])
def test_settings_of_the_caller_change_nothing(setting):
    batch = build(Case(lens=(513, 40), queries=(1, 1), head_tables=True, holes=0.5))
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.set_default_dtype(torch.float64 if setting == "float64 by default" else torch.float32)
    torch.set_num_threads(2 if setting == "two threads" else torch.get_num_threads())
    torch.use_deterministic_algorithms(setting == "deterministic")
    try:
        with torch.inference_mode(setting == "inference"):
            out, lse = attend(batch, OP)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(deterministic)
    check(build(batch.case), out, lse)


@pytest.mark.slow
def test_nothing_is_said_about_sparse_tensors():
    """PyTorch's warning that sparse tensors may change is hidden, since it is not about the caller's code."""
    program = (
        "import pc, torch; one = lambda *n: torch.tensor(n, dtype=torch.int32); cache = torch.randn(8, 16, 2, 64);"
        "pc.sparse_gap_attention(torch.randn(1, 4, 64), cache, cache, one(-1, 5, 2, 7, -1, 2).view(1, 2, 3), one(48),"
        "one(0, 1), None, 0.125)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_decodes_beside_a_sequence_that_loses_blocks_keep_their_bits():
    """Splitting a long neighbour does not change a row's result."""
    generator = torch.Generator().manual_seed(0)
    query, cache = (torch.randn(*shape, generator=generator) for shape in ((3, 4, 32), (80, 16, 2, 64)))
    keys, values = cache.split(32, -1)
    lens, starts = (torch.tensor(each, dtype=torch.int32) for each in ([201, 301, 65], [0, 1, 2, 3]))
    tables = torch.arange(60, dtype=torch.int32).view(3, 20)
    whole = pc.paged_attention(query, keys, values, tables, lens, starts, 0.2)
    tables[1, 4:18] = -1
    holed = pc.paged_attention(query, keys, values, tables, lens, starts, 0.2)
    assert torch.equal(whole[::2], holed[::2])
    assert not torch.equal(whole[1], holed[1])


@pytest.mark.parametrize("queries", [1, 3])
def test_a_table_may_repeat_blocks_until_its_sequence_is_longer_than_the_cache(queries):
    """Engines run such batches to warm up, with tables of zeros."""
    caches, query = [torch.randn(2, 4, 2, 16) for _ in range(2)], torch.randn(2 * queries, 4, 16)
    tables, lens = torch.tensor([[0, 1] * 5, [1] * 10], dtype=torch.int32), torch.tensor([39, 5], dtype=torch.int32)
    starts = torch.tensor([0, queries, 2 * queries], dtype=torch.int32)
    out = pc.paged_attention(query, *caches, tables, lens, starts, 0.25)
    apart = torch.arange(20, dtype=torch.int32).view(2, 10)
    expected = pc.paged_attention(query, *[x[tables.flatten()] for x in caches], apart, lens, starts, 0.25)
    torch.testing.assert_close(out, expected)
