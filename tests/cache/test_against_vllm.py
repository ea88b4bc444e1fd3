"""With lru, the manager and vLLM's KVCacheManager, if installed, hit the same tokens for the same requests."""

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
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.request import Request

    class Manager:
        def __init__(self, num_blocks, window=0):
            import torch

            shape = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
            spec = SlidingWindowSpec(**shape, sliding_window=window) if window else FullAttentionSpec(**shape)
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
            return self.admit(i, request)

        def admit(self, i, request):
            blocks, hits, _ = self.manager.get_computed_blocks(request)
            if self.manager.allocate_slots(request, request.num_tokens - hits, hits, blocks) is None:
                return None
            self.live[i] = request
            self.computed(request)
            return hits

        def computed(self, request):
            """Do what the scheduler does after a step. Otherwise vLLM releases blocks behind a window a step later."""
            request.num_computed_tokens = request.num_tokens
            self.manager.coordinator.remove_skipped_blocks(request.request_id, request.num_tokens)

        def decode(self, i, token):
            request = self.live[i]
            request.append_output_token_ids(token)
            if self.manager.allocate_slots(request, 1) is None:
                return False
            self.computed(request)
            return True

        def preempt(self, i):
            request = self.live.pop(i)
            self.manager.free(request)
            request.num_computed_tokens = 0
            return request

        def end(self, i):
            self.manager.free(self.live.pop(i))

    return Manager


@pytest.mark.parametrize("seed", range(4))
def test_same_hits_on_the_same_requests(vllm, seed):
    """Prompts end one token after a block, because vLLM and pc count a hit of a whole prompt differently."""
    rng = np.random.default_rng(seed)
    num_blocks = 40
    theirs = vllm(num_blocks + 1)  # one is vLLM's null block
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


@pytest.mark.parametrize(("window", "num_blocks"), [(0, 40), (17, 40), (40, 4000)])
@pytest.mark.parametrize("seed", range(3))
def test_same_hits_while_requests_decode_and_are_preempted(vllm, seed, window, num_blocks):
    """Requests decode, end when there is no room, and are preempted and come back.

    A wide window under pressure is left out: vLLM keeps blocks that are there twice, pc merges them and has more room.
    """
    rng = np.random.default_rng(seed)
    theirs = vllm(num_blocks + 1, window)
    groups = [pc.SlidingWindow(window=window)] if window else None
    ours = pc.CacheManager(num_blocks, BLOCK, policy="lru", groups=groups)
    roots = [rng.integers(0, 1000, 8 * BLOCK).tolist() for _ in range(5)]
    running, waiting = {}, {}
    hits = resumed = 0

    def preempt(i):
        waiting[i] = theirs.preempt(i), running.pop(i)
        ours.preempt(i)

    for i in range(400):
        root = roots[int(rng.integers(0, 5))][: BLOCK * int(rng.integers(0, 9))]
        tokens = [*root, *rng.integers(0, 1000, BLOCK * int(rng.integers(0, 3))).tolist(), 5]
        expected = theirs.start(i, tokens)
        if expected is None:
            with pytest.raises(pc.OutOfBlocks):
                ours.allocate(i, tokens)
        else:
            assert ours.allocate(i, tokens).num_cached_tokens == expected, i
            ours.commit(i, len(tokens))
            running[i] = len(tokens)
            hits += expected
        for _ in range(int(rng.integers(0, 12))):
            for j in list(running):
                token = int(rng.integers(1000, 1 << 30))
                if theirs.decode(j, token):
                    ours.append(j, [token])
                    running[j] += 1
                    ours.commit(j, running[j])
                else:
                    with pytest.raises(pc.OutOfBlocks):
                        ours.append(j, [token])
                    theirs.end(j)
                    ours.free(j)
                    del running[j]
        # Where a prompt ends with a block, vLLM computes that block again and pc its last token: not compared.
        for j in [j for j in running if running[j] % BLOCK and rng.random() < 0.2]:
            preempt(j)
        for j in list(waiting):
            request, length = waiting[j]
            expected = theirs.admit(j, request)
            if expected is None:
                with pytest.raises(pc.OutOfBlocks):
                    ours.resume(j)
                continue
            assert ours.resume(j).num_cached_tokens == expected, j
            ours.commit(j, length)
            running[j] = length
            del waiting[j]
            resumed += expected > 0
        while len(running) > 3 or (running and rng.random() < 0.2):
            done = list(running)[int(rng.integers(0, len(running)))]
            theirs.end(done)
            ours.free(done)
            del running[done]
        ours.check()
    assert hits > 1000
    assert resumed > 10
