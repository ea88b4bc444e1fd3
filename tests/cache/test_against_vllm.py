"""The same requests through vLLM's KVCacheManager, where it is installed: the same hits under lru."""

from __future__ import annotations

import numpy as np
import pytest

import pc

BLOCK = 16


@pytest.fixture(scope="module")
def vllm():
    pytest.importorskip("vllm")
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    class Manager:
        def __init__(self, num_blocks):
            import torch

            spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
            groups = [KVCacheGroupSpec(["layer"], spec)]
            config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
            self.manager = KVCacheManager(
                config, max_model_len=1 << 20, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True
            )
            init_none_hash(sha256)
            self.hasher = get_request_block_hasher(BLOCK, sha256)
            self.live = {}

        def start(self, i, tokens):
            request = Request(
                request_id=str(i),
                prompt_token_ids=tokens,
                sampling_params=SamplingParams(max_tokens=4),
                pooling_params=None,
                block_hasher=self.hasher,
            )
            blocks, hits, _ = self.manager.get_computed_blocks(request)
            if self.manager.allocate_slots(request, len(tokens) - hits, hits, blocks) is None:
                return None
            request.num_computed_tokens = len(tokens)
            self.live[i] = request
            return hits

        def end(self, i):
            self.manager.free(self.live.pop(i))

    return Manager


@pytest.mark.parametrize("seed", range(4))
def test_same_hits_on_the_same_requests(vllm, seed):
    """Prompts end one token past a block: there vLLM and pc agree on how much of a whole hit counts."""
    rng = np.random.default_rng(seed)
    num_blocks = 40
    theirs = vllm(num_blocks + 1)  # one is its null block
    ours = pc.CacheManager(num_blocks, BLOCK, policy="lru")
    roots = [rng.integers(0, 1000, 8 * BLOCK).tolist() for _ in range(6)]
    running = []
    hits = 0
    for i in range(600):
        root = roots[int(rng.integers(0, 6))][: BLOCK * int(rng.integers(0, 9))]
        tokens = [*root, *rng.integers(0, 1000, BLOCK * int(rng.integers(0, 3))).tolist(), 5]
        expected = theirs.start(i, tokens)
        if expected is None:
            with pytest.raises(pc.OutOfBlocks):
                ours.allocate(i, tokens)
        else:
            got = ours.allocate(i, tokens).num_cached_tokens
            assert got == expected, i
            ours.commit(i, len(tokens))
            running.append(i)
            hits += got
        while len(running) > 3 or (running and rng.random() < 0.2):
            done = running.pop(int(rng.integers(0, len(running))))
            theirs.end(done)
            ours.free(done)
    assert hits > 1000
    ours.check()
