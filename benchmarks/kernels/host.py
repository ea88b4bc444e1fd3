"""The cost of a call on the host, as a multiple of torch.add: `make host`.

The driver's launch does nothing. Kernels are compiled for sm_90 on the first call, so later calls measure what Python
and torch do for every layer. Calls alternate in one process, in inference mode, and medians are compared. CPU tensors
pass for tensors of a device.

Usage:

    PYTHONPATH=src python -m benchmarks host
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ["PC_KERNELS_ON_CPU"] = "1"  # read when pc is imported
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
from triton.runtime import driver

import pc
from pc.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

from ..harness.experiment import Experiment, option
from ..harness.inputs import paged_batch
from ..harness.timing import by_turns
from .launches import Driver, as_on_a_device

# FlashAttention's functions, and the calls of operators that they replace.
BESIDE = {
    "flash_attn_with_kvcache, block table": "paged_attention",
    "flash_attn_with_kvcache, new keys": "reshape_and_cache + paged_attention",
    "flash_attn_with_kvcache, new keys and rotary": "rope_and_cache + paged_attention",
    "flash_attn_varlen_func, block table": "paged_attention",
    "flash_attn_varlen_func": "paged_attention, blocks of a token",
    "flash_attn_func": "paged_attention",
}


def calls() -> dict[str, Callable[[], Any]]:
    """Return calls of a decode of 8 sequences of 4096 tokens, heads 32/8 of 128, blocks of 16, and torch.add."""
    query = torch.zeros(8, 32, 128, dtype=torch.bfloat16)
    key, value = (torch.zeros(8, 8, 128, dtype=torch.bfloat16) for _ in range(2))
    caches = [torch.zeros(64, 16, 8, 128, dtype=torch.bfloat16) for _ in range(2)]
    batch = paged_batch((4096,) * 8, (1,) * 8, 16)
    slots, positions, angles = torch.arange(8), torch.arange(8), torch.zeros(4096, 128)
    cos, sin = angles.chunk(2, 1)
    plan, before = pc.attention_plan(*batch, 16), batch[1] - 1
    shared = pc.attention_plan(*batch, 16, num_shared_blocks=64)
    attend = (query, *caches, *batch)
    tables, lens, starts = batch
    dense = [torch.zeros(8, 4096, 8, 128, dtype=torch.bfloat16) for _ in range(2)]
    packed = [torch.zeros(8 * 4096, 8, 128, dtype=torch.bfloat16) for _ in range(2)]
    key_starts = torch.arange(9, dtype=torch.int32) * 4096
    numbers = key_starts[:-1, None] + torch.arange(4096, dtype=torch.int32)
    flash = {"softmax_scale": 0.1, "causal": True}
    queries, new = query[:, None], (key[:, None], value[:, None])  # as models have them

    return {
        "torch.add": lambda: torch.add(slots, slots),
        "paged_attention, plan given": lambda: pc.paged_attention(*attend, 0.1, max_query_len=1, plan=plan),
        "paged_attention": lambda: pc.paged_attention(*attend, 0.1, max_query_len=1),
        "shared_prefix_attention, plan given": lambda: pc.shared_prefix_attention(
            *attend, 64, 0.1, max_query_len=1, plan=shared
        ),
        "flash_attn_with_kvcache, block table": lambda: flash_attn_with_kvcache(
            queries, *caches, cache_seqlens=lens, block_table=tables, **flash
        ),
        "flash_attn_with_kvcache, new keys": lambda: flash_attn_with_kvcache(
            queries, *caches, *new, cache_seqlens=before, block_table=tables, **flash
        ),
        "flash_attn_with_kvcache, new keys and rotary": lambda: flash_attn_with_kvcache(
            queries, *caches, *new, cos, sin, before, block_table=tables, **flash
        ),
        "flash_attn_varlen_func, block table": lambda: flash_attn_varlen_func(
            query, *caches, starts, None, 1, 4096, seqused_k=lens, block_table=tables, **flash
        ),
        "flash_attn_varlen_func": lambda: flash_attn_varlen_func(query, *packed, starts, key_starts, 1, 4096, **flash),
        "flash_attn_func": lambda: flash_attn_func(queries, *dense, **flash),
        "paged_attention, blocks of a token": lambda: pc.paged_attention(
            query, packed[0][:, None], packed[1][:, None], numbers, lens, starts, 0.1, max_query_len=1, max_seq_len=4096
        ),
        "attention_plan": lambda: pc.attention_plan(*batch, 16),
        "reshape_and_cache": lambda: pc.reshape_and_cache(key, value, *caches, slots),
        "rope_and_cache": lambda: pc.rope_and_cache(query, key, value, positions, angles, *caches, slots),
    }


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each call: medians of the rounds, each the mean of `--repeats` calls."""
    driver.set_active(Driver())
    with as_on_a_device():
        made = calls()

        def timed(name: str, repeats: int = given.repeats) -> float:
            begin = time.process_time()
            for _ in range(repeats):
                made[name]()
            return (time.process_time() - begin) / repeats

        for name in made:
            timed(name, 3)
        gc.disable()
        times = {name: statistics.median(took) for name, took in by_turns(timed, made, given.rounds).items()}
        gc.enable()
    for name, seconds in times.items():
        beside = BESIDE.get(name, "")
        row = {"call": name, "us": f"{seconds * 1e6:.2f}", "over_add": f"{seconds / times['torch.add']:.2f}"}
        own = sum(times[part] for part in beside.split(" + ")) if beside else seconds
        yield row | {"over_beside": f"{seconds / own:.2f}" if beside else "", "beside": beside}


# No page shows the rows, so they stay outside of the results.
ROWS = "../../../bench_output/host.csv"
main = Experiment(ROWS, rows, {"--rounds": option(60), "--repeats": option(100)}, ("call",)).main
