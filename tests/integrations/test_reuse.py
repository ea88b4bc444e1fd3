"""What a prompt can be read from besides its prefix in blocks: blocks behind a gap, host memory, kept states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from generate_cases import (  # noqa: E402
    FAMILIES,
    SMALL,
    Family,
    assert_nothing_held,
    assert_same,
    both,
    count_computed,
    left_padded,
    prompt,
)

from pc.integrations.huggingface import enable_prefix_caching  # noqa: E402

BY_NAME = {family.name: family for family in FAMILIES}
HYBRIDS = [
    Family(
        "qwen3-next",
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "num_hidden_layers": 4, "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
        },
    ),
    Family("lfm2", "Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    Family(
        "granite-4",
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            "layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1,
            "mamba_d_state": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 96,
        },
    ),
]  # fmt: skip


def remembering(family: Family) -> Any:
    """A hybrid whose states matter: those of random weights forget within a few tokens."""
    model = family.build()
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            torch.nn.init.constant_(weight, -4.0)
    return model


@pytest.mark.parametrize("family", HYBRIDS, ids=lambda f: f.name)
def test_hybrids_go_on_from_states(family: Family) -> None:
    model = remembering(family)
    document = prompt(70)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        for seed, reused in ((1, 0), (2, 0), (3, 64)):  # the second leaves states where it parts from the first
            assert_same(model, input_ids=torch.cat([document, prompt(20, seed)], 1))
            assert handle.last_requests[0].cached_tokens == reused
        question = torch.cat([document, prompt(20, 4)], 1)
        assert count_computed(model, input_ids=question, max_new_tokens=1) == 26
        want, got = both(
            model, input_ids=torch.cat([document, prompt(20, 5)], 1), return_dict_in_generate=True, output_logits=True
        )
        for a, b in zip(want.logits, got.logits, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
        assert_same(model, **left_padded(torch.cat([document, prompt(9, 6)], 1), prompt(33, 7)))
        assert_same(model, **left_padded(torch.cat([document, prompt(9, 6)], 1), prompt(33, 7)), num_beams=2)
        assert_nothing_held(handle)


@pytest.mark.parametrize("family", HYBRIDS, ids=lambda f: f.name)
def test_next_round_of_a_hybrids_chat_goes_on_behind_the_answer(family: Family) -> None:
    model = remembering(family)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        first = assert_same(model, input_ids=prompt(40), max_new_tokens=30, eos_token_id=None)
        assert_same(model, input_ids=torch.cat([first, prompt(5, 1)], 1))
        assert handle.last_requests[0].cached_tokens == 64


def test_states_that_are_lost_show() -> None:
    model = remembering(HYBRIDS[0])
    document = prompt(70)
    with enable_prefix_caching(model, num_blocks=64) as handle:
        for seed in (1, 2):
            model.generate(torch.cat([document, prompt(20, seed)], 1), max_new_tokens=2)
        for states in handle._serving.store.states._states.values():
            for *_, state in states:
                state.zero_()
        ids = torch.cat([document, prompt(20, 3)], 1)
        want, got = both(model, input_ids=ids, return_dict_in_generate=True, output_logits=True, max_new_tokens=1)
        assert (want.logits[0] - got.logits[0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gpt2"])
def test_blocks_behind_a_gap(name: str) -> None:
    model = BY_NAME[name].build()
    with enable_prefix_caching(model, num_blocks=64, reuse="gap") as handle:
        assert_same(model, input_ids=prompt(110))
        pool = handle.manager.pools[0]
        handle.manager.allocate("look", prompt(110)[0].numpy())
        table = handle.manager.block_table("look")
        handle.manager.free("look")
        for storage in handle._serving.store.storage.layers.values():
            for side in storage:
                side[table[2:4].tolist()] = torch.nan  # what is evicted must not be read
        evict(pool, table[2:4])
        assert_same(model, input_ids=prompt(110))
        assert handle.last_requests[0].cached_tokens == 96 - 32
        assert_same(model, input_ids=prompt(110))
        assert handle.last_requests[0].cached_tokens == 96
        evict(pool, handle.manager.pools[0].table.find(words(handle, prompt(110)))[:1])
        assert_same(model, **left_padded(prompt(110), prompt(20, 1)))
        assert_nothing_held(handle)


def words(handle: Any, ids: torch.Tensor) -> Any:
    """The hashes of a prompt's blocks, as the pool's table has them."""
    handle.manager.allocate("words", ids[0].numpy())
    raw = b"".join(handle.manager.block_hashes("words"))
    handle.manager.free("words")
    return np.frombuffer(raw, np.uint64).reshape(-1, 4)


def evict(pool: Any, blocks: Any) -> None:
    """Takes blocks out of what can be found."""
    victims = np.asarray(blocks, np.int32)
    pool._tell("removed", victims)
    pool._unlist(victims)
    pool._evictable -= victims.size
    pool.give_up(victims)


def test_evicted_blocks_come_back_from_host_memory() -> None:
    model = BY_NAME["llama"].build()
    with enable_prefix_caching(model, num_blocks=8, host_blocks=32) as handle:
        for _ in range(2):
            for seed in range(4):
                assert_same(model, input_ids=prompt(64, seed), max_new_tokens=4)
        assert handle.stats().evictions > 0
        assert handle.last_requests[0].cached_tokens == 63
        assert len(handle._serving.store.host) <= 32
        assert_nothing_held(handle)
        handle.reset()
        assert_same(model, input_ids=prompt(64), max_new_tokens=4)
        assert handle.last_requests[0].cached_tokens == 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"reuse": "all"}, ValueError, "reuse: got 'all'"),
        ({"host_blocks": -1}, ValueError, "host_blocks: got -1"),
        ({"host_blocks": 1.5}, TypeError, "host_blocks: got float"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        enable_prefix_caching(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)), **arguments)
