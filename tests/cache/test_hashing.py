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


NO_SEQUENCES = [{1: 2}, {1, 2}, iter([1]), 5, None, "12", b"12", bytearray(b"12")]


@pytest.mark.parametrize("tokens", NO_SEQUENCES, ids=lambda tokens: type(tokens).__name__)
def test_what_is_no_sequence_is_named(tokens):
    message = f"token_ids: got {type(tokens).__name__}, needs a sequence of integers"
    with pytest.raises(TypeError, match=message):
        pc.CacheManager(4).allocate("a", tokens)


@pytest.mark.parametrize("kind", [list, np.array, lambda t: np.array(t, np.uint32), lambda t: array("I", t)])
def test_tokens_are_read_when_they_are_given(kind):
    manager = pc.CacheManager(8, block_size=4)
    prompt, more = kind([1, 2, 3]), kind([4, 5])
    manager.allocate("a", prompt)
    manager.append("a", more)
    prompt[0] = more[0] = 9
    manager.commit("a", 5)
    assert manager.allocate("b", [1, 2, 3, 4, 5]).num_cached_tokens == 4


def test_an_algorithm_is_named_by_a_str():
    with pytest.raises(ValueError, match=r"hash_algorithm: got .*, needs one of sha256"):
        pc.CacheManager(4, hash_algorithm=["sha256"])
