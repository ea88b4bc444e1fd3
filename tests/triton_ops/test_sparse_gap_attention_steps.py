"""Steps of as many queries a sequence on CPU tensors, over blocks per KV head: gathered without padding or masks."""

from __future__ import annotations

import dataclasses
import inspect

import attention_cases
import pytest
import torch
from attention_cases import Case, build, check

import pc
from pc.triton_ops._attention import cpu, cpu_steps
from pc.triton_ops._attention.call import AttentionCall
from pc.triton_ops._attention.cpu_cache import Cache
from pc.triton_ops._attention.operator import attention_cpu

NAMES = tuple(inspect.signature(pc.sparse_gap_attention).parameters)
ONE = {"heads": (6, 1), "head_tables": True, "holes": 0.5}


def _call(batch):
    case = batch.case
    arguments = (*batch.tensors, batch.positions, batch.scale, case.window, case.num_sink_tokens)
    return AttentionCall.of(NAMES, arguments, batch.options)


def _same_lists(case, positions, starts, rand):
    """A list per sequence and KV head, of its last blocks and some before them; as many everywhere."""
    lists = torch.full((starts[-1], case.heads[1], case.top_k), -1, dtype=torch.int32)
    for i, length in enumerate(case.lens):
        begin, end = starts[i : i + 2]
        first, blocks = (length - (end - begin)) // case.block_size, -(-length // case.block_size)
        for head in range(case.heads[1]):
            chosen = sorted(rand.sample(range(first), case.top_k - (blocks - first)))
            lists[begin:end, head] = torch.tensor([*chosen, *range(first, blocks)], dtype=torch.int32)
    return lists


@pytest.fixture
def gathers(monkeypatch):
    """Keys of every gather of a step; all that is no such step is refused."""
    made, read = [], Cache.rows_at

    def refused(*_):
        raise AssertionError("not a step")

    for name in ("attend_heads", "attend_lists"):
        monkeypatch.setattr(cpu, name, refused)
    monkeypatch.setattr(cpu_steps, "MAX_GROUP", 0)
    monkeypatch.setattr(Cache, "rows_at", lambda *given: made.append(given[2].numel()) or read(*given))
    return made


