"""Every attention operator against float64, and the errors for wrong arguments."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention_cases import Case, arguments_of, attend, build, check, plan_of
from refusals import check_refused

import pc

F32, F16, BF16, E4M3, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8
PAGED, WINDOW, GAP, SHARED = (
    f"{name}_attention" for name in ("paged", "sliding_window", "sparse_gap", "shared_prefix")
)
LATENT, SPARSE_LATENT = "latent_attention", "sparse_latent_attention"
Latent = functools.partial(Case, heads=(4, 1), head_dim=80, value_dim=64, latent=True)

# test_sparse_gap_attention.py draws further options of that operator, and all of them together, at random.
CASES: dict[str, list[Case]] = {
    PAGED: [
        Case(),
        Case(lens=(), queries=()),
        Case(lens=(), queries=(), padding=2),
        Case(lens=(0, 5, 0, 70), queries=(0, 0, 1, 1), padding=3, sinks=True),
        Case(lens=(0, 0), queries=(1, 3), bounds=True),
        Case(lens=(0, 0), queries=(1, 30), bounds=True, sinks=True),
        Case(lens=(150,), queries=(150,), heads=(1, 1)),
        Case(lens=(1000,), queries=(1,), heads=(8, 1), bounds=True),
        Case(lens=(1100, 1100), queries=(1, 12), heads=(2, 1), head_dim=16),  # both have splits
        Case(lens=(700, 64, 3), queries=(1, 1, 1), head_major=True, bounds=True),
        Case(lens=(129, 300), queries=(8, 9), heads=(7, 1)),
        Case(lens=(40,), queries=(9,), heads=(128, 1), head_dim=16),
        Case(lens=(90, 65), queries=(1, 12), head_dim=80, dtype=BF16),
        Case(lens=(90, 65), queries=(1, 12), head_dim=96, dtype=F16, block_size=8),
        Case(lens=(150, 65), queries=(1, 12), head_dim=256, dtype=BF16, block_size=64),
        Case(lens=(150, 65), queries=(1, 12), head_dim=256, block_size=32),
        Case(lens=(300, 257), queries=(1, 30), block_size=256, head_dim=32),
        Case(lens=(300, 257), queries=(1, 30), block_size=128, head_dim=33, dtype=F16),
        Case(lens=(26,), queries=(20,), causal=False),
        Case(lens=(100, 40), queries=(30, 1), causal=False, alibi=True),
        Case(lens=(200, 90), queries=(1, 20), softcap=5.0, alibi=True, sinks=True),
        Case(lens=(200, 90), queries=(1, 20), softcap=30.0, dtype=BF16, sinks=True),
        Case(lens=(500, 300), queries=(1, 20), holes=0.5, dtype=F16),
        Case(lens=(500, 300), queries=(1, 20), holes=1.0, sinks=True),
        Case(lens=(200, 90), queries=(1, 20), cache_dtype=E4M3, dtype=BF16, per_head_scales=True),
        Case(lens=(200, 90), queries=(1, 20), cache_dtype=E4M3, dtype=F16),
        Case(lens=(200, 90), queries=(1, 20), cache_dtype=INT8, dtype=BF16),
        Case(lens=(200, 90), queries=(1, 20), cache_dtype=INT8, per_head_scales=True),
        Case(lens=(200, 90), queries=(1, 20), batch_invariant=True, padding=1, sinks=True),
        Case(lens=(200, 90, 30), queries=(1, 20, 1), head_dim=48, value_dim=32, sinks=True, padding=1),
        Case(lens=(90, 40), queries=(3, 20), head_dim=32, value_dim=80, dtype=F16, holes=0.3, softcap=20.0),
        Case(lens=(70, 0, 40), queries=(1, 0, 1), head_dim=40, value_dim=24, dtype=BF16),
        Case(lens=(90, 40), queries=(1, 20), head_dim=192, value_dim=128, cache_dtype=E4M3, dtype=BF16, heads=(2, 1)),
        Case(lens=(70, 30), queries=(1, 11), head_dim=512, dtype=BF16, heads=(2, 1)),
        Case(lens=(5000, 70), queries=(1, 1), heads=(2, 1), head_dim=16, block_size=64, sinks=True),
    ],
    WINDOW: [
        Case(lens=(200, 90), queries=(1, 40), window=1),
        Case(lens=(500, 90), queries=(1, 40), window=70, num_sink_tokens=4),
        Case(lens=(300, 200), queries=(1, 20), window=64, num_sink_tokens=4, batch_invariant=True, holes=0.3),
        Case(lens=(130, 0), queries=(130, 0), window=0),
    ],
    GAP: [
        Case(lens=(300, 90), queries=(40, 3), scattered=True),
        Case(lens=(500, 100), queries=(9, 30), scattered=True, window=64, batch_invariant=True, padding=2),
        Case(lens=(2500, 900), queries=(1, 3), heads=(4, 2), head_tables=True, holes=0.4, dtype=BF16, sinks=True),
        Case(lens=(300, 1900), queries=(20, 1), head_tables=True, holes=0.5, batch_invariant=True, value_dim=24),
    ],
    f"{GAP}, lists": [
        Case(lens=(300, 0, 90), queries=(1, 0, 5), top_k=4, padding=2, sinks=True),
        Case(lens=(300, 90), queries=(12, 3), top_k=9, scattered=True, window=70, num_sink_tokens=20, block_size=5),
        Case(lens=(900,), queries=(1,), top_k=40, cache_dtype=E4M3, dtype=BF16, head_dim=256, per_head_scales=True),
        Case(lens=(700, 90), queries=(2, 7), top_k=3, block_size=128, cache_dtype=INT8, heads=(20, 1), bounds=True),
        Case(lens=(), queries=(), top_k=3, padding=2),
        Case(lens=(120,), queries=(7,), top_k=4, tree=True, causal=False, cache_dtype=E4M3, dtype=BF16, softcap=5.0),
    ],
    f"{GAP}, tree": [
        Case(lens=(66, 70), queries=(6, 8), tree=True, scattered=True),  # depths end in the tile before the last tokens
        Case(lens=(300, 90, 40), queries=(40, 1, 40), tree=True, scattered=True),
        Case(lens=(700, 90), queries=(5, 33), tree=True, scattered=True, window=20, num_sink_tokens=3, holes=0.3),
        Case(lens=(300, 90), queries=(40, 3), tree=True, scattered=True, cache_dtype=E4M3, dtype=BF16, head_dim=256),
        Case(lens=(600,), queries=(20,), tree=True, scattered=True, cache_dtype=INT8, bounds=True, block_size=64),
        Case(
            lens=(300, 90), queries=(40, 3), tree=True, scattered=True, batch_invariant=True, alibi=True, block_size=5
        ),
    ],
    SHARED: [
        Case(lens=(200, 150, 300), queries=(1, 9, 1), padding=2, shared=8),
        Case(lens=(200, 150), queries=(1, 1), sinks=True, alibi=True, shared=4),
        Case(lens=(200, 150), queries=(1, 12), dtype=BF16, shared=8),
        Case(lens=(200, 150), queries=(1, 1), softcap=3.0, batch_invariant=True, shared=8),
        Case(lens=(200, 150), queries=(1, 1), cache_dtype=INT8, shared=8),
        Case(lens=(64, 150), queries=(40, 100), shared=4),
        Case(lens=(64, 150), queries=(1, 1), causal=False, shared=4),
        Case(lens=(64, 150), queries=(1, 1)),
    ],
    LATENT: [
        Latent(lens=(70, 20), queries=(1, 9)),
        Latent(),
        Latent(lens=(), queries=()),
        Latent(lens=(), queries=(), padding=2),
        Latent(lens=(0, 5, 0, 70), queries=(0, 0, 1, 1), padding=3),
        Latent(lens=(0, 0), queries=(1, 30), bounds=True),
        Latent(lens=(130, 70, 9), queries=(1, 1, 1), heads=(16, 1), head_dim=576, value_dim=512, dtype=BF16),
        Latent(lens=(70, 40), queries=(4, 2), heads=(16, 1), head_dim=576, value_dim=512, dtype=F16, block_size=64),
        Latent(lens=(70,), queries=(1,), heads=(128, 1), head_dim=160, value_dim=128, dtype=BF16),
        Latent(lens=(150, 33), queries=(150, 1), heads=(1, 1)),
        Latent(lens=(129, 300), queries=(8, 9), heads=(7, 1), head_dim=48, value_dim=16),
        Latent(lens=(40, 70), queries=(9, 1), head_dim=1024, value_dim=512, dtype=F16),
        Latent(lens=(40, 20), queries=(1, 10), head_dim=1024, value_dim=1008, heads=(2, 1)),
        Latent(lens=(40, 20), queries=(1, 10), head_dim=1024, value_dim=256, heads=(2, 1), dtype=F16),
        Latent(lens=(40, 20), queries=(1, 10), head_dim=640, value_dim=512, heads=(32, 1), dtype=BF16),
        Latent(lens=(90, 40), queries=(1, 20), head_dim=304, value_dim=208, dtype=BF16, block_size=5),
        Latent(lens=(1000,), queries=(1,), heads=(8, 1), bounds=True),
        Latent(lens=(26, 9), queries=(20, 1), causal=False),
        Latent(lens=(200, 90), queries=(1, 20), softcap=5.0),
        Latent(lens=(500, 300), queries=(1, 20), holes=0.5, dtype=F16),
        Latent(lens=(500, 300), queries=(1, 20), holes=1.0),
        Latent(lens=(200, 90), queries=(1, 20), cache_dtype=E4M3, dtype=BF16),
        Latent(lens=(200, 90), queries=(3, 20), cache_dtype=E4M3, dtype=F16, head_dim=96),
        Latent(lens=(200, 90), queries=(1, 20), cache_dtype=INT8, dtype=BF16),
        Latent(lens=(200, 90), queries=(1, 20), batch_invariant=True, padding=1),
        Latent(lens=(5000, 70), queries=(1, 1), heads=(2, 1), head_dim=32, value_dim=16, block_size=64),
        Latent(lens=(70,), queries=(1,), heads=(40, 1), dtype=BF16),
    ],
    SPARSE_LATENT: [
        Latent(lens=(130, 33), queries=(2, 5), top_k=5, holes=0.2),
        Latent(lens=(40, 77, 130), queries=(12, 20, 33), holes=0.4, scattered=True, dtype=F16),
        Latent(lens=(200, 90), queries=(1, 20), window=40, num_sink_tokens=3),
        Latent(lens=(200, 90), queries=(9, 20), window=12, num_sink_tokens=3, scattered=True, padding=2),
        Latent(lens=(130,), queries=(3,), top_k=40, block_size=1, heads=(40, 1), dtype=BF16),
        Latent(lens=(90, 40), queries=(1, 9), top_k=3, cache_dtype=INT8, dtype=BF16, scattered=True, window=30),
        Latent(lens=(70, 0), queries=(1, 0), top_k=2, softcap=5.0, bounds=True),
    ],
}


ON_A_DEVICE: dict[str, list[Case]] = {
    WINDOW: [Case(lens=(5000, 2000), queries=(1, 500), heads=(8, 2), head_dim=128, dtype=BF16, window=1024)],
    GAP: [
        Case((5000, 2000), (300, 7), (8, 2), 128, dtype=BF16, scattered=True, holes=0.5),
        *(
            Case((5000, 2000, 900), (1, 300, 5), (16, 4), **{"head_dim": 128, **options}, dtype=BF16, holes=0.5)
            for tables in ({"head_tables": True},)
            for options in (
                tables,
                tables | {"window": 300, "num_sink_tokens": 20},
                tables | {"head_dim": 256, "cache_dtype": INT8},
            )
        ),
        *(
            Case((5000, 2000), queries, (8, 2), **{"head_dim": 128, **each, **options}, dtype=BF16)
            for queries, each in (
                ((1, 70), {"top_k": 16, "block_size": 64}),
                ((64, 7), {"tree": True, "scattered": True}),
            )
            for options in ({}, {"window": 300}, {"head_dim": 256, "alibi": True})
        ),
    ],
    SHARED: [Case((5000, 4900, 4500), (1, 1, 1), (8, 2), 128, dtype=BF16, shared=256)],
}


def each_case(table: dict[str, list[Case]]) -> Any:
    """Parametrize a test by the operators and cases of a table. The first and the last case of each are quick."""
    return pytest.mark.parametrize(
        ("operator", "case"),
        [pytest.param(op, case, id=f"{op} {case}") for op, cases in table.items() for case in cases],
    )


@each_case(CASES)
def test_numerics(operator: str, case: Case, device: torch.device) -> None:
    op, batch = operator.partition(",")[0], build(case).to(device)
    out, lse = attend(batch, op)
    check(build(case), out, lse)
    assert torch.equal(out, attend(batch, op, with_lse=False))


@pytest.mark.gpu
@pytest.mark.quick
@each_case(ON_A_DEVICE)
def test_numerics_on_the_device(operator: str, case: Case, device: torch.device) -> None:
    check(build(case), *attend(build(case).to(device), operator))


@each_case({op: [case for case in CASES[op] if case.lens] for op in (SHARED, f"{GAP}, tree")})
def test_numerics_with_a_plan(operator: str, case: Case, device: torch.device) -> None:
    batch = build(case).to(device)
    check(build(case), *attend(batch, operator.partition(",")[0], plan=plan_of(batch)))


SCALED = {PAGED: [Case(lens=(150, 90), queries=(1, 20), holes=0.2)], LATENT: [Latent(lens=(150, 90), queries=(1, 20))]}


@pytest.mark.parametrize("scale", [-0.3, 0.0])
@each_case(SCALED)
def test_scale_of_any_sign(operator: str, case: Case, scale: float, device: torch.device) -> None:
    batch = dataclasses.replace(build(case), scale=scale)
    check(batch, *attend(batch.to(device), operator))


def part(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the same tensor as a part of one that is twice as large."""
    return torch.cat([x, x], dim).narrow(dim, 0, x.shape[dim])


