"""CacheManager against the managers of vLLM and SGLang, alternating in one process, on equal requests.

Run with the peer's own Python (see benchmarks/install_peers.sh and `make bench-manager`):

    python -m benchmarks manager --peer vllm --source .peers/vllm-src --hash sha256
    python -m benchmarks manager --peer sglang --source .peers/sglang-src --hash xxh3_128

A request is a new list of tokens; three quarters of it are one of four shared prefixes. Blocks have 16 tokens, five
requests run at once, and both managers use lru. The times are CPU time of the thread for hash, lookup, allocate, commit
and free. SGLang's slot allocator is timed apart (column peer_alloc_us) and not counted, although ours allocates too.
The placement of a process's memory changes a time by up to a third. So a row is the median of several processes.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.abc
import importlib.machinery
import json
import logging
import os
import platform
import random
import statistics
import subprocess
import sys
import types
from array import array
from pathlib import Path
from time import thread_time_ns as clock
from typing import Any
from unittest.mock import MagicMock

from ..harness.tables import read_rows, write_rows

BLOCK = 16
CONCURRENT = 4


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
    """Medians in microseconds of start plus end, and the part of the peer that is not counted."""
    num_blocks = max(4096, (length // BLOCK + 2) * 12)
    contestants = {"pc": Ours(num_blocks, algorithm), "peer": peer(num_blocks, algorithm)}
    rng = random.Random(0)
    shared = length * 3 // 4 // BLOCK * BLOCK
    prefixes = [[rng.randrange(150_000) for _ in range(shared)] for _ in range(4)]
    times: dict[str, list[int]] = {"pc": [], "peer": [], "apart": []}
    warmup = 12
    gc.collect()
    gc.freeze()
    for i in range(requests + warmup):
        prompt = prefixes[i % 4] + [rng.randrange(150_000) for _ in range(length - shared)]
        names = ["pc", "peer"] if i % 2 else ["peer", "pc"]
        for name in names:
            tokens = list(prompt)
            one = contestants[name]
            t0 = clock()
            one.start(i, tokens)
            if i >= CONCURRENT:
                one.end(i - CONCURRENT)
            spent, apart = clock() - t0, one.apart
            if i >= warmup:
                times[name].append(spent - apart)
                if name == "peer":
                    times["apart"].append(apart)
    gc.unfreeze()
    return {name: statistics.median(values) / 1e3 for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", choices=["vllm", "sglang"], required=True)
    parser.add_argument("--source", required=True, help="folder of the peer's unpacked wheel")
    parser.add_argument("--hash", default="sha256")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 16384, 131072])
    parser.add_argument("--requests", type=int, default=0, help="timed requests a length; 0: by length")
    parser.add_argument("--processes", type=int, default=5, help="measure so often, each time in a process of its own")
    parser.add_argument("--csv", type=Path, help="append rows here")
    args = parser.parse_args()
    if args.processes > 1:
        for length in args.lengths:
            rows = [_in_a_process(args, length) for _ in range(args.processes)]
            rows.sort(key=lambda row: row["pc_over_peer"])
            row = rows[len(rows) // 2] | {"processes": args.processes}
            print("  ".join(f"{k}={v}" for k, v in list(row.items())[:10]), flush=True)
            print("  of", ", ".join(str(r["pc_over_peer"]) for r in rows), flush=True)
            if args.csv:
                write_rows(args.csv, [*read_rows(args.csv), row])
        return
    sys.path.insert(0, args.source)
    os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    logging.disable(logging.WARNING)
    if args.peer == "sglang":
        sys.meta_path.insert(0, _Absent("torchvision"))
    import numpy
    import torch

    from ..harness.conditions import commit

    torch.set_num_threads(1)
    for length in args.lengths:
        requests = args.requests or max(40, min(400, 4_000_000 // length))
        got = compare({"vllm": VLLM, "sglang": SGLang}[args.peer], length, args.hash, requests)
        row = {
            "peer": {"vllm": "vllm 0.33.0", "sglang": "sglang 0.5.23"}[args.peer],
            "hash": args.hash,
            "tokens": length,
            "block_size": BLOCK,
            "shared": 0.75,
            "requests": requests,
            "pc_us": round(got["pc"], 1),
            "peer_us": round(got["peer"], 1),
            "peer_alloc_us": round(got["apart"], 1),
            "pc_over_peer": round(got["pc"] / got["peer"], 4),
            "cores": os.cpu_count(),
            "cpu": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "numpy": numpy.__version__,
            "commit": commit(),
            "date": datetime.date.today().isoformat(),
        }
        print(json.dumps(row), flush=True)


def _in_a_process(args: argparse.Namespace, length: int) -> dict[str, Any]:
    """One length, measured once."""
    command = [sys.executable, "-m", "benchmarks", "manager", "--peer", args.peer, "--source", args.source]
    command += ["--hash", args.hash, "--lengths", str(length), "--requests", str(args.requests), "--processes", "1"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages the peer imports at the top but does not use here."""

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
