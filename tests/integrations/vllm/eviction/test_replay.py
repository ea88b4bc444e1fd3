"""A request trace in vLLM's scheduler has the same hits as in `pc replay`."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.engines import vllm_replay, vllm_scheduler
from pc.cache.replay import Trace, replay


def make_trace(seed=0, num_requests=600):
    """Return conversations that continue, begin with one of a few system prompts, and stop at some point."""
    rng = random.Random(seed)
    fresh = iter(range(10**9))
    systems = [[next(fresh) for _ in range(rng.randrange(2, 6))] for _ in range(4)]
    talks, requests = [], []
    for _ in range(num_requests):
        if not talks or rng.random() < 0.4:
            talks.append(list(rng.choice(systems)))
        talk = rng.choice(talks[-12:])
        talk += [next(fresh) for _ in range(rng.randrange(1, 6))]
        requests.append(np.array(talk))
    outputs = [rng.randrange(1, 200) for _ in requests]
    return Trace("made", 16, requests, outputs, [float(n) for n in range(num_requests)])


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "s3fifo", "arc", "default"])
@pytest.mark.parametrize("capacity", [60, 250])
def test_hits_are_those_of_pc_replay(policy, capacity):
    trace = make_trace()
    expected = replay(trace, policy, capacity).hit_rate
    assert 0.1 < expected < 0.95
    # The default policy remembers evicted blocks by the size of the pool, which is two blocks larger here. Policies
    # that do not evict a sequence from its end leave gaps, after which vLLM keeps duplicates that pc merges.
    tolerance = {"lru": 0.0, "lfu": 0.0, "default": 0.02}.get(policy, 0.05)
    found = vllm_scheduler.run(trace, policy, capacity).hit_rate
    assert found == pytest.approx(expected, rel=tolerance, abs=0)


@pytest.mark.parametrize("policy", ["pc_lru", "lru", "pc_lfu", "pc_default"])
@pytest.mark.parametrize("capacity", [60, 250])
def test_hits_in_host_memory_are_those_of_pc_replay(policy, capacity):
    pytest.importorskip("vllm", minversion="0.33", reason="needs vLLM 0.33, which takes policies from outside")
    trace = make_trace()
    expected = replay(trace, policy.removeprefix("pc_"), capacity).hit_rate
    # The tier does not know how much a request generated.
    tolerance = 0.03 if policy == "pc_default" else 0.0
    found = vllm_replay.run(trace, policy, capacity).hit_rate
    assert found == pytest.approx(expected, rel=tolerance, abs=1e-12)
