"""Hints computed from a trace's own future."""

from __future__ import annotations

import numpy as np
import pytest

from pc.cache.replay import Trace, hints_of, replay


def chats(count, rng):
    """Conversations of which half end after one turn and half have four more turns, with pauses between."""
    turns = []
    for chat in range(count):
        at = float(rng.uniform(0, count))
        for turn in range(1, 5 if chat % 2 else 2):
            turns.append((at, [*range(1000 * chat, 1000 * chat + 6 * turn), 10**8 + len(turns)]))
            at += float(rng.uniform(20, 60))
    requests = [np.array(ids, np.int64) for _, ids in sorted(turns)]
    return Trace("chats", 16, requests, [50] * len(requests), [0.0] * len(requests))


def test_a_request_goes_on_when_a_later_one_begins_with_it():
    requests = [[1, 2, 3], [7], [1, 2, 4, 5], [7, 8]]
    trace = Trace("t", 16, [np.array(r) for r in requests], [1] * 4, [0.0] * 4)
    assert hints_of(trace, "oracle") == [1.0, 1.0, 0.0, 0.0]


def test_a_noisy_bit_is_right_as_often_as_it_says():
    trace = chats(3000, np.random.default_rng(0))
    truth = np.array(hints_of(trace, "oracle")) == 1
    told = np.array(hints_of(trace, "0.8"))
    yes = told == told.max()
    assert yes[truth].mean() == pytest.approx(0.8, abs=0.03)
    assert yes[~truth].mean() == pytest.approx(0.2, abs=0.03)
    assert truth[yes].mean() == pytest.approx(told.max(), abs=0.03)
    for wrong in ("0.4", "1.5", "nan", "soon"):
        with pytest.raises(ValueError, match="hints: got"):
            hints_of(trace, wrong)


def test_the_better_the_hint_the_more_is_hit():
    trace = chats(200, np.random.default_rng(1))
    rates = [replay(trace, "hazard", 62, hints=hints).hit_rate for hints in ("none", "0.8", "oracle")]
    assert rates[0] < rates[1] < rates[2]
    assert rates[2] <= replay(trace, "belady", 62).hit_rate
    assert replay(trace, "lru", 62, hints="oracle").hit_rate == replay(trace, "lru", 62).hit_rate


def test_hints_of_the_callers_own():
    trace = chats(200, np.random.default_rng(2))
    own = hints_of(trace, "oracle")
    result = replay(trace, "hazard", 75, hints=own)
    assert result.hit_rate == replay(trace, "hazard", 75, hints="oracle").hit_rate
    assert result.hit_rate > replay(trace, "hazard", 75, hints=own[::-1]).hit_rate
    assert result.hints == "given"
    with pytest.raises(ValueError, match=f"hints: got 1, needs one for each of the {len(own)} requests"):
        replay(trace, "hazard", 75, hints=[1.0])
