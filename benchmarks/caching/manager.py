"""CacheManager against the managers of vLLM and SGLang, alternating in one process, on equal requests.

A request is a new list of tokens; three quarters of it are one of four shared prefixes. Blocks have 16 tokens, five
requests run at once, and both managers use lru. The times are CPU time of the thread for hash, lookup, allocate, commit
and free. SGLang's slot allocator is timed apart (column peer_alloc_us) and not counted, although ours allocates too.
The placement of a process's memory changes a time by up to a third. So a row is the median of several processes.

Examples:
    python -m benchmarks manager --peer vllm --source .peers/vllm-src --hash sha256
    python -m benchmarks manager --peer sglang --source .peers/sglang-src --hash xxh3_128
"""

from __future__ import annotations

import argparse
import gc
import importlib.abc
import importlib.machinery
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import types
from array import array
from collections.abc import Iterator
from pathlib import Path
from time import thread_time_ns as clock
from typing import Any
from unittest.mock import MagicMock

from ..harness.experiment import Experiment, option
from ..harness.tables import read_rows
from ..harness.timing import rotated

BLOCK, CONCURRENT, WARM = 16, 4, 12


class Ours:
    """pc.CacheManager behind the two calls that are timed.

    Attributes:
        apart: Nanoseconds of the latest start that are not counted; every contestant has it.
    """

    apart = 0

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

    apart = 0

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


class SGLang:
    """SGLang's Python radix cache with its paged slot allocator."""

    def __init__(self, num_blocks: int, algorithm: str) -> None:
        import torch
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

        self.torch, self.evict, self.insert, self.match, self.key = (
            torch,
            EvictParams,
            InsertParams,
            MatchPrefixParams,
            RadixKey,
        )
        self.slots = PagedTokenToKVPoolAllocator(
            size=num_blocks * BLOCK, page_size=BLOCK, dtype=torch.bfloat16, device="cpu", kvcache=None, need_sort=False
        )
        self.cache = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.slots,
                page_size=BLOCK,
                eviction_policy="lru",
                enable_kv_cache_events=False,
            )
        )
        self.live: dict[int, object] = {}

    def start(self, i: int, tokens: list[int]) -> None:
        row = array("q", tokens)
        matched = self.cache.match_prefix(self.match(key=self.key(row)))
        hits = matched.device_prefix_len
        self.cache.inc_lock_ref(matched.last_device_node)
        needed = (len(tokens) - hits) // BLOCK * BLOCK
        short = needed - self.slots.available_size()
        if short > 0:
            self.cache.evict(self.evict(num_tokens=short))
        before = clock()
        slots = self.slots.alloc(needed)
        value = self.torch.cat([self.cache.path_device_indices(matched.last_device_node), slots])
        self.apart = clock() - before
        self.cache.insert(self.insert(key=self.key(row), value=value, prev_prefix_len=hits))
        self.live[i] = matched.last_device_node

    def end(self, i: int) -> None:
        self.cache.dec_lock_ref(self.live.pop(i))


def compare(peer: type, length: int, algorithm: str, requests: int) -> dict[str, float]:
    """Return medians in microseconds of start plus end, and of the peer's part that is not counted."""
    num_blocks = max(4096, (length // BLOCK + 2) * 12)
    contestants = {"pc": Ours(num_blocks, algorithm), "peer": peer(num_blocks, algorithm)}
    rng = random.Random(0)
    shared = length * 3 // 4 // BLOCK * BLOCK
    prefixes = [[rng.randrange(150_000) for _ in range(shared)] for _ in range(4)]
    times: dict[str, list[int]] = {"pc": [], "peer": [], "apart": []}
    gc.collect()
    gc.freeze()
    for i in range(requests + WARM):
        prompt = prefixes[i % 4] + [rng.randrange(150_000) for _ in range(length - shared)]
        for name in rotated(("peer", "pc"), i):
            tokens, one = list(prompt), contestants[name]
            begin = clock()
            one.start(i, tokens)
            if i >= CONCURRENT:
                one.end(i - CONCURRENT)
            times[name].append(clock() - begin - one.apart)
        times["apart"].append(contestants["peer"].apart)
    gc.unfreeze()
    return {name: statistics.median(values[WARM:]) / 1e3 for name, values in times.items()}


def measure(given: argparse.Namespace, length: int) -> dict[str, Any]:
    """Return the row of a length, measured once in this process."""
    sys.path.insert(0, given.source)
    os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    logging.disable(logging.WARNING)
    if given.peer == "sglang":
        sys.meta_path.insert(0, _Absent("torchvision"))
    peer, version = PEERS[given.peer]
    requests = given.requests or max(40, min(400, 4_000_000 // length))
    got = compare(peer, length, given.hash, requests)
    row = {"peer": f"{given.peer} {version}", "hash": given.hash, "tokens": length, "block_size": BLOCK}
    row |= {"shared": 0.75, "requests": requests, "pc_us": round(got["pc"], 1), "peer_us": round(got["peer"], 1)}
    row |= {"peer_alloc_us": round(got["apart"], 1), "pc_over_peer": round(got["pc"] / got["peer"], 4)}
    return row | {"cores": os.cpu_count(), "processes": 1}


def in_a_process(given: argparse.Namespace, length: int) -> dict[str, Any]:
    """Return the row of a length, measured once in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "rows.csv"
        command = [sys.executable, "-m", "benchmarks", "manager", "--peer", given.peer, "--source", given.source]
        command += ["--hash", given.hash, "--lengths", str(length), "--requests", str(given.requests)]
        subprocess.run([*command, "--processes", "1", "--output", str(output)], stdout=subprocess.DEVNULL, check=True)
        return {**read_rows(output)[0]}


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each length: the median of several processes, by its ratio."""
    for length in given.lengths:
        if given.processes == 1:
            yield measure(given, length)
            continue
        found = sorted(
            (in_a_process(given, length) for _ in range(given.processes)), key=lambda row: float(row["pc_over_peer"])
        )
        yield found[len(found) // 2] | {"processes": given.processes}


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder of modules that the peer imports but does not use here; their attributes are mocks."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: object) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda item: MagicMock(name=item)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


PEERS: dict[str, tuple[type, str]] = {"vllm": (VLLM, "0.33.0"), "sglang": (SGLang, "0.5.23")}
main = Experiment(
    "manager.csv",
    rows,
    {
        "--peer": option(choices=list(PEERS), required=True),
        "--source": option(required=True, help="folder of the peer's unpacked wheel"),
        "--hash": option("sha256"),
        "--lengths": option([1024, 16384, 131072]),
        "--requests": option(0, "timed requests of a length; 0: by length"),
        "--processes": option(5, "processes that measure each length once"),
    },
    ("peer", "hash", "tokens"),
    ("numpy",),
).main