def side_by_side(key: torch.Tensor, value: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip(("key_cache", "value_cache"), torch.cat([key, value], 3).split(key.shape[3], 3), strict=True))


STRIDED: dict[str, dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
    PAGED: {
        "query": lambda given: {"query": part(given["query"].repeat_interleave(2, 0)[::2], 2)},
        "caches": lambda given: side_by_side(given["key_cache"], given["value_cache"]),
        "tables": lambda given: {"block_tables": part(given["block_tables"], 1)},
    },
    LATENT: {
        "four dimensions": lambda given: {"cache": given["cache"].unsqueeze(2)},
        "columns of a wider cache": lambda given: {"cache": part(given["cache"], 2)},
        "wider blocks": lambda given: {"cache": part(given["cache"], 1)},
        "query": lambda given: {"query": part(given["query"], 2)},
        "tables": lambda given: {"block_tables": part(given["block_tables"], 1)},
    },
}


@pytest.mark.parametrize(("operator", "which"), [(op, which) for op, changes in STRIDED.items() for which in changes])
def test_strides(operator: str, which: str, device: torch.device) -> None:
    case = (Latent if operator == LATENT else Case)(lens=(100, 40), queries=(1, 20))
    given = arguments_of(build(case).to(device), operator)
    check(build(case), getattr(pc, operator)(**given | STRIDED[operator][which](given)))


