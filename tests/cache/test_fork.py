"""Requests that begin as copies of other requests."""

from __future__ import annotations

import pytest
from cache_cases import recurrent


def test_fork_copies_the_shared_partial_block_on_write(manager):
    manager.allocate("a", list(range(6)))
    manager.commit("a", 6)
    manager.fork("a", "b")
    shared = manager.block_table("a")
    step = manager.append("b", [9])
    table = manager.block_table("b")
    assert step.copies == [(shared[1], table[1])]
    assert table[0] == shared[0]
    assert step.slot_mapping.tolist() == [table[1] * 4 + 2]
    assert manager.append("a", [8]).copies == []
    assert manager.block_table("a").tolist() == shared.tolist()


def test_a_request_whose_state_is_not_there_cannot_be_forked():
    m = recurrent()
    m.allocate("a", list(range(6)))
    with pytest.raises(ValueError, match="committed"):
        m.fork("a", "b")
    m.commit("a", 6)
    m.fork("a", "b")
    m.check()
