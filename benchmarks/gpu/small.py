"""One small call of every operator, checked: `python -m benchmarks small`, also under compute-sanitizer.

On a GPU the kernels run there; with TRITON_INTERPRET=1 they run in the interpreter, else PyTorch does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..harness.inputs import Inputs
from ..harness.registry import OURS, Benchmark, discover
from ..operators.attention import AttentionCase, attention_inputs
from ..operators.dense_attention import plan_inputs
from ..operators.join_prefix import join_inputs
from ..operators.keys import move_inputs, rope_inputs, rotate_inputs, write_inputs
from ..operators.latent_attention import latent_inputs
from ..operators.merge_attention import merge_inputs
from ..operators.rows import quantized_inputs, rows_inputs

SMALL: dict[str, Any] = {"heads": (4, 2), "head_dim": 64}
# Ragged lengths that end inside blocks and tiles: where an index that is off by one leaves its tensor.
ATTENTION: dict[str, dict[str, dict[str, Any]]] = {
    "paged_attention": {
        "decode": {"seq_lens": (1, 37, 513), "q_lens": (1, 1, 1)},
        "mixed": {"seq_lens": (70, 7, 150), "q_lens": (70, 1, 9)},
        "float8": {"seq_lens": (37, 70), "q_lens": (1, 20), "cache_dtype": "float8_e4m3fn"},
        "head-major": {"seq_lens": (37, 70), "q_lens": (1, 20), "layout": "HND"},
    },
    "sliding_window_attention": {
        "decode": {"seq_lens": (200, 37), "q_lens": (1, 1), "window": 50, "num_sink_tokens": 3},
        "prefill": {"seq_lens": (70,), "q_lens": (70,), "window": 40, "sinks": True},
    },
    "sparse_gap_attention": {
        "holes": {"seq_lens": (300,), "q_lens": (1,), "live": ((0, 16), (256, 300))},
        "queries": {"seq_lens": (200,), "q_lens": (35,), "queries": ((40, 60), (100, 115))},
    },
    "shared_prefix_attention": {"decode": {"seq_lens": (140, 170), "q_lens": (1, 1), "shared": 128}},
}


def small_inputs(benchmark: Benchmark, device: torch.device) -> Iterator[tuple[str, Inputs]]:
    """Inputs of an operator that fit into a megabyte or so."""
    low = torch.float32 if device.type == "cpu" else torch.bfloat16
    others: dict[str, tuple[Callable[..., Inputs], tuple[Any, ...]]] = {
        "latent_attention": (latent_inputs, (2, 150, 3, 5, 0)),
        "sparse_latent_attention": (latent_inputs, (2, 256, 1, 5, 2)),
        "move_slots": (move_inputs, (20, 3)),
        "merge_attention": (merge_inputs, (7, 3, 40)),
        "reshape_and_cache": (write_inputs, (21, 3, 40, None)),
        "rope_and_cache": (rope_inputs, (5, 4, 2)),
        "rotate_keys": (rotate_inputs, (5, 3)),
        "join_prefix": (join_inputs, (3, 21, 5, 40)),
        "gather_slots_dequantized": (quantized_inputs, (benchmark.op, 21, 40, low, "int8")),
        "scatter_slots_quantized": (quantized_inputs, (benchmark.op, 21, 40, low, "float8_e4m3fn")),
    }
    if benchmark.op in ATTENTION:
        for name, given in ATTENTION[benchmark.op].items():
            yield name, attention_inputs(AttentionCase(**(SMALL | given)), device, 0)
    elif benchmark.op in others:
        build, sizes = others[benchmark.op]
        yield "small", build(*sizes, device, 0)
    elif benchmark.op == "attention_plan":
        yield "small", plan_inputs(AttentionCase((1, 70, 513), (1, 1, 1), (1, 1), 16), device, 0)
    else:
        for features, dtype in (((3, 5), torch.float32), ((64,), torch.bfloat16), ((7,), torch.uint8)):
            yield f"{features} {dtype}", rows_inputs(benchmark.op, 21, features, dtype, device, 0)


def run_small(names: list[str] | None, device: torch.device, say: Callable[[str], None] = print) -> None:
    """Runs and checks; raises WrongError where a result is wrong."""
    for benchmark in discover(names or None):
        ours = next(provider for provider in benchmark.providers if provider.name == OURS)
        for name, inputs in small_inputs(benchmark, device):
            inputs.check(inputs.calls[0], ours.prepare(inputs.calls[0]))
            say(f"{benchmark.op}, {name}: right")


def main(names: list[str] | None = None) -> int:
    """The given operators, or all."""
    torch.set_num_threads(1)  # threads that wait for small work cost more than they do
    run_small(sys.argv[1:] if names is None else names, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return 0
