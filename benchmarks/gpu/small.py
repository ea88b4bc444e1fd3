"""One small call of every operator, checked: `python -m benchmarks small`, also under compute-sanitizer.

On a GPU the kernels run there; with TRITON_INTERPRET=1 they run in the interpreter, else PyTorch does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..harness.registry import OURS, Benchmark, Inputs, discover
from ..operators.attention import AttentionCase, AttentionInputs
from ..operators.attention_plan import PlanInputs
from ..operators.join_prefix import JoinInputs
from ..operators.latent_attention import LatentInputs
from ..operators.merge_attention import MergeInputs
from ..operators.move_slots import MoveInputs
from ..operators.quantized import QuantizedInputs
from ..operators.reshape_and_cache import WriteInputs
from ..operators.rope_and_cache import RopeInputs
from ..operators.rotate_keys import RotateInputs
from ..operators.rows import RowsInputs
from ..operators.sparse_latent_attention import ListedInputs

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
    others: dict[str, Callable[[], Inputs]] = {
        "attention_plan": lambda: PlanInputs(AttentionCase((1, 70, 513), (1, 1, 1), (1, 1), 16), device, 0),
        "latent_attention": lambda: LatentInputs(2, 150, 3, 5, device, 0),
        "sparse_latent_attention": lambda: ListedInputs(2, 256, 2, 5, device, 0),
        "move_slots": lambda: MoveInputs(20, device, 0, kv_heads=3),
        "merge_attention": lambda: MergeInputs(7, 3, 40, device, 0),
        "reshape_and_cache": lambda: WriteInputs(21, 3, 40, None, device, 0),
        "rope_and_cache": lambda: RopeInputs(5, device, 0, heads=4, kv_heads=2),
        "rotate_keys": lambda: RotateInputs(5, device, 0, kv_heads=3),
        "join_prefix": lambda: JoinInputs(3, 21, 5, 40, low, device, 0),
        "gather_slots_dequantized": lambda: QuantizedInputs(21, (40,), low, "int8", device, 0),
        "scatter_slots_quantized": lambda: QuantizedInputs(21, (40,), low, "float8_e4m3fn", device, 0),
    }
    if benchmark.op in ATTENTION:
        for name, given in ATTENTION[benchmark.op].items():
            yield name, AttentionInputs(AttentionCase(**(SMALL | given)), device, 0)
    elif benchmark.op in others:
        yield "small", others[benchmark.op]()
    else:
        case = benchmark.of("cpu", True)[0]
        expected = case.build(torch.device("cpu"), 0).expected  # type: ignore[attr-defined]
        for features, dtype in (((3, 5), torch.float32), ((64,), torch.bfloat16), ((7,), torch.uint8)):
            yield f"{features} {dtype}", RowsInputs(case.conditions["unit"], 21, features, dtype, device, 0, expected)


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
