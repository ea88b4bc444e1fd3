"""Queries whose keys lie scattered, on CPU tensors: decodes, tables of heads and lists, together or in parts."""

from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys

import attention_cases
import pytest
import torch
from attention_cases import Case, build, check

import pc
from pc.triton_ops._attention import cpu, cpu_cache, cpu_masked, cpu_sparse
from pc.triton_ops._attention.arguments import AttentionArgs
from pc.triton_ops._attention.cpu_cache import Cache
from pc.triton_ops._attention.operator import attention_cpu

NAMES = tuple(inspect.signature(pc.sparse_gap_attention).parameters)
ONE = {"heads": (6, 1), "head_tables": True, "holes": 0.5}


def _call(batch):
    case = batch.case
    arguments = (*batch.tensors, batch.positions, batch.scale, case.window, case.num_sink_tokens)
    return AttentionArgs(**dict(zip(NAMES, arguments, strict=False)), **batch.options)


def _same_lists(case, positions, starts, rand):
    """Return a list for each sequence and KV head, of its last blocks and some before, equally many everywhere."""
    lists = torch.full((starts[-1], case.heads[1], case.top_k), -1, dtype=torch.int32)
    for i, length in enumerate(case.lens):
        begin, end = starts[i : i + 2]
        first, blocks = (length - (end - begin)) // case.block_size, -(-length // case.block_size)
        for head in range(case.heads[1]):
            chosen = sorted(rand.sample(range(first), case.top_k - (blocks - first)))
            lists[begin:end, head] = torch.tensor([*chosen, *range(first, blocks)], dtype=torch.int32)
    return lists


@pytest.fixture
def paths(monkeypatch):
    """Return a list that gets how keys are read, in order: gathered evenly, padded, without copies, or masked."""
    seen = []

    def recorded(module, name, path):
        own = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: seen.append(path(given)) or own(*given))

    recorded(cpu_sparse, "_gathered", lambda given: "even" if len(given) == 5 or given[5] is None else "padded")
    recorded(cpu_sparse, "attend_in_place", lambda _: "in place")
    recorded(cpu, "_attend_runs", lambda _: "masked")
    return seen


@pytest.fixture
def gathers(monkeypatch):
    """Return a list that gets the number of keys of every gather."""
    made, gather = [], Cache.gather
    monkeypatch.setattr(Cache, "gather", lambda *given: made.append(given[1].size) or gather(*given))
    return made