STEPS = [
    Case(lens=(640,), queries=(1,), **ONE),
    Case(lens=(635,), queries=(1,), **ONE, sinks=True),
    Case(lens=(635,), queries=(1,), **ONE, head_major=True),
    Case(lens=(333,), queries=(1,), **{**ONE, "heads": (12, 1)}, head_dim=80, block_size=5, value_dim=48),
    Case(lens=(333,), queries=(1,), **ONE, head_dim=48, value_dim=80),
    Case(lens=(333,), queries=(1,), **ONE, scattered=True),
    Case(lens=(333,), queries=(1,), **ONE, scattered=True, causal=False),
    Case(lens=(200, 200), queries=(1, 1), head_tables=True),
    Case(lens=(200, 200), queries=(1, 1), top_k=3),
    Case(lens=(200, 200), queries=(17, 17), head_tables=True),
    Case(lens=(190, 190), queries=(17, 17), head_tables=True, top_k=4),
    Case(lens=(195, 195), queries=(35, 35), top_k=5),
    Case(lens=(40, 40), queries=(40, 40), head_tables=True, head_major=True),
    Case(lens=(19, 19), queries=(19, 19), **{**ONE, "holes": 0.0}, sinks=True),
    Case(lens=(99, 99), queries=(19, 19), head_tables=True, cache_dtype=torch.int8, per_head_scales=True),
    Case(lens=(99, 99), queries=(1, 1), head_tables=True, cache_dtype=torch.float8_e4m3fn, per_head_scales=True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", STEPS, ids=str)
def test_numerics(case, dtype, gathers, monkeypatch):
    """Decodes and chunks, and few keys at once; NaN lies in all that no query of a head attends to."""
    monkeypatch.setattr(attention_cases, "_lists", _same_lists)
    case = dataclasses.replace(case, dtype=dtype)
    check(build(case), *attention_cpu(_call(build(case))))
    at_once = len(gathers)
    assert 0 < at_once <= 2
    for name in ("GATHER_BYTES", "_GATHER_BYTES"):
        monkeypatch.setattr(cpu_steps, name, 10 * 64 * 4)
    check(build(case), *attention_cpu(_call(build(case))))
    assert len(gathers) > 2 * at_once, "one gather, then several"


ROWS = [
    Case(lens=(200, 190), queries=(17, 17), head_tables=True),
    Case(lens=(200, 190), queries=(17, 16), head_tables=True),
    Case(lens=(200,), queries=(40,), head_tables=True, holes=0.4),
    Case(lens=(200, 200), queries=(17, 17), top_k=3),
    Case(lens=(200, 200), queries=(17, 17), head_tables=True, causal=False),
    Case(lens=(200, 200), queries=(17, 17), head_tables=True, scattered=True),
    Case(lens=(200, 200), queries=(1, 1), head_tables=True, holes=0.5, dtype=torch.bfloat16),
    Case(lens=(200, 0), queries=(1, 1), head_tables=True),
    Case(lens=(0, 0), queries=(1, 1), head_tables=True),
    Case(lens=(0, 0), queries=(3, 3), head_tables=True),
    Case(lens=(200, 200), queries=(2, 2), head_tables=True, padding=1),
    Case(lens=(200, 200), queries=(1, 1), holes=1.0, head_tables=True),
    Case(lens=(40, 40), queries=(1, 1), top_k=1, holes=1.0),
]


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_what_is_no_even_step(case):
    """Rows that differ in length, own blocks that are absent or in some lists only, nothing to attend to."""
    check(build(case), *attention_cpu(_call(build(case))))


def _one_query_differs(case, positions, starts, rand):
    lists = _same_lists(case, positions, starts, rand)
    free = min(set(range(case.top_k)) - set(lists[5, 1].tolist()))
    lists[5, 1, 0] = free
    lists[5, 1] = lists[5, 1].sort().values
    return lists


def _own_block_left_out(case, positions, starts, rand):
    lists = _same_lists(case, positions, starts, rand)
    lists[starts[1] :, 0, -1] = -1
    return lists


@pytest.mark.parametrize("lists", [_one_query_differs, _own_block_left_out], ids=lambda f: f.__name__)
def test_lists_that_make_no_even_step(lists, monkeypatch):
    """As many blocks before a run's own in every row, but not for all of its queries, or not all of its own."""
    monkeypatch.setattr(attention_cases, "_lists", lists)
    case = Case(lens=(195, 195), queries=(35, 35), top_k=6)
    check(build(case), *attention_cpu(_call(build(case))))


def test_heads_of_other_lengths_that_end_in_one_block():
    batch = build(Case(lens=(44,), queries=(1,), head_tables=True))
    batch.block_tables[0, 0, :2] = -1
    check(batch, *attention_cpu(_call(batch)))


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("form", ["tables", "lists"])
def test_changes_between_calls_are_seen(queries, form):
    """Tables, lists and lengths that are written to in place, through numpy too, where no version tells."""
    case = Case(lens=(200, 200), queries=(queries, queries), head_tables=form == "tables")
    batch = build(case)
    for cache in (batch.key_cache, batch.value_cache):
        cache.nan_to_num_()
    if form == "lists":
        batch.options["query_blocks"] = torch.arange(13, dtype=torch.int32).expand(2 * queries, 2, 13).contiguous()
    for change in ("none", "tables", "numpy", "lengths", "lists"):
        if change == "tables":
            batch.block_tables[0, ..., 1] = 3
        elif change == "numpy":
            batch.block_tables.numpy()[1, ..., 2] = 4
        elif change == "lengths":
            batch.seq_lens.sub_(3)
            batch = dataclasses.replace(batch, case=dataclasses.replace(case, lens=(197, 197)))
        elif change == "lists" and form == "lists":
            batch.options["query_blocks"][:, :, 0] = -1
            batch.options["query_blocks"] = batch.options["query_blocks"].sort(2).values.roll(-1, 2)
        if "query_blocks" in batch.options:
            batch = dataclasses.replace(batch, case=dataclasses.replace(batch.case, top_k=13))
        check(batch, *attention_cpu(_call(batch)))


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("number", [-2, 10**6, 2**31 - 1])
def test_wrong_numbers_are_refused_before_memory_is_read(queries, number, monkeypatch):
    def refused(*_):
        raise AssertionError("memory is read")

    batch = build(Case(lens=(200, 200), queries=(queries, queries), head_tables=True))
    monkeypatch.setattr(cpu, "attend_steps", refused)
    batch.block_tables[1, 1, 3] = number
    with pytest.raises(ValueError, match=r"^block_tables: got .* in row 1, KV head 1, column 3, needs -1 to"):
        attention_cpu(_call(batch))
