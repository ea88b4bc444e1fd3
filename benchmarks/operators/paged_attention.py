"""pc.paged_attention: decode, prefill, chunks and mixes over whole caches."""

from __future__ import annotations

from typing import Any

from ..harness.registry import Benchmark
from .attention import attention_case, variants
from .attention_providers import attention_providers

K = 1024


def _uniform(batch: int, seq_len: int, q_len: int = 1) -> dict[str, Any]:
    return {"seq_lens": (seq_len,) * batch, "q_lens": (q_len,) * batch}


CPU = [
    ("decode 1x4k", _uniform(1, 4 * K), True),
    ("decode 8x1k", _uniform(8, K), True),
    ("decode 1x32k", _uniform(1, 32 * K), False),
    ("decode ragged 1x16k + 15x512", {"seq_lens": (16 * K, *(512,) * 15), "q_lens": (1,) * 16}, False),
    ("prefill 1x512", _uniform(1, 512, 512), True),
    ("prefill 1x4k", _uniform(1, 4 * K, 4 * K), False),
    ("chunk 64 over 4k", _uniform(1, 4 * K + 64, 64), True),
    ("mixed 8 decodes at 2k + prefill 512", {"seq_lens": (*(2 * K,) * 8, 512), "q_lens": (*(1,) * 8, 512)}, False),
]

DECODE = _uniform(8, 4 * K)
PREFILL = _uniform(1, 4 * K, 4 * K)
HEADS = ((64, 8), (32, 32), (8, 1), (28, 4))
CUDA: list[tuple[str, dict[str, Any]]] = [
    *((f"decode {b}x{s // K}k", _uniform(b, s)) for b, s in (
        (1, K), (1, 4 * K), (1, 32 * K), (1, 128 * K), (8, 4 * K), (8, 16 * K), (8, 32 * K), (32, 4 * K),
        (64, 2 * K), (128, 2 * K),
    )),
    ("decode ragged 1x128k + 31x1k", {"seq_lens": (128 * K, *(K,) * 31), "q_lens": (1,) * 32}),
    *((f"prefill 1x{s // K}k", _uniform(1, s, s)) for s in (2 * K, 4 * K, 8 * K, 16 * K)),
    ("chunk 512 over 4k", _uniform(1, 4 * K + 512, 512)),
    ("chunk 512 over 4k, batch 2", _uniform(2, 4 * K + 512, 512)),
    ("chunk 2k over 32k", _uniform(1, 34 * K, 2 * K)),
    ("mixed 128 decodes at 4k + prefill 2k", {"seq_lens": (*(4 * K,) * 128, 2 * K), "q_lens": (*(1,) * 128, 2 * K)}),
    *variants("decode 8x4k", DECODE, heads=HEADS, head_dim=(64, 256), block_size=(32, 64, 128), layout=("HND",)),
    *variants("prefill 1x4k", PREFILL, heads=HEADS, head_dim=(64, 256), block_size=(32, 64, 128), layout=("HND",)),
    ("decode 8x4k, heads 64/4, head_dim 64", {**DECODE, "heads": (64, 4), "head_dim": 64}),
    ("prefill 1x4k, heads 64/4, head_dim 64", {**PREFILL, "heads": (64, 4), "head_dim": 64}),
    *variants("decode 8x4k", DECODE, cache_dtype=("float8_e4m3fn", "int8"), dtype=("float16",)),
    *variants("decode 1x4k", _uniform(1, 4 * K), cache_dtype=("float8_e4m3fn",)),
    *variants("prefill 1x4k", PREFILL, cache_dtype=("float8_e4m3fn",)),
]  # fmt: skip
QUICK = ("decode 1x4k", "decode 8x4k", "prefill 1x4k", "chunk 512 over 4k")

BENCHMARKS = (
    Benchmark(
        "paged_attention",
        (
            *(attention_case(name, "cpu", quick, **given) for name, given, quick in CPU),
            *(attention_case(name, "cuda", name in QUICK, **given) for name, given in CUDA),
        ),
        attention_providers("paged_attention"),
    ),
)