def turned(x: torch.Tensor) -> torch.Tensor:
    """Return the same tensor whose last dimension is not contiguous."""
    return x.mT.contiguous().mT


def listing(*row: int) -> Any:
    """Return a function that sets the list of query 1 and KV head 1."""

    def change(lists: torch.Tensor) -> torch.Tensor:
        changed = lists.clone()
        changed[1, 1] = torch.tensor(row, dtype=torch.int32)
        return changed

    return change


TABLE_PER_HEAD = r"block_tables: got .*needs .*a table per KV head goes to sparse_gap_attention"
HEADED = Case(lens=(40, 20), queries=(1, 9), block_size=8, heads=(6, 3), holes=0.5, head_tables=True)
TREE, LISTS = Case(lens=(40, 30), queries=(3, 4), tree=True), Case(lens=(40, 33), queries=(3, 4), top_k=3)
SCATTERED = Case(lens=(40, 30), queries=(3, 4), scattered=True)
SMALL, SHARING = Case(lens=(100, 40), queries=(1, 5)), Case(lens=(70, 90), queries=(1, 3), shared=2)
SMALL_LATENT = Latent(lens=(100, 40), queries=(1, 5))
zeros = torch.zeros
int32 = functools.partial(torch.zeros, dtype=torch.int32)

