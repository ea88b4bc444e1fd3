"""A request trace through SGLang's radix cache without a model: hit rates, and CPU time with each policy.

The benchmark makes the calls that SGLang's scheduler makes for a request: match, lock, allocate pages, insert after the
prompt and at the end, release. Hit rates are measured with single requests, CPU time with several. SGLang's lru, with
its cores of the tree in Rust and in Python, and our policies alternate in one process.

Examples:
    PYTHONPATH=tests/support/sglang_site .peers/sglang-cpu/bin/python -m benchmarks sglang_radix TRACE
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from time import process_time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pc.cache.replay import Trace

from ..harness.timing import frozen
from .replay import Engine, Run

PAGE = 16


def make_cache(policy: str, core: str, num_pages: int, at_once: int, longest: int) -> Any:
    """Return SGLang's radix cache over its own paged allocator, with its own policy on a core, or with ours."""
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    allocator = PagedTokenToKVPoolAllocator(num_pages * PAGE, PAGE, torch.float16, "cpu", None, False)
    params = init_params(policy, core, allocator, ReqToTokenPool(at_once, longest, "cpu", False))
    if core != "pc":
        return UnifiedRadixCache(params)
    from pc.integrations.sglang import enable
    from pc.integrations.sglang.eviction import PolicyRadixCache

    enable("eviction")
    return PolicyRadixCache(params)


def init_params(policy: str, core: str | None, allocator: Any, table: Any) -> Any:
    """Return the arguments of SGLang's radix cache, for a model with full attention only."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    return CacheInitParams(
        disable=False,
        req_to_token_pool=table,
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE,
        eviction_policy=policy,
        tree_components=(ComponentType.FULL,),
        tree_core_backend=core,
    )


class Request:
    """The attributes of a request that SGLang's cache reads."""

    def __init__(self, number: int, prompt: np.ndarray, output: np.ndarray, row: int) -> None:
        self.rid, self.row, self.done = str(number), row, False
        self.fill_ids = array("q", prompt.tobytes())
        self.origin_input_ids = self.fill_ids
        self.output_ids = output.tolist()
        self.kv = SimpleNamespace(req_pool_idx=row, cache_protected_len=0, cache_inserted_len=0)
        self.priority = self.session_id = self.kv_rotation_base = self.extra_key = self.cache_salt = None
        self.lock = self.last_node = self.kv_hints = self.session = None

    @property
    def full_untruncated_fill_ids(self) -> Any:
        """Return the tokens that have KV."""
        return self.fill_ids

    def finished(self) -> bool:
        """Return whether the request has its last token."""
        return self.done


def admit(cache: Any, request: Request) -> int:
    """Lock a prompt's cached prefix, allocate pages for the rest, and return the number of cached tokens."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    # One token is always computed, for its logits.
    key = RadixKey(request.fill_ids, None, limit=len(request.fill_ids) - 1)
    found = cache.match_prefix(MatchPrefixParams(key=key))
    request.lock = cache.lock(found.last_device_node)
    request.last_node = found.last_device_node
    hit, table = found.device_prefix_len, cache.req_to_token_pool.req_to_token
    if hit:
        table[request.row, :hit] = cache.path_device_indices(found.last_device_node).to(torch.int32)
    request.kv.cache_protected_len = request.kv.cache_inserted_len = hit
    grow(cache, request, hit)
    return hit


def grow(cache: Any, request: Request, begin: int) -> None:
    """Allocate pages for the request's tokens from `begin` on, which is the start of a page."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    allocator = cache.token_to_kv_pool_allocator
    need = -(-len(request.fill_ids) // PAGE) * PAGE - begin
    if need <= 0:
        return
    short = need - allocator.available_size()
    if short > 0:
        cache.evict_for_alloc(EvictParams(num_tokens=short))
    slots = allocator.alloc(need)
    assert slots is not None, (need, allocator.available_size())
    cache.req_to_token_pool.req_to_token[request.row, begin : begin + need] = slots.to(torch.int32)


def compute(cache: Any, request: Request) -> None:
    """Insert the request's tokens, which have been computed, into the tree."""
    cache.checkpoint(request, up_to=len(request.fill_ids))


def finish(cache: Any, request: Request) -> None:
    """Insert a finished request into the tree, and free the slots that the tree does not keep."""
    held = -(-len(request.fill_ids) // PAGE) * PAGE
    request.fill_ids = request.fill_ids + array("q", request.output_ids[:-1])
    grow(cache, request, held)
    request.done = True
    compute(cache, request)
    slots = cache.req_to_token_pool.req_to_token[request.row]
    end = -(-len(request.fill_ids) // PAGE) * PAGE
    tail = slots[request.kv.cache_protected_len : end].to(torch.int64)
    if len(tail):
        cache.token_to_kv_pool_allocator.free_segment(tail, start_pos=request.kv.cache_protected_len)
    cache.unlock(request.lock)
    request.lock = None
    cache.on_release(request, checkpointed=True)


def run(trace: Trace, way: tuple[str, str], capacity: int, split: int = 1, at_once: int = 1, longest: int = 1) -> Run:
    """Run a trace to its end.

    Args:
        trace: The requests; each block is `split` pages.
        way: A value of `--radix-eviction-policy`, and the core of the tree: `rust`, `python`, or ours, `pc`.
        capacity: Blocks of the pool, without two for requests that run.
        split: Pages of a block.
        at_once: Requests that run together.
        longest: Tokens that a request generates at most.
    """
    most = max(len(ids) for ids in trace.requests) * split * PAGE + longest + 2 * PAGE
    cache = make_cache(*way, (capacity + 2) * split, at_once, most)
    running: list[Request] = []
    hits, seconds, own = 0, 0.0, 1 << 40
    with frozen():
        for number, (ids, output) in enumerate(zip(trace.requests, trace.outputs, strict=True)):
            first = (np.asarray(ids[: capacity + 1], np.int64)[:, None] * split + np.arange(split)).reshape(-1) * PAGE
            prompt = np.append((first[:, None] + np.arange(PAGE)).reshape(-1), own)
            answer = own + 1 + np.arange(max(1, min(output, longest)))
            own += 2 + len(answer)
            request = Request(number, prompt, answer, 1 + number % at_once)
            begun = process_time()
            if len(running) == at_once:
                finish(cache, running.pop(0))
            hits += admit(cache, request)
            compute(cache, request)
            seconds += process_time() - begun
            running.append(request)
        begun = process_time()
        for request in running:
            finish(cache, request)
        seconds += process_time() - begun
    return Run(hits / PAGE / split / max(trace.num_blocks, 1), len(trace.requests), seconds)


def ways(policies: Sequence[str]) -> dict[tuple[str, str], dict[str, str]]:
    """Return SGLang's lru on each core and our policies, with their columns."""
    found = [("lru", "rust"), ("lru", "python"), *((f"pc_{name}", "pc") for name in policies or ("default",))]
    return {way: {"policy": way[0], "core": way[1]} for way in found}


BASES = {"rust": ("lru", "rust"), "python": ("lru", "python")}
main = Engine(run, ways, BASES, at_once=4).experiment("sglang_radix.csv", __doc__).main
