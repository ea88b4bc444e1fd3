"""The cached blocks of a waiting request stay until it runs, while other blocks can be evicted."""

from __future__ import annotations

import importlib
import random

import pytest
from vllm.v1.request import RequestStatus

from benchmarks.engines import vllm_scheduler

SIZE = vllm_scheduler.BLOCK_SIZE


def make_request(name, blocks, output=1, **params):
    """Return a named prompt of whole blocks, and one more token."""
    hashes = [str(each).encode().rjust(16) for each in blocks]
    return vllm_scheduler.make_request(name, hashes, output, **params)


class Engine:
    """A scheduler, and a model that answers 0."""

    def __init__(self, policy, num_blocks, at_once=1):
        self.scheduler = vllm_scheduler.make_scheduler(policy, num_blocks + 1, at_once)
        self.cached = {}

    def step(self):
        output = self.scheduler.schedule()
        for new in output.scheduled_new_reqs:
            self.cached[new.req_id] = new.num_computed_tokens // SIZE
        self.scheduler.update_from_output(output, vllm_scheduler.answer_to(self.scheduler, output))

    def run(self, *requests):
        for request in requests:
            self.scheduler.add_request(request)
        while self.scheduler.requests:
            self.step()

    @property
    def queue(self):
        return self.scheduler.block_pool.free_block_queue

    def check(self):
        queue = self.queue
        apart = [*queue._chosen, *queue._kept]
        assert len(set(apart)) == len(apart)
        assert all(queue._blocks[each].ref_cnt == 0 for each in apart)
        free = sum(block.ref_cnt == 0 and not block.is_null for block in queue._blocks)
        assert queue.num_free_blocks == free
        self.scheduler.block_pool.policy_state.flush()
        self.scheduler.block_pool.policy_state.policy.check()


def named(prefix, count):
    return [f"{prefix}{n}" for n in range(count)]


@pytest.mark.parametrize("policy", ["default", "fifo", "lfu"])
@pytest.mark.parametrize("looked_at", [True, False])
def test_what_is_waited_for_stays(policy, looked_at):
    """`a` was answered first, so it would be evicted first.

    Its next round waits while another request fills the pool.
    """
    engine = Engine(policy, num_blocks=24)
    if not looked_at:
        engine.queue.waiting = None
    engine.run(make_request("a", named("a", 6)))
    engine.run(make_request("b", named("b", 6)))
    engine.run(make_request("c", named("c", 12)), make_request("a again", named("a", 8)))
    assert (engine.cached["a again"] == 6) == looked_at
    engine.check()


def test_lru_is_as_vllm_has_it():
    engine = Engine("lru", num_blocks=24)
    assert engine.queue.waiting is None
    engine.run(make_request("a", named("a", 6)))
    engine.run(make_request("b", named("b", 6)))
    engine.run(make_request("c", named("c", 12)), make_request("a again", named("a", 8)))
    assert engine.cached["a again"] < 6


def test_awaited_blocks_are_evicted_before_a_request_starves():
    engine = Engine("fifo", num_blocks=13)
    engine.run(make_request("a", named("a", 11)))
    engine.run(make_request("b", named("b", 12)), make_request("a again", named("a", 11)))
    assert engine.cached == {"a": 0, "b": 0, "a again": 0}
    engine.check()


@pytest.mark.parametrize("left_by", ["abort", "flag"])
def test_what_nobody_waits_for_any_more_goes(left_by, monkeypatch):
    queue_module = importlib.import_module("pc.integrations.vllm.eviction.queue")
    monkeypatch.setattr(queue_module, "LEFT", 1)
    engine = Engine("fifo", num_blocks=24)
    engine.run(make_request("a", named("a", 6)))
    engine.run(make_request("b", named("b", 6)))
    engine.scheduler.add_request(make_request("c", named("c", 12)))
    flag = {"skip_reading_prefix_cache": True} if left_by == "flag" else {}
    engine.scheduler.add_request(make_request("a again", named("a", 8), **flag))
    engine.step()
    if left_by == "abort":
        assert engine.queue._kept
        engine.scheduler.finish_requests("a again", RequestStatus.FINISHED_ABORTED)
    else:
        assert not engine.queue._kept
    engine.run(make_request("d", named("d", 10)))
    assert not engine.queue._kept
    engine.check()
    engine.run(make_request("a third", named("a", 8)))
    assert left_by == "flag" or engine.cached["a third"] < 6  # a request without hits computes them


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("policy", ["default", "priority", "arc"])
def test_blocks_are_conserved_under_a_deep_queue(policy, ahead, monkeypatch):
    """Four conversations run at once in rounds, and many wait or are aborted: no block is lost or used twice."""
    queue_module = importlib.import_module("pc.integrations.vllm.eviction.queue")
    if ahead:
        monkeypatch.setattr(queue_module, "AHEAD_FROM", 0)
        monkeypatch.setattr(queue_module, "AHEAD", 6)
    monkeypatch.setattr(importlib.import_module("pc.integrations.vllm.eviction.waiting"), "MOST", 6)
    kept = 0
    for seed in range(3):
        rng = random.Random(seed)
        engine = Engine(policy, num_blocks=60, at_once=4)
        for number in range(120):
            document = rng.randrange(8)
            blocks = named(f"{document}.", rng.randint(2, 12))
            engine.scheduler.add_request(make_request(str(number), blocks, output=rng.randint(1, 20)))
            while len(engine.scheduler.requests) > 12:
                engine.step()
                kept += len(engine.queue._kept)
                engine.check()
            if rng.random() < 0.1:
                name = rng.choice(list(engine.scheduler.requests))
                engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            if rng.random() < 0.03 and engine.scheduler.reset_prefix_cache(reset_running_requests=True):
                engine.check()
        engine.run()
        engine.check()
    assert kept > 100
