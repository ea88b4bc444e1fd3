"""A prefix that a batch shares is counted on the host and read once in vLLM's engine; tokens do not change."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import vllm_engine

from pc.integrations.vllm.attention.builder import count_shared_blocks
from pc.triton_ops import shared_prefix_attention

ROOM = {"max_model_len": 512, "max_num_seqs": 12, "max_num_batched_tokens": 512}


def table(shared, rows=9, width=40):
    """Return tables of requests with the same first blocks and different later ones."""
    made = np.arange(1000, 1000 + rows * width, dtype=np.int32).reshape(rows, width)
    made[:, :shared] = np.arange(1, shared + 1)
    return made


def computed(tokens, rows=9):
    return np.full(rows, tokens, np.int32)


@pytest.mark.parametrize("shared", [0, 1, 15, 16, 17, 39])
def test_blocks_that_all_share_are_counted(shared):
    assert count_shared_blocks(table(shared), computed(639), 16) == (shared if shared >= 16 else 0)


def test_what_one_request_lacks_is_not_shared():
    tables = table(30)
    tables[4, 20] = 999
    assert count_shared_blocks(tables, computed(600), 16) == 20
    tables[4, 3] = 999
    assert count_shared_blocks(tables, computed(600), 16) < 16
    tokens = computed(600)
    tokens[2] = 335
    assert count_shared_blocks(table(30), tokens, 16) == 20, "a block of which one is computing tokens"
    holes = table(30)
    holes[:, 25] = 0
    assert count_shared_blocks(holes, computed(600), 16) == 25, "vLLM's null block is no content"


def test_few_requests_share_nothing():
    assert count_shared_blocks(table(30, rows=7), computed(600, rows=7), 16) == 0
    assert count_shared_blocks(table(30, rows=8), computed(600, rows=8), 16) == 30


def prompts(shared, count):
    first, *others = vllm_engine.random_prompts(1, shared, *range(5, 5 + count))
    return [first + other for other in others]


def run(path, ours, asked):
    """Return the tokens of the prompts, after the first is cached, and how often a prefix was read once."""
    with (
        mock.patch(
            "pc.integrations.vllm.attention.backend.shared_prefix_attention", wraps=shared_prefix_attention
        ) as spy,
        vllm_engine.engine(path, ["attention"] if ours else [], **ROOM) as (llm, seen),
    ):
        vllm_engine.generate(llm, asked[:1])
        tokens, cached = vllm_engine.generate(llm, asked)
    return tokens, cached, [call.args[6] for call in spy.call_args_list], seen


def test_the_engine_reads_a_common_prefix_once(model_path):
    path, asked = model_path("llama"), prompts(290, 10)
    expected, _, calls, seen = run(path, False, asked)
    assert not calls
    assert not seen["attention"]
    found, cached, calls, seen = run(path, True, asked)
    assert found == expected
    assert cached == [288] * 10
    # There are two layers, one step for the suffixes and eleven decodes. The first prompt alone shares nothing.
    assert calls == [9] * (2 * 12)
    assert seen["attention"] == 2 * seen["steps"] > len(calls)


def test_a_short_prefix_is_not_worth_it(model_path):
    _, cached, calls, _ = run(model_path("llama"), True, prompts(250, 10))
    assert cached == [224] * 10
    assert not calls
