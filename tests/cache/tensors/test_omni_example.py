"""The worked example of vLLM-Omni's document on prefix caching, and the diagrams drawn from it."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import pc

IMAGES = Path(__file__).parents[3] / "docs" / "images"
FIRST = ["The", "quick", "brown", "fox", "was", "tired", "and", "slept", "beneath", "the", "shady", "tree"]
SECOND = ["The", "quick", "brown", "fox", "jumped", "over", "the", "dog"]
WORDS = list(dict.fromkeys(FIRST + SECOND))


def outputs(words, start):
    """Return the output of a causal stage for the words from `start` on."""
    generator = torch.Generator()
    rows = []
    for i in range(start, len(words)):
        generator.manual_seed(hash(tuple(WORDS.index(word) for word in words[: i + 1])) % 2**31)
        rows.append(torch.randn(18, generator=generator))
    return {"hidden_states": torch.stack(rows)[:, :2], "mm": {"mm_feature": torch.stack(rows)[:, 2:]}}


def test_the_worked_example():
    manager = pc.CacheManager(num_blocks=8, block_size=4)
    tensors = pc.TensorCache(manager, num_blocks=8, block_size=4)
    tensors.register("hidden_states", (2,), torch.float32)
    assert tensors.rows("hidden_states").shape == (8, 4, 2)

    allocation = manager.allocate("first", [WORDS.index(word) for word in FIRST])
    assert allocation.slot_mapping.tolist() == list(range(12))
    step = pc.Step.of({"first": allocation}, outputs(FIRST, 0))
    assert tensors.store(step) == {}
    manager.commit("first", 12)
    assert tensors.names == ("hidden_states", "mm.mm_feature")
    assert tensors.rows("mm.mm_feature").shape == (8, 4, 16)
    assert tensors.stored("hidden_states").any(1).tolist() == [True] * 3 + [False] * 5
    assert torch.equal(tensors.rows("hidden_states").view(-1, 2)[11], outputs(FIRST, 11)["hidden_states"][0])

    allocation = manager.allocate("second", [WORDS.index(word) for word in SECOND])
    assert allocation.num_cached_tokens == 4
    assert allocation.block_ids.tolist() == [0, 3]
    assert allocation.slot_mapping.tolist() == [12, 13, 14, 15]
    step = pc.Step.of({"second": allocation}, outputs(SECOND, 4))
    joined = tensors.join(step)["second"]
    tensors.store(step)
    manager.commit("second", 8)
    assert tensors.stored("mm.mm_feature").all(1).tolist() == [True] * 4 + [False] * 4

    whole = outputs(SECOND, 0)
    for got in (joined, tensors.load("second")):
        assert torch.equal(got["hidden_states"], whole["hidden_states"])
        assert torch.equal(got["mm.mm_feature"], whole["mm"]["mm_feature"])
    assert torch.equal(tensors.load("first")["hidden_states"], outputs(FIRST, 0)["hidden_states"])
    assert np.array_equal(manager.block_table("first"), [0, 1, 2])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_images_show_what_the_cache_holds(number):
    drawn = runpy.run_path(str(IMAGES / "hidden_states.py"))["images"]()
    name = f"hidden_states_{number}.svg"
    assert (IMAGES / name).read_text(encoding="utf-8") == drawn[name]
