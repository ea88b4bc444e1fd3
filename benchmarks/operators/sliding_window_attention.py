"""pc.sliding_window_attention: windows of gpt-oss (128, with sink logits), Gemma 3 (1024) and Mistral (4096)."""

from __future__ import annotations

from ..harness.registry import Benchmark
from .attention import attention_case
from .attention_providers import attention_providers

K = 1024
CPU = [
    ("decode 8x4k, window 128", {"seq_lens": (4 * K,) * 8, "q_lens": (1,) * 8, "window": 128}, True),
    ("decode 1x32k, window 1k", {"seq_lens": (32 * K,), "q_lens": (1,), "window": K}, True),
    ("prefill 1x4k, window 1k", {"seq_lens": (4 * K,), "q_lens": (4 * K,), "window": K}, False),
    ("prefill 1x512, window 128", {"seq_lens": (512,), "q_lens": (512,), "window": 128}, True),
]
GPT_OSS = {"heads": (64, 8), "head_dim": 64, "window": 128, "sinks": True}
GEMMA = {"heads": (8, 4), "head_dim": 256, "window": K}
MISTRAL = {"window": 4 * K}
STREAMING = {"window": 4 * K - 4, "num_sink_tokens": 4}
CUDA = [
    (f"{kind}, {name}", {**lengths, **model})
    for name, model in (
        ("gpt-oss window 128", GPT_OSS),
        ("Gemma 3 window 1k", GEMMA),
        ("Mistral window 4k", MISTRAL),
        ("window 4k with 4 sink tokens", STREAMING),
    )
    for kind, lengths in (
        ("decode 8x32k", {"seq_lens": (32 * K,) * 8, "q_lens": (1,) * 8}),
        ("decode 1x128k", {"seq_lens": (128 * K,), "q_lens": (1,)}),
        ("prefill 1x8k", {"seq_lens": (8 * K,), "q_lens": (8 * K,)}),
    )
]

BENCHMARKS = (
    Benchmark(
        "sliding_window_attention",
        (
            *(attention_case(name, "cpu", quick, **given) for name, given, quick in CPU),
            *(attention_case(name, "cuda", "gpt-oss" in name, **given) for name, given in CUDA),
        ),
        attention_providers("sliding_window_attention"),
    ),
)
