"""Calls of the attention operators drawn at random, against float64."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from attention_cases import Batch, Case, build, check

import pc

from .random_memory import loose

BF16, F16, F32, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8
HEAD_DIMS = (32, 40, 64, 64, 72, 80, 96, 112, 128, 128, 160, 192, 200, 256, 256, 320, 512)
BLOCK_SIZES = (8, 16, 16, 32, 32, 64, 128, 5, 24, 48)
LENGTHS = (0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 257)
# Multiplications that the emulator runs in seconds.
WORK = 6_000_000


def _sequences(
    rand: random.Random, cost: float, scattered: bool, tree: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return lengths and queries of a batch. `cost` is that of a query and key."""
    kind = rand.choice(["decodes", "decodes", "mixed", "mixed", "one long", "prefills", "empty"])
    count = {"decodes": rand.randint(1, 12), "one long": 1, "empty": rand.randint(0, 2)}.get(kind, rand.randint(1, 5))
    lens, queries, left = [], [], WORK / cost
    for _ in range(count):
        length = rand.choice([rand.choice(LENGTHS), rand.randint(1, 700)])
        if kind == "one long":
            length = rand.randint(700, 3000)
        top = {"decodes": rand.choice([1, 1, 1, 2, 5, 8]), "prefills": 130, "mixed": rand.choice([1, 4, 9, 40])}.get(
            kind, 2
        )
        q = rand.choice([rand.randint(0, top), top])
        length = min(length, max(1, int(left)))
        # With more queries than tokens, those before the first token attend to no key.
        most = length if scattered or tree or length else 3
        q = max(0, min(q, most, int(left / max(1, length))))
        left -= q * length
        lens.append(length)
        queries.append(q)
    return tuple(lens), tuple(queries)


def draw(rand: random.Random) -> Case:
    """Return a case with some of all options."""
    head_dim = rand.choice(HEAD_DIMS)
    kv_heads, group = rand.choice([1, 1, 2, 3, 8]), rand.choice([1, 2, 3, 4, 5, 7, 8, 12, 16])
    return Case(
        heads=(kv_heads * group, kv_heads),
        head_dim=head_dim,
        value_dim=rand.choice([None, None, None, *HEAD_DIMS[:-1]]),
        block_size=rand.choice(BLOCK_SIZES),
        dtype=rand.choice([F32, F16, BF16, BF16]),
        cache_dtype=rand.choice([None, None, None, E4M3, INT8]),
        per_head_scales=rand.random() < 0.5,
        causal=rand.random() < 0.8,
        window=rand.choice([0, 0, 1, rand.randint(2, 300)]),
        num_sink_tokens=rand.choice([0, 0, 4, rand.randint(1, 150)]),
        scattered=rand.random() < 0.3,
        holes=rand.choice([0.0, 0.0, 0.0, 0.3, 0.9]),
        softcap=rand.choice([0.0, 0.0, 5.0]),
        alibi=rand.random() < 0.25,
        sinks=rand.random() < 0.25,
        padding=rand.choice([0, 0, 1, 3]),
        head_major=rand.random() < 0.3,
        batch_invariant=rand.random() < 0.15,
        bounds=rand.random() < 0.3,
        head_tables=rand.random() < 0.2,
        tree=rand.random() < 0.15,
        top_k=rand.choice([0, 0, 0, 1, 3, 12]),
    )


def _loosened(batch: Batch, rand: random.Random) -> None:
    for name in ("query", "key_cache", "value_cache", "block_tables"):
        setattr(batch, name, loose(getattr(batch, name), rand))
    if rand.random() < 0.3:
        # Keys and values of a token are adjacent, as in vLLM and others.
        key, value = batch.key_cache, batch.value_cache
        both = torch.cat([key, value], 3) if rand.random() < 0.5 or key.shape != value.shape else None
        halves = (
            both.split([key.shape[3], value.shape[3]], 3)
            if both is not None
            else torch.stack([key, value], 1).unbind(1)
        )
        batch.key_cache, batch.value_cache = halves
    for name in ("k_scale", "v_scale"):
        if name in batch.options and rand.random() < 0.3 and batch.options[name].numel() == 1:
            batch.options[name] = batch.options[name].squeeze(0)


def _compare(batch: Batch, op: str, arguments: tuple[Any, ...], with_lse: bool) -> None:
    found: Callable[..., Any] = getattr(pc, op + "_with_lse" * with_lse)
    out = found(*batch.tensors, *arguments, **batch.options)
    check(batch, *(out if with_lse else (out,)))


