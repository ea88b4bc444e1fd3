"""The encoding of tokens as bytes."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from cache_cases import run

import pc


@pytest.mark.parametrize("kind", [list, tuple, range, np.array, lambda t: np.array(t, np.int32)])
def test_kinds_of_token_ids_are_the_same_prompt(manager, kind):
    run(manager, "a", list(range(8)))
    tokens = range(8) if kind is range else kind(list(range(8)))
    assert manager.allocate("b", tokens).num_cached_tokens == 7


@pytest.mark.parametrize("kind", [list, np.array, lambda t: np.array(t, np.uint32), lambda t: array("I", t)])
def test_tokens_are_read_when_they_are_given(kind):
    manager = pc.CacheManager(8, block_size=4)
    prompt, more = kind([1, 2, 3]), kind([4, 5])
    manager.allocate("a", prompt)
    manager.append("a", more)
    prompt[0] = more[0] = 9
    manager.commit("a", 5)
    assert manager.allocate("b", [1, 2, 3, 4, 5]).num_cached_tokens == 4
