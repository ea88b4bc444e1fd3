"""Fixtures of the cache's tests."""

from __future__ import annotations

import pytest

import pc


@pytest.fixture
def manager():
    m = pc.CacheManager(16, block_size=4, policy="lru")
    yield m
    m.check()
