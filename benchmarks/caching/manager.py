"""CacheManager against vLLM's KVCacheManager, alternating in one process, on equal requests.

A request is a new list of tokens; three quarters of it are one of four shared prefixes. Blocks have 16 tokens, five
requests run at once, and both managers use lru. The times are CPU time of the thread for hash, lookup, allocate, commit
and free. The placement of a process's memory changes a time by up to a third. So a row is the median of several
processes.

Examples:
    .peers/vllm-quick/bin/python -m benchmarks manager --hash sha256
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import os
import random
import statistics
from collections.abc import Iterator
from time import thread_time_ns as clock
from typing import Any

from ..harness.conditions import version
from ..harness.experiment import Experiment, option
from ..harness.timing import by_turns, frozen

BLOCK, CONCURRENT, WARM = 16, 4, 12


class Ours:
    """pc.CacheManager behind the two calls that are timed."""

    def __init__(self, num_blocks: int, algorithm: str) -> None:
        import pc

        self.manager = pc.CacheManager(num_blocks, BLOCK, policy="lru", hash_algorithm=algorithm)

    def start(self, i: int, tokens: list[int]) -> None:
        self.manager.allocate(i, tokens)
        self.manager.commit(i, len(tokens))

    def end(self, i: int) -> None:
        self.manager.free(i)


class VLLM:
    """vLLM's KVCacheManager with full attention."""

    def __init__(self, num_blocks: int, algorithm: str) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        config = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.manager = KVCacheManager(
            config, max_model_len=1 << 20, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True
        )
        function = get_hash_fn_by_name({"xxh3_128": "xxhash"}.get(algorithm, algorithm))
        init_none_hash(function)
        self.request, self.params = Request, SamplingParams(max_tokens=64)
        self.hasher = get_request_block_hasher(BLOCK, function)
        self.live: dict[int, object] = {}

    def start(self, i: int, tokens: list[int]) -> None:
        request = self.request(
            request_id=str(i),
            prompt_token_ids=tokens,
            sampling_params=self.params,
            pooling_params=None,
            block_hasher=self.hasher,
        )
        blocks, hits, _ = self.manager.get_computed_blocks(request)
        assert self.manager.allocate_slots(request, request.num_tokens - hits, hits, blocks) is not None
        request.num_computed_tokens = request.num_tokens
        self.live[i] = request

    def end(self, i: int) -> None:
        self.manager.free(self.live.pop(i))


def compare(length: int, algorithm: str, requests: int) -> dict[str, float]:
    """Return medians in microseconds of start plus end."""
    num_blocks = max(4096, (length // BLOCK + 2) * 12)
    contestants = {"pc": Ours(num_blocks, algorithm), "peer": VLLM(num_blocks, algorithm)}
    rng = random.Random(0)
    shared = length * 3 // 4 // BLOCK * BLOCK
    prefixes = [[rng.randrange(150_000) for _ in range(shared)] for _ in range(4)]
    numbers = itertools.count()

    def draw() -> tuple[int, list[int]]:
        i = next(numbers)
        return i, prefixes[i % 4] + [rng.randrange(150_000) for _ in range(length - shared)]

    def measure(name: str, drawn: tuple[int, list[int]]) -> int:
        i, tokens, one = drawn[0], list(drawn[1]), contestants[name]
        begin = clock()
        one.start(i, tokens)
        if i >= CONCURRENT:
            one.end(i - CONCURRENT)
        return clock() - begin

    with frozen():
        times = by_turns(measure, ("peer", "pc"), requests + WARM, draw)
    return {name: statistics.median(values[WARM:]) / 1e3 for name, values in times.items()}


def measure(given: argparse.Namespace, length: int) -> dict[str, Any]:
    """Return the row of a length, measured once in this process."""
    os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    logging.disable(logging.WARNING)
    requests = given.requests or max(40, min(400, 4_000_000 // length))
    got = compare(length, given.hash, requests)
    row = {"peer": f"vllm {version('vllm')}", "hash": given.hash, "tokens": length, "block_size": BLOCK}
    row |= {"shared": 0.75, "requests": requests, "pc_us": round(got["pc"], 1), "peer_us": round(got["peer"], 1)}
    row |= {"pc_over_peer": round(got["pc"] / got["peer"], 4)}
    return row | {"cores": os.cpu_count(), "processes": given.processes}


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each length: the median of several processes, by its ratio."""
    context = multiprocessing.get_context("spawn")
    for length in given.lengths:
        with context.Pool(1, maxtasksperchild=1) as pool:  # a new process for each
            found = pool.starmap(measure, [(given, length)] * given.processes, chunksize=1)
        yield sorted(found, key=lambda row: row["pc_over_peer"])[len(found) // 2]


main = Experiment(
    "manager.csv",
    rows,
    {
        "--hash": option("sha256"),
        "--lengths": option([1024, 16384, 131072]),
        "--requests": option(0, "timed requests of a length; 0: by length"),
        "--processes": option(5, "processes that measure each length once"),
    },
    ("peer", "hash", "tokens"),
    ("numpy",),
).main
