"""Calls of the attention operators drawn at random, against float64."""

from __future__ import annotations

import dataclasses
import math
import random

import torch
from attention_cases import Batch, Case, attend, build, check, check_merge, plan_of, random_case, with_random_lengths

from .random_memory import loose

BF16, F16, F32, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8
# Multiplications of eight numbers that the emulator runs in seconds.
WORK = 6_000_000


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


def _run(case: Case, op: str, rand: random.Random, with_plan: bool) -> None:
    """Call an operator with several batches of a case, since compiling takes most of the time."""
    with_lse = rand.random() < 0.5
    for _ in range(4):
        one = with_random_lengths(case, rand, WORK)
        if op == "shared_prefix_attention":
            blocks = rand.randint(0, 6) * bool(one.lens)
            lens = tuple(length + blocks * one.block_size for length in one.lens)
            one = dataclasses.replace(one, lens=lens, shared=blocks)
        batch = build(one)
        _loosened(batch, rand)
        if with_plan:
            batch.options["plan"] = plan_of(batch, num_kv_heads=rand.choice([one.heads[1], 8]))
        found = attend(batch, op, with_lse)
        check(batch, *(found if with_lse else (found,)))


def attention(rand: random.Random) -> str:
    """Call paged_attention, sliding_window_attention or sparse_gap_attention."""
    case, ops = random_case(rand), ["sparse_gap_attention"]
    if not (case.scattered or case.tree or case.top_k or case.head_tables):
        ops += ["sliding_window_attention" if case.window else "paged_attention"] * 2
    op = rand.choice(ops)
    if op == "paged_attention":
        case = dataclasses.replace(case, num_sink_tokens=0)
    _run(case, op, rand, rand.random() < 0.4 and not case.top_k)
    return f"{op} {case}"


def shared(rand: random.Random) -> str:
    """Call shared_prefix_attention."""
    changed = {"scattered": False, "holes": 0.0, "window": 0, "num_sink_tokens": 0, "tree": False, "top_k": 0}
    case = dataclasses.replace(random_case(rand), head_tables=False, **changed)
    _run(case, "shared_prefix_attention", rand, rand.random() < 0.3)
    return f"shared {case}"


def merge(rand: random.Random) -> str:
    """Call merge_attention."""
    tokens, heads, dim = (
        rand.choice([0, 1, 2, 33, 70]),
        rand.choice([1, 3, 8, 40]),
        rand.choice((32, 40, 64, 80, 128, 200, 256, 512)),
    )
    dtype = rand.choice([F32, F16, BF16])
    parts = []
    for _ in range(2):
        lse, out = torch.randn(tokens, heads) * rand.choice([0.1, 5, 100]), torch.randn(tokens, heads, dim).to(dtype)
        none = torch.rand(tokens, heads) < rand.choice([0, 0.3])
        lse[none], out[none] = -math.inf, rand.choice([math.nan, math.inf])
        parts += [loose(out, rand), loose(lse, rand)]
    check_merge(*parts)
    return f"merge {tokens} {heads} {dim} {dtype}"
