"""Benchmarks of paged, sliding-window and shared-prefix attention, and of attention_plan.

The cases over whole caches are decodes, prefills, chunks and mixes. Windows are those of gpt-oss (128, with sink
logits), Gemma 3 (1024) and Mistral (4096). Shared prefixes are one system prompt or document for many sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import pc

from ..harness.inputs import Inputs
from ..harness.registry import OURS, Benchmark, Case, Provider, case
from .attention import AttentionCall, AttentionCase, attention_inputs, uniform, variants
from .attention_providers import attention_benchmark

K = 1024


CPU = [
    ("decode 1x4k", uniform(1, 4 * K), True),
    ("decode 8x1k", uniform(8, K), True),
    ("decode 1x32k", uniform(1, 32 * K), False),
    ("decode ragged 1x16k + 15x512", {"seq_lens": (16 * K, *(512,) * 15), "q_lens": (1,) * 16}, False),
    ("prefill 1x512", uniform(1, 512, 512), True),
    ("prefill 1x4k", uniform(1, 4 * K, 4 * K), False),
    ("chunk 64 over 4k", uniform(1, 4 * K + 64, 64), True),
    ("mixed 8 decodes at 2k + prefill 512", {"seq_lens": (*(2 * K,) * 8, 512), "q_lens": (*(1,) * 8, 512)}, False),
]

DECODE = uniform(8, 4 * K)
PREFILL = uniform(1, 4 * K, 4 * K)
HEADS = ((64, 8), (32, 32), (8, 1), (28, 4))
CUDA: list[tuple[str, dict[str, Any]]] = [
    *((f"decode {b}x{s // K}k", uniform(b, s)) for b, s in (
        (1, K), (1, 4 * K), (1, 32 * K), (1, 128 * K), (8, 4 * K), (8, 16 * K), (8, 32 * K), (32, 4 * K),
        (64, 2 * K), (128, 2 * K),
    )),
    ("decode ragged 1x128k + 31x1k", {"seq_lens": (128 * K, *(K,) * 31), "q_lens": (1,) * 32}),
    *((f"prefill 1x{s // K}k", uniform(1, s, s)) for s in (2 * K, 4 * K, 8 * K, 16 * K)),
    ("chunk 512 over 4k", uniform(1, 4 * K + 512, 512)),
    ("chunk 512 over 4k, batch 2", uniform(2, 4 * K + 512, 512)),
    ("chunk 2k over 32k", uniform(1, 34 * K, 2 * K)),
    ("mixed 128 decodes at 4k + prefill 2k", {"seq_lens": (*(4 * K,) * 128, 2 * K), "q_lens": (*(1,) * 128, 2 * K)}),
    *variants("decode 8x4k", DECODE, heads=HEADS, head_dim=(64, 256), block_size=(32, 64, 128), layout=("HND",)),
    *variants("prefill 1x4k", PREFILL, heads=HEADS, head_dim=(64, 256), block_size=(32, 64, 128), layout=("HND",)),
    ("decode 8x4k, heads 64/4, head_dim 64", {**DECODE, "heads": (64, 4), "head_dim": 64}),
    ("prefill 1x4k, heads 64/4, head_dim 64", {**PREFILL, "heads": (64, 4), "head_dim": 64}),
    *variants("decode 8x4k", DECODE, cache_dtype=("float8_e4m3fn", "int8"), dtype=("float16",)),
    *variants("decode 1x4k", uniform(1, 4 * K), cache_dtype=("float8_e4m3fn",)),
    *variants("prefill 1x4k", PREFILL, cache_dtype=("float8_e4m3fn",)),
]  # fmt: skip
QUICK = ("decode 1x4k", "decode 8x4k", "prefill 1x4k", "chunk 512 over 4k")

WINDOW_CPU = [
    ("decode 8x4k, window 128", uniform(8, 4 * K, window=128), True),
    ("decode 1x32k, window 1k", uniform(1, 32 * K, window=K), True),
    ("prefill 1x4k, window 1k", uniform(1, 4 * K, 4 * K, window=K), False),
    ("prefill 1x512, window 128", uniform(1, 512, 512, window=128), True),
]
GPT_OSS = {"heads": (64, 8), "head_dim": 64, "window": 128, "sinks": True}
GEMMA = {"heads": (8, 4), "head_dim": 256, "window": K}
MISTRAL = {"window": 4 * K}
STREAMING = {"window": 4 * K - 4, "num_sink_tokens": 4}
WINDOW_CUDA = [
    (f"{kind}, {name}", {**lengths, **model})
    for name, model in (
        ("gpt-oss window 128", GPT_OSS),
        ("Gemma 3 window 1k", GEMMA),
        ("Mistral window 4k", MISTRAL),
        ("window 4k with 4 sink tokens", STREAMING),
    )
    for kind, lengths in (
        ("decode 8x32k", uniform(8, 32 * K)),
        ("decode 1x128k", uniform(1, 128 * K)),
        ("prefill 1x8k", uniform(1, 8 * K, 8 * K)),
    )
]
WINDOW_QUICK = [name for name, _ in WINDOW_CUDA if "gpt-oss" in name]


SHARED_CPU = [("8x 2k shared + 128 own", uniform(8, 2 * K + 128, shared=2 * K), True)]
SHARED_CUDA = [
    ("32x 4k shared + 256 own", uniform(32, 4 * K + 256, shared=4 * K)),
    ("8x 32k shared + 1k own", uniform(8, 33 * K, shared=32 * K)),
    ("128x 2k shared + 512 own", uniform(128, 2 * K + 512, shared=2 * K)),
    ("32x 512 shared + 4k own", uniform(32, 512 + 4 * K, shared=512)),
]
SHARED_QUICK = ("32x 4k shared + 256 own",)


def plan_inputs(case: AttentionCase, device: torch.device, rotate: int) -> Inputs:
    """Return inputs of which only tables and lengths are read; the attention that uses the plan is checked."""

    def result(call: AttentionCall, plan: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = pc.paged_attention(**call.arguments("paged_attention"), plan=plan)
        return out

    inputs = attention_inputs(case, device, 0, result)
    tables = inputs.calls[0].block_tables
    inputs.bytes, inputs.flops = 4 * tables.numel() + 8 * sum(-(-length // 64) for length in case.seq_lens), 0
    return inputs


def _prepare(call: AttentionCall) -> Callable[[], torch.Tensor]:
    given = (call.block_tables, call.seq_lens, call.query_start_loc, call.case.block_size)
    return lambda: pc.attention_plan(*given, num_kv_heads=call.case.heads[1])


def _plan_case(name: str, device: str, seq_lens: tuple[int, ...]) -> Case:
    # One small head: the cache is not what is measured. It has no rival.
    given = AttentionCase(seq_lens, (1,) * len(seq_lens), heads=(1, 1), head_dim=16)
    columns = {key: given.conditions()[key] for key in ("sequences", "seq_lens", "block_size")}
    return case(name, device, True, plan_inputs, given, **columns)


PLANS = {"8x4k": (4 * K,) * 8, "128x2k": (2 * K,) * 128, "1x128k + 31x1k": (128 * K, *(K,) * 31)}

BENCHMARKS = (
    attention_benchmark("paged_attention", CPU, CUDA, QUICK),
    attention_benchmark("sliding_window_attention", WINDOW_CPU, WINDOW_CUDA, WINDOW_QUICK),
    attention_benchmark("shared_prefix_attention", SHARED_CPU, SHARED_CUDA, SHARED_QUICK),
    Benchmark(
        "attention_plan",
        tuple(_plan_case(name, device, lens) for device in ("cpu", "cuda") for name, lens in PLANS.items()),
        (Provider(OURS, _prepare, lambda: pc.__version__),),
    ),
)
