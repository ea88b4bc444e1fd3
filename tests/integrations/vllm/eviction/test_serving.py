"""The benchmark with vLLM's server sends the same each time, and predicts hits for what it sent."""

from __future__ import annotations

import random

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vllm is not installed: make vllm")

from benchmarks.engines import vllm_scheduler as scheduler
from benchmarks.engines import vllm_serving as serving
from benchmarks.engines.replay import last
from pc.cache.replay import Trace
from pc.cache.replay.traces import continued

WORDS = list(range(1000, 9000))


def sent_in_turns(scripts):
    """Return what clients send in turns, if every answer is the same token."""
    said, sent = {}, []
    for asks in zip(*scripts, strict=True):
        for ask in asks:
            prompt = said.pop(ask.conversation, []) + ask.tokens
            sent.append(serving.Sent(len(sent), prompt, [7] * serving.OUTPUT, ask.goes_on, 0.0))
            said[ask.conversation] = prompt + sent[-1].answer
    return sent


def test_clients_send_the_same_each_time_and_know_whether_they_come_back():
    scripts = serving.make_chats(3, 16, 24, WORDS)
    assert scripts == serving.make_chats(3, 16, 24, WORDS) != serving.make_chats(4, 16, 24, WORDS)
    for script in scripts:
        asks = list(script)
        for at, ask in enumerate(asks):
            later = any(other.conversation == ask.conversation for other in asks[at + 1 :])
            assert later <= (ask.goes_on > 0), "comes back, and has said it would not"
    told = [ask.goes_on > 0 for script in scripts for ask in list(script)[:12]]
    assert 0.3 < np.mean(told) < 0.7


def test_requests_of_a_trace_share_what_their_blocks_share():
    trace = Trace("t", 512, [np.array(ids) for ids in ([1, 2], [1, 3], [1, 2, 4])], [1] * 3, [0.0] * 3)
    first, second, third = serving.make_traced(trace, 32, 1900, WORDS)
    assert [len(ask.tokens) for ask in (first, second, third)] == [65, 65, 97]
    assert first.tokens[:32] == second.tokens[:32]
    assert first.tokens[32:64] != second.tokens[32:64]
    assert third.tokens[:64] == first.tokens[:64]
    assert [ask.goes_on for ask in (first, second, third)] == [float(each) for each in continued(trace)]


def test_what_is_predicted_is_counted_in_tokens_of_the_prompts():
    prompt = random.Random(0).choices(WORDS, k=70)
    sent = [serving.Sent(n, prompt, [7] * 4, 1.0, 0.0) for n in range(3)]
    for hinted in (False, True):
        assert serving.predict(sent, "hazard", hinted, 96, 32) == pytest.approx(2 * 64 / (3 * 70))
    assert serving.predict(sent, "vllm", False, 2, 32) == pytest.approx(2 * 32 / (3 * 70))


def test_hits_follow_what_clients_know():
    sent = sent_in_turns(serving.make_chats(0, 16, 24, WORDS))
    lru, default, told, most = (
        serving.predict(sent, policy, hinted, 96, 32)
        for policy, hinted in (("vllm", False), ("hazard", False), ("hazard", True), ("belady", False))
    )
    assert lru <= default < told <= most


def test_a_pool_smaller_than_a_request_is_refused():
    """A former fault: such a pool waited forever."""
    trace = Trace("t", 512, [np.arange(9)], [20], [0.0])
    with pytest.raises(ValueError, match="capacity: got 6 blocks of vLLM, needs more than the 11 of one request"):
        last(scheduler.passing(trace, None, 4, 1, 1, 20))
    assert last(scheduler.passing(trace, None, 10, 1, 1, 20)).hit_rate == 0