def attention(rand: random.Random) -> str:
    """Call paged_attention, sliding_window_attention or sparse_gap_attention."""
    case = draw(rand)
    ops = ["sparse_gap_attention"]
    if not (case.scattered or case.tree or case.top_k or case.head_tables):
        ops = ["sliding_window_attention"] * 2 if case.window else ["paged_attention"] * 2
        if not case.window and case.num_sink_tokens:
            case = dataclasses.replace(case, num_sink_tokens=0)
    op = rand.choice(ops)
    masks = {"window": case.window, "num_sink_tokens": case.num_sink_tokens}
    with_lse, with_plan = rand.random() < 0.5, rand.random() < 0.4 and not case.top_k
    for one in _batches(case, rand):
        batch = build(one)
        _loosened(batch, rand)
        if with_plan:
            _plan(batch, rand, **masks, query_positions=batch.positions)
        arguments: tuple[Any, ...] = (batch.scale,)
        if op == "sparse_gap_attention":
            arguments = (batch.positions, batch.scale, *masks.values())
        elif op == "sliding_window_attention":
            arguments = (batch.scale, *masks.values())
        _compare(batch, op, arguments, with_lse)
    return f"{op} {case}"


def shared(rand: random.Random) -> str:
    """Call shared_prefix_attention."""
    changed = {"scattered": False, "holes": 0.0, "window": 0, "num_sink_tokens": 0, "tree": False, "top_k": 0}
    case = dataclasses.replace(draw(rand), head_tables=False, **changed)
    with_lse, with_plan = rand.random() < 0.5, rand.random() < 0.3
    for one in _batches(case, rand):
        blocks = rand.randint(0, 6) * bool(one.lens)
        batch = build(dataclasses.replace(one, lens=tuple(n + blocks * one.block_size for n in one.lens)))
        batch.block_tables[:, :blocks] = batch.block_tables[:1, :blocks]
        _loosened(batch, rand)
        if with_plan:
            _plan(batch, rand, num_shared_blocks=blocks)
        _compare(batch, "shared_prefix_attention", (blocks, batch.scale), with_lse)
    return f"shared {case}"


def _batches(case: Case, rand: random.Random) -> Iterator[Case]:
    """Yield the case with several batches, since compiling takes most of the time."""
    for _ in range(4):
        cost = case.heads[0] * case.head_dim / 8
        lens, queries = _sequences(rand, cost, case.scattered, case.tree)
        yield dataclasses.replace(case, lens=lens, queries=queries, seed=rand.randrange(10**6))


def _plan(batch: Batch, rand: random.Random, **options: Any) -> None:
    case = batch.case
    given = (*batch.tensors[3:], case.block_size, case.causal)
    heads = rand.choice([case.heads[1], 8])
    options |= {"num_kv_heads": heads, "batch_invariant": case.batch_invariant}
    batch.options["plan"] = pc.attention_plan(*given, **options)


def merge(rand: random.Random) -> str:
    """Call merge_attention."""
    tokens, heads, dim = rand.choice([0, 1, 2, 33, 70]), rand.choice([1, 3, 8, 40]), rand.choice(HEAD_DIMS)
    dtype = rand.choice([F32, F16, BF16])
    parts = []
    for _ in range(2):
        lse, out = torch.randn(tokens, heads) * rand.choice([0.1, 5, 100]), torch.randn(tokens, heads, dim).to(dtype)
        none = torch.rand(tokens, heads) < rand.choice([0, 0.3])
        lse[none], out[none] = -math.inf, rand.choice([math.nan, math.inf])
        parts += [loose(out, rand), loose(lse, rand)]
    out, lse = pc.merge_attention(*parts)
    assert out.is_contiguous()
    lses = torch.stack([parts[1], parts[3]]).double()
    want = lses.logsumexp(0)
    weights = (lses - want.masked_fill(want == -math.inf, 0.0)).exp()[..., None]
    outs = torch.stack([parts[0], parts[2]]).double().masked_fill(weights == 0, 0.0)
    exact = (outs * weights).sum(0)
    assert torch.equal(lse == -math.inf, want == -math.inf)
    assert torch.allclose(lse.double(), want, atol=1e-5, rtol=1e-6)
    assert torch.allclose(out.double(), exact, atol=2 * torch.finfo(dtype).eps, rtol=2 * torch.finfo(dtype).eps)
    return f"merge {tokens} {heads} {dim} {dtype}"
