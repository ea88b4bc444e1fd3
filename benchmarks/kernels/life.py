"""The number of kernels that `pc.warmup` compiles for a layer, and the kernels that later calls would still compile.

Nothing is compiled: a driver that passes for an H100's launches nothing, and triton's hook before a compilation records
the kernel and stops it. Without an argument every kind of layer is counted into results/life.csv. A test compares them.
With a layer's options as JSON, each kernel that warmup lacks is printed, then the number of kernels that it has.

Usage:

    PC_KERNELS_ON_CPU=1 PYTHONPATH=src python -m benchmarks life '{"window": 4096}'
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver

import pc

from ..harness.experiment import Experiment, option
from ..harness.inputs import paged_batch
from .launches import Driver, as_on_a_device, run_on_cpu

HEADS, KV_HEADS, BLOCK = 8, 2, 16
OPTIONS: dict[str, Any] = {}
KINDS: list[dict[str, Any]] = [
    {},
    {"window": 4096, "sinks": True, "alibi": True},
    {"cache_dtype": "float8_e4m3fn", "head_dim": 128},
    {"cache_dtype": "int8", "gaps": True},
    {"batch_invariant": True},
    {"head_dim": 576, "value_dim": 512},
]


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


def step(lens: tuple[int, ...], queries: tuple[int, ...], planned: bool, bounds: bool, head_dim: int) -> None:
    """Run a layer's part of a forward pass like an engine: on slices of a projection, with a plan or without."""
    dtype, tokens = torch.bfloat16, sum(queries)
    cache_dtype = getattr(torch, OPTIONS["cache_dtype"]) if "cache_dtype" in OPTIONS else dtype
    packed = torch.zeros(tokens, HEADS + 2 * KV_HEADS, head_dim, dtype=dtype)
    query, key, value = packed.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
    caches = torch.zeros(2, 4, BLOCK, KV_HEADS, head_dim, dtype=cache_dtype).unbind()
    scales = {} if cache_dtype == dtype else {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
    batch = paged_batch(lens, queries, BLOCK)
    options = {"max_query_len": max(queries), "max_seq_len": max(lens)} if bounds else {}
    if "value_dim" in OPTIONS:
        options["plan"] = pc.attention_plan(*batch, BLOCK, num_kv_heads=1) if planned else None
        pc.latent_attention(query, caches[0][:, :, 0].contiguous(), *batch, 0.125, OPTIONS["value_dim"], **options)
        return
    pc.reshape_and_cache(key, value, *caches, torch.zeros(tokens, dtype=torch.int64), **scales)
    options["batch_invariant"] = OPTIONS.get("batch_invariant", False)
    window, sinks = OPTIONS.get("window", 0), OPTIONS.get("sinks", False)
    if planned:
        given = {"window": window, "num_kv_heads": KV_HEADS, "batch_invariant": options["batch_invariant"]}
        options["plan"] = pc.attention_plan(*batch, BLOCK, **given)
    options |= scales | {"sinks": torch.zeros(HEADS) if sinks else None}
    if OPTIONS.get("alibi"):
        options |= {"alibi_slopes": torch.zeros(HEADS), "softcap": 3.0}
    if window:
        pc.sliding_window_attention(query, *caches, *batch, 0.125, window, **options)
    else:
        pc.paged_attention(query, *caches, *batch, 0.125, **options)
    if OPTIONS.get("gaps"):
        positions = torch.zeros(tokens, dtype=torch.int32)
        options.pop("plan", None)
        pc.sparse_gap_attention(query, *caches, *batch, positions, 0.125, window, **options)


def life(head_dim: int) -> None:
    """Run prefills, chunks, decodes of 1 to 128k tokens in batches of 1 to 64, several tokens at once, and mixes."""
    lengths = (1, 17, 256, 257, 1024, 4096, 40_000, 131_072)
    for planned, bounds in ((False, False), (True, True), (False, True), (True, False)):
        for length in lengths:
            step((length,), (length if length < 5000 else 2048,), planned, bounds, head_dim)
            for count in (1, 3, 64):
                step((length,) * count, (1,) * count, planned, bounds, head_dim)
            for tokens in range(2, 10):
                step((length + tokens, 9), (tokens, 1), planned, bounds, head_dim)
            step((length + 300, 50, length, 9), (300, 50, 1, 1), planned, bounds, head_dim)
            step((length + 16, length + 16), (16, 16), planned, bounds, head_dim)


def run(options: dict[str, Any]) -> tuple[list[str], int]:
    """Return the kernels that warmup lacks for a kind of layer, and the number that it compiles, from a new process."""
    *more, warm = run_on_cpu("life", json.dumps(options)).splitlines()
    return more, int(warm)


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the number of kernels of each kind of layer; or print what `run` returns for the layer that is given."""
    if given.layer is None:
        for kind in KINDS:
            yield {"layer": json.dumps(kind), "kernels": run(kind)[1]}
        return
    OPTIONS.update(json.loads(given.layer))
    driver.set_active(Driver())
    head_dim = OPTIONS.get("head_dim", 64)
    names = ("window", "sinks", "alibi", "batch_invariant", "gaps", "value_dim")
    kind = {name: OPTIONS[name] for name in names if name in OPTIONS}
    if "cache_dtype" in OPTIONS:
        kind["cache_dtype"] = getattr(torch, OPTIONS["cache_dtype"])
    with as_on_a_device():
        with compiled() as warm:
            pc.warmup(HEADS, KV_HEADS, head_dim, BLOCK, device="cpu", softcap=3.0 * OPTIONS.get("alibi", False), **kind)
        with compiled() as served:
            life(head_dim)
    print(*sorted(served - warm), len(warm), sep="\n")


main = Experiment(
    "../life.csv",
    rows,
    {
        "layer": option(
            nargs="?", help="options as JSON: print the kernels that warmup lacks, and the number it compiles"
        )
    },
    ("layer",),
).main
