"""Random requests through vLLM's KVCacheManager, with a log of all its answers."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch

BLOCK = 4


def make_manager(
    num_blocks: int, hybrid: bool = False, block_size: int = BLOCK, heard: bool = True, window: int = 0
) -> Any:
    """Return a manager of one group of full attention, or of a window, and two more of windows if `hybrid`.

    `heard`: whether it makes events.
    """
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    first = SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
    groups = [KVCacheGroupSpec(["a"], first)]
    if hybrid:
        groups += [KVCacheGroupSpec([name], SlidingWindowSpec(**shape, sliding_window=8)) for name in "bc"]
    init_none_hash(sha256)
    config = KVCacheConfig(num_blocks=num_blocks * len(groups), kv_cache_tensors=[], kv_cache_groups=groups)
    return KVCacheManager(
        config,
        max_model_len=1 << 20,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
        enable_caching=True,
        enable_kv_cache_events=heard,
    )


def make_request(
    name: str, tokens: list[int], block_size: int = BLOCK, salt: str | None = None, generate: int = 40, **params: Any
) -> Any:
    """Return a request of vLLM; `params` are `SamplingParams`'s."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.request import Request

    if not hasattr(kv_cache_utils, "NONE_HASH"):  # once, otherwise earlier hashes would no longer be found
        kv_cache_utils.init_none_hash(sha256)
    sampling = SamplingParams(max_tokens=generate, **params)
    hasher = kv_cache_utils.get_request_block_hasher(block_size, sha256)
    return Request(name, tokens, sampling, None, block_hasher=hasher, cache_salt=salt)


def scheduled(
    counts: dict[str, int], new: Any = (), cached: Any = (), resumed: Any = (), finished: Any = (), sync: bool = False
) -> Any:
    """Return a scheduler output of vLLM: `(name, first position, blocks)` of new and of running requests."""
    names = [name for name, _, _ in cached]
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        finished_req_ids=set(finished),
        has_sync_kv_loads=sync,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=at, block_ids=([*blocks],)) for name, at, blocks in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=names,
            resumed_req_ids=set(resumed),
            new_block_ids=[None if blocks is None else ([*blocks],) for _, _, blocks in cached],
            num_computed_tokens=[at for _, at, _ in cached],
        ),
    )


def contents_of(pool: Any) -> list[Any]:
    """Return the blocks of each hash in the pool's table, and the hashes and prefix lengths that the blocks have."""
    found = {
        key: sorted(blocks) if isinstance(blocks, dict) else [blocks.block_id]
        for key, blocks in pool.cached_block_hash_to_block._cache.items()
    }
    own = [(b.block_id, b.block_hash, b.block_hash_num_tokens) for b in pool.blocks if b.block_hash is not None]
    return [sorted(found.items()), own]


def run_traffic(manager: Any, seed: int, steps: int = 300) -> tuple[list[Any], int]:
    """Run requests that share prefixes, are computed in chunks, decode, are preempted and end.

    Returns:
        Every answer in order (hits, block numbers, events or else contents, free blocks), and the number of hit tokens.
    """
    rng = random.Random(seed)
    roots = [[rng.randrange(100) for _ in range(80)] for _ in range(4)]
    live: list[Any] = []
    log: list[Any] = []
    hits = 0
    for step in range(steps):
        getattr(manager, "new_step_starts", lambda: None)()
        act = rng.random()
        if act < 0.45 and len(live) < 5:
            tail = [rng.randrange(100) for _ in range(rng.randrange(0, 8))]
            request = make_request(f"r{step}", rng.choice(roots)[: rng.randrange(1, 60)] + tail)
            blocks, hit = manager.get_computed_blocks(request)[:2]
            chunk = max(1, min(request.num_tokens - hit, rng.choice([4, 8, 64])))
            got = manager.allocate_slots(request, chunk, hit, blocks)
            log.append((hit, None if got is None else manager.get_block_ids(request.request_id)))
            if got is not None:
                request.num_computed_tokens = hit + chunk
                live.append(request)
                hits += hit
        elif act < 0.85 and live:
            request = rng.choice(live)
            left = request.num_tokens - request.num_computed_tokens
            if left == 0:
                request.append_output_token_ids(rng.randrange(100))
                left = 1
            chunk = min(left, rng.choice([4, 8, 64]))
            got = manager.allocate_slots(request, chunk)
            log.append(None if got is None else manager.get_block_ids(request.request_id))
            if got is None:
                manager.free(request)
                live.remove(request)
            else:
                request.num_computed_tokens += chunk
        elif live:
            manager.free(live.pop(rng.randrange(len(live))))
        if rng.random() < 0.02:
            manager.block_pool.evict_blocks(set(rng.sample(range(1, manager.block_pool.num_gpu_blocks), 5)))
        pool = manager.block_pool
        heard = manager.take_events() if pool.enable_kv_cache_events else contents_of(pool)
        log.append((repr(heard), pool.get_num_free_blocks()))
        if not live and rng.random() < 0.3:
            log.append(manager.reset_prefix_cache())
    return log, hits
