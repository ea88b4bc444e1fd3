"""vLLM's priority scheduling, which preempts requests that it has already scheduled in the same step."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm_exact import BLOCK, ExactEngine, following, prompt
from vllm_traffic import make_request


def arrivals(rng: random.Random) -> Iterator[list[tuple[int, int, int]]]:
    """Yield what arrives before each step: lengths of prompt and answer, and the priority; 0 is the most urgent."""
    yield [(rng.randrange(300, 450), 5, 1 + i) for i in range(3)]
    yield []
    yield [(rng.randrange(16, 60), rng.randrange(20, 60), 0) for _ in range(6)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_blocks_of_a_step_that_never_ran_are_not_found(asynchronous: bool) -> None:
    """Such blocks had a hash, so the preempted request read KV there that nobody had written."""
    preempted = 0
    for seed in range(60):
        rng = random.Random(seed)
        engine = ExactEngine(rng.randrange(36, 90), asynchronous=asynchronous, budget=160, at_once=16)
        scheduler, asked = engine.scheduler, {}
        scheduler.policy = SchedulingPolicy.PRIORITY
        scheduler.scheduler_config.long_prefill_token_threshold = 48
        scheduler.waiting, scheduler.skipped_waiting = (create_request_queue(scheduler.policy) for _ in range(2))
        for arriving in arrivals(rng):
            for length, count, priority in arriving:
                name, tokens = f"r{len(asked)}", prompt(length, rng.randrange(1 << 30))
                request = make_request(name, tokens, BLOCK, None, count, ignore_eos=True)
                request.priority, engine.said[name] = priority, []
                scheduler.add_request(request)
                asked[name] = tokens, count, request
            engine.step()
        while scheduler.requests:
            engine.step()
        for tokens, count, request in asked.values():
            assert list(request.output_token_ids) == following(tokens, count)
            preempted += request.num_preemptions
    assert preempted > 50
