"""The number of kernels that `pc.warmup` compiles for a layer, and the kernels that later calls would still compile.

Nothing is compiled: a driver that passes for an H100's launches nothing, and triton's hook before a compilation records
the kernel and stops it. A test compares the rows of each kind of layer, which have no missing kernel.

Examples:
    PYTHONPATH=src python -m benchmarks life
    PYTHONPATH=src python -m benchmarks life '{"window": 4096}'
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

os.environ["PC_KERNELS_ON_CPU"] = "1"  # read when pc is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
from triton import knobs
from triton.runtime import driver

import pc
from pc.triton_ops._core.cache import forget_choices

from ..harness.experiment import Experiment, option
from ..harness.inputs import paged_batch
from .launches import Driver, as_on_a_device

HEADS, KV_HEADS, BLOCK = 8, 2, 16
KINDS = (
    "{}",
    '{"window": 4096, "sinks": true, "alibi": true}',
    '{"cache_dtype": "float8_e4m3fn", "head_dim": 128}',
    '{"cache_dtype": "int8", "gaps": true}',
    '{"batch_invariant": true}',
    '{"head_dim": 576, "value_dim": 512}',
)
Layer = dict[str, Any]
"""Options of a layer, as `pc.warmup` takes them."""


@contextlib.contextmanager
def compiled() -> Iterator[set[str]]:
    """Collect the kernels that triton would compile meanwhile."""
    found: set[str] = set()

    def tell(*, fn: Any, key: str, **rest: object) -> bool:
        found.add(f"{fn.name} {key}")
        return True  # as if it were done elsewhere: nothing is compiled or launched

    knobs.runtime.jit_cache_hook = tell
    try:
        yield found
    finally:
        knobs.runtime.jit_cache_hook = None


def step(layer: Layer, lens: tuple[int, ...], queries: tuple[int, ...], planned: bool, bounds: bool) -> None:
    """Run a layer's part of a forward pass like an engine: on slices of a projection, with a plan or without."""
    dtype, tokens, head_dim = torch.bfloat16, sum(queries), layer.get("head_dim", 64)
    cache_dtype = layer.get("cache_dtype", dtype)
    packed = torch.zeros(tokens, HEADS + 2 * KV_HEADS, head_dim, dtype=dtype)
    query, key, value = packed.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    caches = torch.zeros(2, 4, BLOCK, KV_HEADS, head_dim, dtype=cache_dtype).unbind()
    scales = {} if cache_dtype == dtype else {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
    batch = paged_batch(lens, queries, BLOCK)
    options = {"max_query_len": max(queries), "max_seq_len": max(lens)} if bounds else {}
    if "value_dim" in layer:
        options["plan"] = pc.attention_plan(*batch, BLOCK, num_kv_heads=1) if planned else None
        pc.latent_attention(query, caches[0][:, :, 0].contiguous(), *batch, 0.125, layer["value_dim"], **options)
        return
    pc.reshape_and_cache(key, value, *caches, torch.zeros(tokens, dtype=torch.int64), **scales)
    options["batch_invariant"] = layer.get("batch_invariant", False)
    window, sinks = layer.get("window", 0), layer.get("sinks", False)
    if planned:
        given = {"window": window, "num_kv_heads": KV_HEADS, "batch_invariant": options["batch_invariant"]}
        options["plan"] = pc.attention_plan(*batch, BLOCK, **given)
    options |= scales | {"sinks": torch.zeros(HEADS) if sinks else None}
    if layer.get("alibi"):
        options |= {"alibi_slopes": torch.zeros(HEADS), "softcap": 3.0}
    if window:
        pc.sliding_window_attention(query, *caches, *batch, 0.125, window, **options)
    else:
        pc.paged_attention(query, *caches, *batch, 0.125, **options)
    if layer.get("gaps"):
        positions = torch.zeros(tokens, dtype=torch.int32)
        options.pop("plan", None)
        pc.sparse_gap_attention(query, *caches, *batch, positions, 0.125, window, **options)


def life(layer: Layer) -> None:
    """Run prefills, chunks, decodes of 1 to 128k tokens in batches of 1 to 64, several tokens at once, and mixes."""
    lengths = (1, 17, 256, 257, 1024, 4096, 40_000, 131_072)
    for how in ((False, False), (True, True), (False, True), (True, False)):
        for length in lengths:
            step(layer, (length,), (length if length < 5000 else 2048,), *how)
            for count in (1, 3, 64):
                step(layer, (length,) * count, (1,) * count, *how)
            for tokens in range(2, 10):
                step(layer, (length + tokens, 9), (tokens, 1), *how)
            step(layer, (length + 300, 50, length, 9), (300, 50, 1, 1), *how)
            step(layer, (length + 16, length + 16), (16, 16), *how)


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the number of kernels of each kind of layer, and the names of those that warmup lacks."""
    driver.set_active(Driver())
    for text in given.layers:
        layer: Layer = json.loads(text)
        if "cache_dtype" in layer:
            layer["cache_dtype"] = getattr(torch, layer["cache_dtype"])
        warmed = {"softcap": 3.0 * layer.get("alibi", False), "head_dim": 64} | layer
        forget_choices()
        with as_on_a_device():
            with compiled() as warm:
                pc.warmup(HEADS, KV_HEADS, block_size=BLOCK, device="cpu", **warmed)
            with compiled() as served:
                life(layer)
        yield {"layer": text, "kernels": len(warm), "missing": "; ".join(sorted(served - warm))}


main = Experiment("../life.csv", rows, {"layers": option(list(KINDS), "options of pc.warmup as JSON")}, ("layer",)).main
