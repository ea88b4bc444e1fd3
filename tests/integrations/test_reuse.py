"""What a prompt can be read from besides its prefix in blocks: blocks behind a gap, host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")

from generate_cases import (  # noqa: E402
    FAMILIES,
    SMALL,
    assert_nothing_held,
    assert_same,
    left_padded,
    prompt,
)

from pc.integrations.huggingface import enable_prefix_caching  # noqa: E402

BY_NAME = {family.name: family for family in FAMILIES}


@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gpt2"])
def test_blocks_behind_a_gap(name: str) -> None:
    model = BY_NAME[name].build()
    with enable_prefix_caching(model, num_blocks=64, reuse="gap") as handle:
        assert_same(model, input_ids=prompt(110))
        pool = handle.manager.pools[0]
        handle.manager.allocate("look", prompt(110)[0].numpy())
        table = handle.manager.block_table("look")
        handle.manager.free("look")
        for storage in handle._serving.store.storage.parts[0].layers.values():
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
