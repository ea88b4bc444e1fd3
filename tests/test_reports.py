"""Faults that public bug reports of other projects describe, translated to this library: one case for each report.

The comment above a case names the report or the kind of report that it comes from. A new report is added here first,
as a case that fails.
"""

from __future__ import annotations

import pytest

import pc


def store(manager: pc.CacheManager, name: str, tokens: list[int], **options: object) -> None:
    manager.allocate(name, tokens, **options)
    manager.commit(name, len(tokens))
    manager.free(name)


# vLLM, SGLang: "prefix cache hit rate drops, no way to see why". A cancelled request is no text that could be found.
def test_text_of_a_cancelled_request_is_not_said_to_be_there() -> None:
    manager = pc.CacheManager(64, block_size=4)
    manager.allocate("cancelled", list(range(16)))
    manager.commit("cancelled", 8)
    manager.free("cancelled")
    found = manager.explain([*range(16), 99])
    assert (found.matched, found.reason, found.position) == (8, "never", 8)


# The same kind of report: an explanation must not blame a salt or an adapter whose text is cached nowhere.
@pytest.mark.parametrize("other", [{"salt": "tenant"}, {"extra_keys": "lora"}], ids=["salt", "keys"])
def test_evicted_text_of_others_is_not_said_to_be_cached(other: dict[str, str]) -> None:
    manager = pc.CacheManager(8, block_size=4)
    store(manager, "theirs", list(range(16)), **other)
    assert manager.explain(list(range(16))).reason == next(iter(other)).removeprefix("extra_")
    store(manager, "traffic", list(range(100, 132)))
    assert manager.explain(list(range(16))).reason == "never"


# The same kind of report, block_size=1.
def test_unlike_text_is_no_other_token_with_blocks_of_one_token() -> None:
    manager = pc.CacheManager(64, block_size=1)
    store(manager, "text", list(range(16)))
    assert manager.explain(list(range(100, 116))).reason == "never"
    assert manager.explain([99, *range(1, 16)]).reason == "token"


# The same kind of report: a speculative decoder's rollback leaves published blocks in the cache.
def test_text_that_was_rolled_back_is_known_while_its_blocks_are_cached() -> None:
    manager = pc.CacheManager(64, block_size=4)
    manager.allocate("a", list(range(16)), salt="tenant")
    manager.commit("a", 16)
    manager.rollback("a", 16)
    manager.free("a")
    assert manager.explain(list(range(16))).reason == "salt"
