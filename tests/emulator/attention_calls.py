"""Calls of the attention operators and of their plan, with a length for every element of a tile, where masks end."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

import torch
from attention_cases import Case, attend, build, check, check_merge
from plan_oracle import plan_in_numpy

import pc
from pc.triton_ops._attention.layout import PlanShape, plan_views
from pc.triton_ops._core.launch import Launch
from pc.triton_ops.kernels.attention import _merge_splits_kernel

BF16, F16, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
ATTENTION_CASES: dict[str, Callable[[], None]] = {}
EVERY = tuple(range(1, 131))
# A length for each element of a tile, and some before the first.
DENSE = (1, 2, 17, *range(64, 131))
# Sequences of every count of queries from 9 (prefill) to two tiles of rows, each of which ends elsewhere in a tile.
RAGGED = tuple((9 + i + 36 * i % 64, 9 + i) for i in range(66))


def _attention(op: str, case: Case) -> None:
    batch = build(case)
    check(batch, *attend(batch, op))


def _add(kind: str, op: str, cases: dict[str, Case]) -> None:
    for name, case in cases.items():
        own = op or ("sliding_window_attention" if case.window else "paged_attention")
        ATTENTION_CASES[f"{kind}: {name}"] = functools.partial(_attention, own, case)


def _ragged(every: int = 1, **given: object) -> Case:
    lens, queries = zip(*RAGGED[::every], strict=True)
    return Case(lens, queries, **given)


DECODE = Case(EVERY, (1,) * len(EVERY), heads=(4, 2), dtype=F16)
SPARSE = Case(DENSE, (1,) * len(DENSE), heads=(4, 2), dtype=F16)
ATTENTION = {
    "decode": DECODE,
    "decode bf16, block 64": dataclasses.replace(SPARSE, dtype=BF16, block_size=64, head_dim=128),
    "decode head_dim 80, rows of 7 heads": dataclasses.replace(SPARSE, heads=(7, 1), head_dim=80, block_size=32),
    "one decode": dataclasses.replace(DECODE, lens=(77,), queries=(1,)),
    "decode of 5 queries": Case((5, 6, 40, 69, 130), (5, 3, 5, 1, 2), dtype=F16),
    "decode window": dataclasses.replace(DECODE, window=6, num_sink_tokens=3),
    "decode more sink tokens": dataclasses.replace(SPARSE, window=4, num_sink_tokens=37),
    "decode softcap, slopes, sinks": dataclasses.replace(SPARSE, softcap=4.0, alibi=True, sinks=True),
    "decode e4m3": dataclasses.replace(SPARSE, cache_dtype=E4M3, per_head_scales=True),
    "decode int8": dataclasses.replace(SPARSE, cache_dtype=INT8, dtype=BF16),
    "split decode": Case(
        (1500, 3, 0, 700, 400), (1, 1, 0, 2, 1), heads=(2, 1), dtype=BF16, padding=2, sinks=True, bounds=True
    ),
    "batch-invariant decode": dataclasses.replace(SPARSE, batch_invariant=True),
    "prefill": _ragged(dtype=F16),
    "one prefill": Case((90,), (70,), dtype=F16),
    "prefill bf16, head_dim 128": _ragged(6, dtype=BF16, head_dim=128, heads=(2, 1)),
    "prefill float32": _ragged(8, heads=(2, 1)),
    "prefill not causal, window": _ragged(2, dtype=F16, causal=False, window=5, num_sink_tokens=2),
    "prefill window, sinks": _ragged(2, dtype=F16, window=6, num_sink_tokens=3, sinks=True),
    "prefill softcap, slopes": _ragged(6, dtype=F16, softcap=4.0, alibi=True),
    "prefill e4m3": _ragged(8, dtype=BF16, cache_dtype=E4M3),
    "prefill and decode, empty sequences": Case(
        (0, 70, 1, 33, 0, 129, 60, 61), (0, 70, 1, 12, 0, 1, 9, 8), dtype=BF16, padding=3
    ),
    "prefill in two splits": Case((1030, 40, 200), (9, 12, 8), heads=(2, 1), dtype=BF16, bounds=True),
}
_add("attention", "", ATTENTION)
GAP = {
    "holes": dataclasses.replace(SPARSE, holes=0.5),
    "holes, scattered queries": Case((40, 77, 130), (12, 20, 33), dtype=F16, holes=0.4, scattered=True),
    "holes, window": _ragged(8, dtype=F16, holes=0.4, window=9, num_sink_tokens=4),
    "table per head": dataclasses.replace(SPARSE, holes=0.5, head_tables=True),
    "table per head, prefill": Case((130, 70, 33), (1, 70, 12), heads=(6, 3), dtype=BF16, holes=0.4, head_tables=True),
    "table per head, splits": Case(
        (900, 3, 0), (1, 1, 0), heads=(6, 3), dtype=BF16, holes=0.4, head_tables=True, padding=2, bounds=True
    ),
    "tree": Case((70, 33, 200), (40, 5, 33), dtype=BF16, tree=True, scattered=True, alibi=True, holes=0.2),
    "tree, few queries, window": Case(EVERY[6::9], (5,) * 14, dtype=F16, tree=True, scattered=True, window=6),
    "lists": Case((130, 33, 200), (40, 5, 1), dtype=BF16, top_k=5, holes=0.2, heads=(8, 2)),
    "lists of a tree": Case((130, 33), (9, 5), dtype=F16, tree=True, scattered=True, alibi=True, top_k=5, heads=(8, 2)),
    "lists, window, block 5": Case(
        EVERY[6::9], (5,) * 14, dtype=F16, top_k=9, block_size=5, window=20, scattered=True, holes=0.2
    ),
    "lists, not causal": Case(EVERY[6::3], (5,) * 42, dtype=F16, top_k=6, causal=False),
    "lists in two splits": Case((700, 300), (1, 1), dtype=BF16, top_k=40, heads=(8, 2)),
    "all holes": Case((100, 64), (1, 20), dtype=BF16, holes=1.0, sinks=True),
}
_add("gap", "sparse_gap_attention", GAP)
SHARED = Case((200, 150, *range(131, 163)), (1, 9, *[1, 2] * 16), dtype=BF16, alibi=True, padding=3, shared=8)
ATTENTION_CASES["shared prefix"] = functools.partial(_attention, "shared_prefix_attention", SHARED)
LATENT = Case(
    (1, 17, *range(60, 70), 128), (1,) * 13, heads=(16, 1), dtype=BF16, head_dim=576, value_dim=512, latent=True
)
LATENTS = {
    "decode": LATENT,
    "decode block 64, 40 heads": dataclasses.replace(
        LATENT, lens=(1, 65, 127, 300), queries=(1, 1, 1, 1), heads=(40, 1), block_size=64
    ),
    "decode e4m3": dataclasses.replace(LATENT, cache_dtype=E4M3, lens=(1, 66, 127), queries=(1, 1, 1)),
    "several queries, holes": dataclasses.replace(LATENT, lens=(150, 70, 9), queries=(4, 2, 5), holes=0.3),
    "prefill": dataclasses.replace(LATENT, lens=(70, 40), queries=(40, 9), heads=(4, 1), head_dim=96, value_dim=64),
    "splits": dataclasses.replace(LATENT, lens=(900, 3, 0), queries=(1, 1, 0), padding=2, bounds=True),
}


LISTS = dataclasses.replace(LATENT, lens=(130, 33, 200), queries=(1, 5, 1), top_k=5, holes=0.2)
_add("latent", "sparse_latent_attention", {"lists": LISTS})
_add("latent", "latent_attention", LATENTS)


def _plan(block_size: int, window: int = 0, num_sink_tokens: int = 0, causal: bool = True, heads: int = 0) -> None:
    """Build plans from tables alone, of every count of tiles over two turns of the kernel's loop.

    Compare with numpy.
    """
    lens = [64 * tiles + 37 * tiles % 64 for tiles in range(131)]
    queries = [min(length, row % 11) for row, length in enumerate(lens)]
    width = -(-max(lens) // block_size)
    tables = torch.randint(0, 9, (len(lens), *[heads] * bool(heads), width), dtype=torch.int32)
    tables[torch.rand(tables.shape) < 0.2] = -1
    tables[::3] = 1
    starts = [0, *itertools.accumulate(queries)]
    for scattered in (False, True):
        positions = [sorted(torch.randperm(n)[:q].tolist()) for n, q in zip(lens, queries, strict=True)]
        given = (
            *(torch.tensor(values, dtype=torch.int32) for values in (lens, starts)),
            block_size,
            causal,
            window,
            num_sink_tokens,
            torch.tensor([*itertools.chain(*positions)], dtype=torch.int32) if scattered else None,
        )
        shape = PlanShape.of(tables, block_size)
        found = pc.attention_plan(tables, *given)
        want = plan_in_numpy(tables, *given)
        assert torch.equal(found[:6], want[:6])
        (info, items, tiles, ranks), wanted = plan_views(found, shape), plan_views(want, shape)
        assert torch.equal(info, wanted[0])
        assert torch.equal(items[: found[0]], wanted[1][: found[0]])
        for row, live in enumerate(info[:, 7].tolist()):
            count = -(-lens[row // max(1, heads)] // 64)
            assert torch.equal(tiles[row, :live], wanted[2][row, :live])
            assert torch.equal(ranks[row, : count + 1], wanted[3][row, : count + 1])


PLANS = (
    {"block_size": 16},
    {"block_size": 16, "window": 70, "num_sink_tokens": 130},
    {"block_size": 16, "window": 5, "causal": False},
    {"block_size": 64},
    {"block_size": 5, "window": 64},
    {"block_size": 16, "heads": 2},
)
for plan in PLANS:
    ATTENTION_CASES["plan: " + ", ".join(f"{k} {v}" for k, v in plan.items())] = functools.partial(_plan, **plan)


def _merge() -> None:
    for tokens, heads, dim in ((9, 5, 80), (1, 3, 16), (33, 4, 64)):
        parts = [(torch.randn(tokens, heads, dim).to(BF16), torch.randn(tokens, heads) * 5) for _ in range(2)]
        for number, (out, lse) in enumerate(parts):
            lse[number::3], out[number::3] = -math.inf, math.nan
        check_merge(*parts[0], *parts[1])


ATTENTION_CASES["merge"] = _merge


def _merge_splits() -> None:
    """Merge every tile of splits and columns with few numbers for each thread, which lanes and warps sum."""
    tokens, heads = 3, 2
    starts = torch.tensor([0, tokens], dtype=torch.int32)
    for block_s, dim, warps in ((4, 32, 1), (8, 16, 1), (2, 64, 1), (4, 16, 4), (8, 64, 4), (16, 32, 4), (32, 16, 4)):
        splits = block_s - block_s // 4
        parts, lse = torch.randn(splits, tokens, heads, dim), torch.randn(splits, tokens, heads) * 3
        lse[1:, 0], lse[:, 1, 0] = -math.inf, -math.inf
        # Memory that nothing writes must not hold the results of the call before.
        out, found = torch.full((tokens, heads, dim), math.nan), torch.full((tokens, heads), math.nan)
        constants = {"TABLE_HEADS": 1, "SINKS": False, "WITH_LSE": True}
        constants |= {"NUM_HEADS": heads, "VALUE_DIM": dim, "BLOCK_S": block_s, "BLOCK_V": dim}
        launch = Launch(_merge_splits_kernel, constants, (tokens, heads, 1), (1, tokens, 0, 1, splits, 0), warps)
        launch((out, found, parts, lse, parts, lse, starts, starts, out))
        nats = lse.double() * math.log(2)
        want = (nats.softmax(0).nan_to_num()[..., None] * parts.double()).sum(0)
        assert torch.allclose(out.double(), want, atol=1e-5)
        assert torch.allclose(found.double(), nats.logsumexp(0), atol=1e-5)


ATTENTION_CASES["merge of splits"] = _merge_splits
