"""pc.shared_prefix_attention: many sequences over one system prompt or document."""

from __future__ import annotations

from typing import Any

from ..harness.registry import Benchmark
from .attention import attention_case
from .attention_providers import attention_providers

K = 1024


def _decode(batch: int, shared: int, own: int) -> dict[str, Any]:
    return {"seq_lens": (shared + own,) * batch, "q_lens": (1,) * batch, "shared": shared}


CPU = [("8x 2k shared + 128 own", _decode(8, 2 * K, 128), True)]
CUDA = [
    ("32x 4k shared + 256 own", _decode(32, 4 * K, 256), True),
    ("8x 32k shared + 1k own", _decode(8, 32 * K, K), False),
    ("128x 2k shared + 512 own", _decode(128, 2 * K, 512), False),
    ("32x 512 shared + 4k own", _decode(32, 512, 4 * K), False),
]

BENCHMARKS = (
    Benchmark(
        "shared_prefix_attention",
        (
            *(attention_case(name, "cpu", quick, **given) for name, given, quick in CPU),
            *(attention_case(name, "cuda", quick, **given) for name, given, quick in CUDA),
        ),
        attention_providers("shared_prefix_attention"),
    ),
)