# Arguments are values, or functions that change a right value.
REFUSED: dict[str, list[tuple[Case, dict[str, Any], str]]] = {
    PAGED: [
        (SMALL, {"query": lambda q: q[0]}, r"query: got shape .*needs \[num_tokens, num_heads, head_dim\]"),
        (SMALL, {"query": lambda q: q.double()}, "query: got float64"),
        (SMALL, {"query": lambda q: q[:, :3]}, "key_cache: got 2 KV heads, needs a divisor of query's 3 heads"),
        (SMALL, {"query": turned}, "query: got strides"),
        (SMALL, {"key_cache": lambda k: k[..., :32]}, r"key_cache: got shape .* 32\], needs .* 64\]"),
        (SMALL, {"key_cache": lambda k: k.half()}, "key_cache: got float16"),
        (SMALL, {"key_cache": lambda k: k[:, :0]}, "key_cache: got block_size 0, needs at least 1"),
        (SMALL, {"key_cache": lambda k: k.to(INT8)}, "value_cache: got float32"),
        (SMALL, {"value_cache": lambda v: v[:-1]}, "value_cache: got shape"),
        (SMALL, {"value_cache": lambda v: v[0]}, "value_cache"),
        (SMALL, {"key_cache": lambda k: k[:-1]}, r"value_cache: got shape .*, needs \[.*, head_dim\] like key_cache"),
        (SMALL, {"block_tables": lambda t: t.long()}, "block_tables: got int64"),
        (SMALL, {"block_tables": lambda t: t[:1]}, "seq_lens: got 2 elements, needs 1"),
        (SMALL, {"block_tables": turned}, "block_tables: got strides"),
        (SMALL, {"block_tables": lambda t: t * 0 + 1000}, "block_tables: got 1000 in row 0, column 0, needs -1 to"),
        (SMALL, {"block_tables": lambda t: t * 0 - 2}, "block_tables: got -2 in row 0"),
        (SMALL, {"seq_lens": lambda s: s.long()}, "seq_lens: got int64"),
        (SMALL, {"seq_lens": lambda s: s + 1000}, "seq_lens: got values from"),
        (SMALL, {"seq_lens": lambda s: s * 0 - 1}, "seq_lens: got values from -1"),
        (SMALL, {"query_start_loc": lambda s: s[:-1]}, "query_start_loc: got 2 elements, needs 3"),
        (SMALL, {"query_start_loc": lambda s: s + 1}, "query_start_loc: got"),
        (SMALL, {"query_start_loc": lambda s: s.flip(0)}, "query_start_loc: got"),
        (SMALL, {"softcap": -1.0}, "softcap: got -1.0"),
        (SMALL, {"scale": math.nan}, "scale: got nan, needs a finite number"),
        (SMALL, {"scale": math.inf}, "scale: got inf, needs a finite number"),
        (SMALL, {"alibi_slopes": torch.ones(3)}, "alibi_slopes: got"),
        (SMALL, {"sinks": int32(4)}, "sinks: got int32"),
        (SMALL, {"k_scale": torch.ones(1)}, "k_scale: got .*needs None"),
        (SMALL, {"max_query_len": 2}, "max_query_len: got 2, needs at least 5"),
        (SMALL, {"max_seq_len": 50}, "seq_lens: got values from 40 to 100, needs 0 to 50"),
        (SMALL, {"plan": int32(3)}, "plan: got 3 elements"),
        (Case(cache_dtype=INT8), {"k_scale": None}, "k_scale: got None"),
        (Case(cache_dtype=INT8), {"k_scale": torch.ones(3)}, "k_scale: got .*3.*needs one contiguous element or 2"),
        (HEADED, {}, TABLE_PER_HEAD),
    ],
    WINDOW: [
        (Case(window=-1), {}, "window: got -1"),
        (Case(window=4, num_sink_tokens=-2), {}, "num_sink_tokens: got -2"),
        (HEADED, {"window": 4}, TABLE_PER_HEAD),
    ],
    GAP: [
        (SCATTERED, {"query_positions": lambda p: p.long()}, "query_positions: got int64"),
        (SCATTERED, {"query_positions": lambda p: p[:-1]}, "query_positions: got 6 elements, needs 7"),
        (SCATTERED, {"query_positions": lambda p: p.flip(0)}, "query_positions: got .*needs positions that ascend"),
        (SCATTERED, {"query_positions": lambda p: p - 1000}, "query_positions: got"),
        (HEADED, {"block_tables": lambda t: t[:, :2]}, r"block_tables: got shape \[2, 2, 6\], needs 3 tables a seq"),
        (HEADED, {"block_tables": lambda t: t[:1]}, "seq_lens: got 2 elements, needs 1"),
        (
            HEADED,
            {"block_tables": lambda t: t.long()},
            r"block_tables: got int64 \[2, 3, 6\] on cpu, needs dtype int32",
        ),
        (HEADED, {"block_tables": lambda t: t[None]}, r"block_tables: .*\[num_seqs, num_kv_heads, max_blocks\]"),
        (HEADED, {"block_tables": turned}, "block_tables: got strides"),
        (HEADED, {"block_tables": lambda t: t * 0 + 10**6}, "block_tables: got 1000000 in row 0, KV head 0, column 0"),
        (HEADED, {"block_tables": lambda t: t * 0 - 2}, "block_tables: got -2 in row 0, KV head 0, column 0"),
    ],
    f"{GAP}, lists": [
        (LISTS, {"query_blocks": lambda t: t.long()}, "query_blocks: got int64"),
        (LISTS, {"query_blocks": lambda t: t[:-1]}, r"query_blocks: got shape \[6, 2, 3\], needs \[7, 2, top_k\]"),
        (LISTS, {"query_blocks": lambda t: t[:, :1]}, r"query_blocks: got shape \[7, 1, 3\], needs \[7, 2, top_k\]"),
        (LISTS, {"query_blocks": lambda t: t[:, 0]}, "query_blocks: got shape .*num_kv_heads, top_k"),
        (LISTS, {"query_blocks": turned}, "query_blocks: got strides"),
        (LISTS, {"query_blocks": listing(0, 3, -1)}, "query_blocks: got block 3 for query 1, KV head 1, needs -1 to 2"),
        (LISTS, {"query_blocks": listing(0, -2, -1)}, "query_blocks: got block -2 for query 1, KV head 1"),
        (LISTS, {"query_blocks": listing(1, 0, -1)}, r"query_blocks: got \[1, 0, -1\] for query 1, KV head 1"),
        (LISTS, {"query_blocks": listing(1, 1, -1)}, r"query_blocks: got \[1, 1, -1\] for query 1, KV head 1"),
        (LISTS, {"query_blocks": listing(0, -1, 1)}, "needs blocks that ascend, then -1"),
    ],
    f"{GAP}, tree": [
        (TREE, {"tree_mask": lambda m: m.long()}, "tree_mask: got int64"),
        (TREE, {"tree_mask": lambda m: m[:-1]}, r"tree_mask: got shape \[6, 2\], needs \[7, words\]"),
        (TREE, {"tree_mask": lambda m: m[:, :0]}, r"tree_mask: got shape \[7, 0\]"),
        (TREE, {"tree_mask": lambda m: m[:, 0]}, r"tree_mask: got shape \[7\], needs \[num_tokens, words\]"),
        (TREE, {"tree_mask": turned}, "tree_mask: got strides"),
        (TREE, {"tree_mask": lambda m: m | 4}, "tree_mask: got bit 2 in query 0 of sequence 0"),
        (TREE, {"tree_mask": lambda m: m | torch.tensor([0, 1]).int()}, "tree_mask: got bit 32 in query 0"),
        (
            Case(lens=(40,), queries=(33,), tree=True),
            {"tree_mask": lambda m: m[:, :1]},
            "tree_mask: got 1 words, needs 2, 32 keys each",
        ),
    ],
    SHARED: [
        (SHARING, {"num_shared_blocks": 5}, "num_shared_blocks: got 5, needs at most 4, since a sequence is 70 long"),
        (SHARING, {"num_shared_blocks": -1}, "num_shared_blocks: got -1"),
        (SHARING, {"num_shared_blocks": 3}, "block_tables: got rows that differ in shared columns"),
        (SHARING, {"plan": plan_of(build(dataclasses.replace(SHARING, shared=0)))}, "plan: got"),
        (HEADED, {"num_shared_blocks": 1}, TABLE_PER_HEAD),
    ],
    LATENT: [
        (SMALL_LATENT, {"query": zeros(6, 4, 96)}, r"cache: got shape .* 80\], needs .* 96\]"),
        (SMALL_LATENT, {"query": zeros(6, 4, 1040)}, "query: got head_dim 1040, needs 1 to 1024"),
        (SMALL_LATENT, {"query": int32(6, 4, 80)}, "query: got int32"),
        (SMALL_LATENT, {"cache": zeros(9, 16, 2, 80)}, r"cache: got shape \[9, 16, 2, 80\], needs \[num_blocks"),
        (SMALL_LATENT, {"cache": zeros(9, 80)}, "cache: got shape"),
        (SMALL_LATENT, {"cache": lambda c: c.half()}, "cache: got float16 .*needs dtype float32 or"),
        (SMALL_LATENT, {"cache": turned}, "cache: got strides"),
        (
            SMALL_LATENT,
            {"query": zeros(6, 4, 72), "cache": zeros(20, 16, 72)},
            "cache: got head_dim 72, needs a multiple of 16",
        ),
        (SMALL_LATENT, {"value_dim": 80}, "value_dim: got 80, needs a multiple of 16 below head_dim 80 of cache"),
        (SMALL_LATENT, {"value_dim": 40}, "value_dim: got 40"),
        (SMALL_LATENT, {"value_dim": 0}, "value_dim: got 0"),
        (SMALL_LATENT, {"value_dim": -16}, "value_dim: got -16"),
        (SMALL_LATENT, {"k_scale": torch.ones(1)}, "k_scale: got .*needs None"),
        (SMALL_LATENT, {"cache": lambda c: c.to(INT8)}, "k_scale: got None"),
        (SMALL_LATENT, {"softcap": -1.0}, "softcap: got -1.0"),
        (SMALL_LATENT, {"scale": -math.inf}, "scale: got -inf, needs a finite number"),
        (SMALL_LATENT, {"plan": int32(3)}, "plan: got 3 elements"),
        (SMALL_LATENT, {"max_query_len": 2}, "max_query_len: got 2, needs at least 5"),
        (SMALL_LATENT, {"block_tables": int32(2, 4, 8)}, "block_tables: got shape"),
    ],
    SPARSE_LATENT: [
        (SMALL_LATENT, {"window": -1}, "window: got -1, needs 0 or a positive number"),
        (SMALL_LATENT, {"query_blocks": int32(6, 4, 2)}, r"query_blocks: got .*needs \[6, 1, top_k\]"),
        (SMALL_LATENT, {"query_blocks": int32(6, 1, 1) + 7}, "query_blocks: got block 7 for query 0"),
        (SMALL_LATENT, {"query_positions": int32(5)}, "query_positions: got 5 elements, needs 6"),
        (SMALL_LATENT, {"block_tables": int32(2, 4, 8)}, "block_tables: got .*needs 1 tables a sequence"),
    ],
}


@pytest.mark.quick
@pytest.mark.parametrize(
    ("operator", "case", "changes", "message"),
    [(op, *row) for op, rows in REFUSED.items() for row in rows],
    ids=[f"{op} {row[2]}" for op, rows in REFUSED.items() for row in rows],
)
def test_a_wrong_argument_is_refused_by_name(operator: str, case: Case, changes: dict[str, Any], message: str) -> None:
    op = operator.partition(",")[0]
    check_refused(getattr(pc, op), arguments_of(build(case), op), changes, message)