UNIFORM = [
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
@pytest.mark.parametrize("case", UNIFORM, ids=str)
def test_uniform_batches(case, dtype, gathers, paths, monkeypatch):
    """Keys are gathered at once, without padding or masks, and in several gathers. All other keys are NaN."""
    monkeypatch.setattr(attention_cases, "_lists", _same_lists)
    monkeypatch.setattr(cpu_sparse, "_FEW_QUERIES", 0)
    case = dataclasses.replace(case, dtype=dtype)
    check(build(case), *attention_cpu(_call(build(case))))
    at_once, keys = len(gathers), sum(gathers)
    assert 0 < at_once <= 2 * len(case.lens)
    assert set(paths) <= {"even"}
    monkeypatch.setattr(cpu_cache, "GATHER_BYTES", 10 * 64 * 4)
    check(build(case), *attention_cpu(_call(build(case))))
    assert len(gathers) > at_once * (1 + (case.heads[1] > 1 or max(case.lens) > 40)), "one gather, then several"
    assert sum(gathers) == 2 * keys
    assert set(paths) <= {"even"}


OTHERS = {
    Case(lens=(200,), queries=(17,), head_tables=True, holes=0.2, seed=10): {"padded"},
    Case(lens=(200, 190), queries=(17, 16), head_tables=True): {"even"},
    Case(lens=(200,), queries=(40,), head_tables=True, holes=0.4): {"masked"},
    Case(lens=(200, 200), queries=(17, 17), top_k=3): {"in place"},
    Case(lens=(200, 200), queries=(17, 17), top_k=3, dtype=torch.bfloat16): {"padded"},
    Case(lens=(200, 200), queries=(17, 17), head_tables=True, causal=False): {"even"},
    Case(lens=(200, 200), queries=(17, 17), head_tables=True, scattered=True): {"masked"},
    Case(lens=(200, 200), queries=(1, 1), head_tables=True, holes=0.5): {"in place"},
    Case(lens=(200, 200), queries=(1, 1), head_tables=True, holes=0.5, dtype=torch.bfloat16): {"padded"},
    Case(lens=(200, 0), queries=(1, 1), head_tables=True, dtype=torch.bfloat16): {"even"},
    Case(lens=(0, 0), queries=(1, 1), head_tables=True): set(),
    Case(lens=(0, 0), queries=(3, 3), head_tables=True): set(),
    Case(lens=(200, 200), queries=(2, 2), head_tables=True, padding=1): {"even"},
    Case(lens=(200, 200), queries=(1, 1), holes=1.0, head_tables=True): set(),
    Case(lens=(40, 40), queries=(1, 1), top_k=1, holes=1.0): set(),
}


@pytest.mark.parametrize(("case", "expected"), OTHERS.items(), ids=str)
def test_batches_that_are_not_uniform(case, expected, paths):
    """Entries have different lengths, lack some of their own blocks, list only some of them, or have no keys."""
    check(build(case), *attention_cpu(_call(build(case))))
    assert set(paths) == expected


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


@pytest.mark.parametrize(
    ("lists", "runs", "expected"),
    [
        (_same_lists, [35, 35], []),
        (_one_query_differs, [5, 1, 29, 35], []),
        (_own_block_left_out, [35, 35], ["masked"] * 2),
    ],
    ids=["same lists", "one query differs", "own block left out"],
)
def test_runs_of_lists(lists, runs, expected, paths, monkeypatch):
    """A run's queries have the same lists. If one omits some of the run's own blocks, masks are used."""
    monkeypatch.setattr(attention_cases, "_lists", lists)
    case = Case(lens=(195, 195), queries=(35, 35), top_k=6)
    batch = build(case)
    assert [run.length for run in cpu._runs(_call(batch), False)] == runs
    check(build(case), *attention_cpu(_call(batch)))
    assert [path for path in paths if path == "masked"] == expected


def test_heads_of_other_lengths_that_end_in_one_block():
    batch = build(Case(lens=(44,), queries=(1,), head_tables=True))
    batch.block_tables[0, 0, :2] = -1
    check(batch, *attention_cpu(_call(batch)))


@pytest.mark.parametrize("queries", [1, 20])
@pytest.mark.parametrize("form", ["tables", "lists"])
def test_changes_between_calls_are_seen(queries, form):
    """Tables, lists and lengths are changed in place, through numpy too, which changes no version."""
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
    monkeypatch.setattr(cpu, "attend_decodes", refused)
    monkeypatch.setattr(cpu, "attend_heads", refused)
    batch.block_tables[1, 1, 3] = number
    with pytest.raises(ValueError, match=r"^block_tables: got .* in row 1, KV head 1, column 3, needs -1 to"):
        attention_cpu(_call(batch))


@pytest.fixture
def _no_copies(monkeypatch):
    def refused(*_):
        raise AssertionError("keys are copied")

    for name in ("read", "gather"):
        monkeypatch.setattr(Cache, name, refused)
    monkeypatch.setattr(cpu_sparse, "_SMALL_GATHER", 1 << 62)


SINGLES = [
    Case(lens=(640,), queries=(1,), head_tables=True, holes=0.5),
    Case(lens=(513, 40, 16, 300), queries=(1, 1, 1, 1), head_tables=True, holes=0.5, sinks=True),
    Case(lens=(513, 40, 16), queries=(1, 1, 1), head_tables=True, holes=0.95, head_major=True),
    Case(lens=(513, 0, 40), queries=(1, 0, 1), head_tables=True, holes=0.5, padding=3),
    Case(lens=(513, 40), queries=(1, 1), head_tables=True, holes=0.5, scattered=True),
    Case(lens=(513, 40), queries=(1, 1), head_tables=True, holes=0.5, scattered=True, causal=False),
    Case(lens=(513, 200), queries=(1, 1), head_tables=True, holes=0.3, window=100, num_sink_tokens=20),
    Case(lens=(333, 200), queries=(1, 1), heads=(8, 1), head_dim=80, block_size=5, head_tables=True, value_dim=48),
    Case(lens=(513, 200), queries=(1, 1), heads=(3, 3), top_k=5),
    Case(lens=(513, 200), queries=(1, 1), top_k=9, head_tables=True, holes=0.5),
    Case(lens=(513, 200), queries=(1, 1), top_k=3, scattered=True),
    Case(lens=(200, 40), queries=(0, 1), padding=1, head_tables=True, holes=0.5),
    Case(lens=(90, 60), queries=(40, 20), top_k=3, window=50, padding=2),
]


@pytest.mark.usefixtures("_no_copies")
@pytest.mark.parametrize("limits", [(256, 1 << 18), (24, 1 << 18), (24, 200)], ids=["whole", "parts", "few"])
@pytest.mark.parametrize("case", SINGLES, ids=str)
def test_numerics_without_copies(case, limits, monkeypatch):
    """Rows are whole, in parts, and few at once. All keys that no query of a head attends to are NaN."""
    monkeypatch.setattr(cpu_masked, "_TURN_KEYS", limits[0])
    monkeypatch.setattr(cpu_sparse, "_MAX_SCORES", limits[1])
    batch = build(case)
    check(build(case), *attention_cpu(_call(batch)))


def test_as_many_queries_as_sequences():
    """Two queries of one sequence and none of another are not a step with one query for each."""
    batch = build(Case(lens=(90, 60), queries=(2, 0), head_tables=True, holes=0.5))
    check(build(batch.case), *attention_cpu(_call(batch)))


@pytest.mark.parametrize("setting", ["float64 by default", "deterministic", "inference", "two threads"])
def test_settings(setting):
    batch = build(Case(lens=(513, 40), queries=(1, 1), head_tables=True, holes=0.5))
    call, threads = _call(batch), torch.get_num_threads()
    try:
        torch.set_default_dtype(torch.float64 if setting == "float64 by default" else torch.float32)
        torch.use_deterministic_algorithms(setting == "deterministic")
        torch.set_num_threads(2 if setting == "two threads" else threads)
        with torch.inference_mode(setting == "inference"):
            out, lse = attention_cpu(call)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
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
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize(
    "case",
    [
        Case(lens=(513, 200), queries=(1, 1), heads=(12, 1), head_tables=True, holes=0.5),
        Case(lens=(513, 200), queries=(1, 1), dtype=torch.bfloat16, head_tables=True, holes=0.5),
        Case(lens=(513, 200), queries=(40, 30), head_tables=True, holes=0.5),
        Case(lens=(513, 200), queries=(40, 30), head_tables=True, holes=0.5, causal=False, head_major=True),
    ],
    ids=str,
)
def test_what_is_gathered_in_parts(case, paths, monkeypatch):
    """Large groups, half precision and chunks need several gathers for each entry's keys."""
    monkeypatch.setattr(cpu_cache, "GATHER_BYTES", 3 * 16 * 64 * 4)
    monkeypatch.setattr(cpu_sparse, "_PADDING", 1 << 62)
    check(build(case), *attention_cpu(_call(build(case))))
    assert paths.count("even") + paths.count("padded") > 4


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
    assert torch.equal(whole[0], holed[0])
    assert torch.equal(whole[2], holed[2])
    assert not torch.equal(whole[1], holed[1])
