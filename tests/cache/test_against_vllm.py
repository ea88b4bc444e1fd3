"""With lru, the manager and vLLM's KVCacheManager, if installed, hit the same tokens for the same requests."""

from __future__ import annotations

import numpy as np
import pytest
from vllm_traffic import make_manager, make_request

import pc

pytest.importorskip("vllm", reason="vllm is not installed: make vllm")

BLOCK = 16


class Theirs:
    """vLLM's manager, for requests whose tokens are computed at once."""

    def __init__(self, num_blocks, window=0):
        self.manager = make_manager(num_blocks, block_size=BLOCK, heard=False, window=window)
        self.live = {}

    def start(self, i, tokens):
        return self.admit(i, make_request(str(i), tokens, BLOCK))

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


@pytest.mark.parametrize(("window", "num_blocks"), [(0, 40), (17, 40), (40, 4000)])
@pytest.mark.parametrize("seed", range(3))
def test_same_hits_while_requests_decode_and_are_preempted(seed, window, num_blocks):
    """Requests decode, end when there is no room, and are preempted and come back.

    A wide window under pressure is left out: vLLM keeps blocks that are there twice, pc merges them and has more room.
    """
    rng = np.random.default_rng(seed)
    theirs = Theirs(num_blocks + 1, window)
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
