"""The benchmark with vLLM's server sends the same each time; the one without a model refuses too small a pool."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.engines import vllm_scheduler as scheduler
from benchmarks.engines import vllm_serving as serving
from pc.cache.replay import Trace

WORDS = list(range(1000, 9000))


def test_clients_send_the_same_each_time_and_know_whether_they_come_back():
    scripts = serving.make_chats(3, 16, 24, WORDS)
    assert scripts == serving.make_chats(3, 16, 24, WORDS) != serving.make_chats(4, 16, 24, WORDS)
    for script in scripts:
        for at, ask in enumerate(script):
            later = any(other.conversation == ask.conversation for other in script[at + 1 :])
            assert later <= ask.continues, "comes back, and has said it would not"
    told = [ask.continues for script in scripts for ask in script[:12]]
    assert 0.3 < np.mean(told) < 0.7


def test_a_row_is_beside_the_first_way():
    rounds = {
        way: [dict.fromkeys(serving.RATIOS, value) | {"right": 3} for value in values]
        for way, values in {"1": [2.0, 4.0, 8.0], "0.5": [1.0, 1.0, 8.0]}.items()
    }
    work = serving.Workload([], 4, {}, {}, {}, "budget", "exact", shape={"clients": 2})
    row = serving.make_row(work, "0.5", rounds)
    assert (row["budget"], row["rounds"], row["seconds"], row["right"], row["clients"]) == ("0.5", 3, 1, 3, 2)
    assert row["seconds_over_exact"] == "0.500"


def test_a_pool_smaller_than_a_request_is_refused():
    """A former fault: such a pool waited forever."""
    trace = Trace("t", 512, [np.arange(9)], [20], [0.0])
    with pytest.raises(ValueError, match="capacity: got 6 blocks of vLLM, needs more than the 11 of one request"):
        scheduler.run(trace, None, 4, longest=20)
    assert scheduler.run(trace, None, 10, longest=20).hit_rate == 0
