"""Tokens as bytes."""

from __future__ import annotations

import numpy as np
import pytest
from cache_cases import run


@pytest.mark.parametrize("kind", [list, tuple, range, np.array, lambda t: np.array(t, np.int32)])
def test_kinds_of_token_ids_are_the_same_prompt(manager, kind):
    run(manager, "a", list(range(8)))
    tokens = range(8) if kind is range else kind(list(range(8)))
    assert manager.allocate("b", tokens).num_cached_tokens == 7


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ([-1], ValueError),
        ([1 << 32], ValueError),
        (["x"], TypeError),
        ([1.5], TypeError),
        ("abc", TypeError),
        (np.array([-1]), ValueError),
        (np.array([1.5]), TypeError),
        (np.zeros((2, 2), int), TypeError),
        (3, TypeError),
    ],
)
def test_bad_tokens_are_refused_by_name(manager, tokens, error):
    with pytest.raises(error, match="token_ids"):
        manager.allocate("a", tokens)
    assert manager.stats().num_requests == 0
