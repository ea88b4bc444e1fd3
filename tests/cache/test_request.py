"""The state of a request: what a copy shares, and how its tables grow."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from pc.cache.hashing import BlockHasher, Chain
from pc.cache.keys import NO_KEYS
from pc.cache.request import Request


@pytest.fixture
def request_of_two_blocks():
    tokens = array("I", range(10))
    chain = Chain(BlockHasher("sha256", 4), NO_KEYS)
    made = Request(tokens, chain, chain.extend(tokens, 2), NO_KEYS, hint=(1, 2.0))
    made.tables = [np.array([5, 3, 7, -1, -1], np.int32)]
    made.num_blocks = 3
    return made


def test_a_copy_grows_on_its_own(request_of_two_blocks):
    first, second = request_of_two_blocks, request_of_two_blocks.copy()
    second.tokens.append(99)
    second.tables[0][0] = 1
    assert (len(first.tokens), first.tables[0][0]) == (10, 5)
    assert (second.hint, second.num_blocks) == ((1, 2.0), 3)
    tokens = array("I", range(12))
    assert first.chain.extend(tokens, 3).tobytes() == second.chain.extend(tokens, 3).tobytes()


def test_a_copy_has_no_block_of_a_state_that_is_not_written(request_of_two_blocks):
    request_of_two_blocks.new_states = [(0, 1)]
    assert request_of_two_blocks.copy().tables[0].tolist() == [5, -1, 7]
    assert request_of_two_blocks.tables[0][1] == 3


def test_a_table_doubles_when_it_has_to_grow_and_keeps_its_blocks(request_of_two_blocks):
    made = request_of_two_blocks
    assert made.grown_table(0, 5) is made.tables[0]
    grown = made.grown_table(0, 6)
    assert grown is made.tables[0]
    assert grown.tolist() == [5, 3, 7, *[-1] * 7]


def test_held_blocks_leave_out_holes_and_what_is_not_in_use(request_of_two_blocks):
    made = request_of_two_blocks
    assert made.held(0).tolist() == [5, 3, 7]
    made.tables[0][1] = -1
    assert made.held(0).tolist() == [5, 7]


def test_pending_tokens_count_as_length(request_of_two_blocks):
    request_of_two_blocks.pending = array("I", [1, 2])
    assert request_of_two_blocks.length == 12
    copy = request_of_two_blocks.copy()
    copy.pending.append(3)
    assert request_of_two_blocks.length == 12
