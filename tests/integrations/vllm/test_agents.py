"""The benchmark of agents' traffic with vLLM's server: what it compares, tested without a server."""

from __future__ import annotations

import math

import pytest

from benchmarks.engines.vllm_agents import Answer, Request, divergence, make_row


def logprobs(**shares):
    return {token: math.log(share) for token, share in shares.items()}


def test_divergence_is_over_named_tokens_and_the_rest():
    exact, other = logprobs(a=0.5, b=0.25), logprobs(a=0.25, c=0.25)
    assert divergence(exact, exact) == 0
    assert divergence(exact, other) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))
    assert divergence(logprobs(a=1.0), logprobs(a=1.0)) == 0


def test_a_row_is_beside_vllm_and_beside_computing_all():
    requests = [Request(0, [1] * 10), Request(1, [1] * 30)]
    sure, unsure = logprobs(a=0.9, b=0.1), logprobs(b=0.9, a=0.1)
    unsure = dict(sorted(unsure.items(), key=lambda each: -each[1]))
    answers = {
        "all": [Answer(4.0, 0, sure), Answer(4.0, 0, sure)],
        "vllm": [Answer(2.0, 0, sure), Answer(2.0, 10, sure)],
        "anywhere": [Answer(1.0, 0, unsure), Answer(1.0, 20, sure)],
    }
    row = make_row("anywhere", requests, answers)
    assert (row["prompt_tokens"], row["computed_tokens"], row["hit_rate"]) == ("40", "20", "0.5000")
    assert row["ttft_p50_over_vllm"] == "0.500"
    assert (row["kl"], row["first_equal"]) == ("0", "1.000"), "the first prompt of a session has nothing to lose"
    del answers["all"]
    assert make_row("anywhere", requests, answers)["kl"] == ""
