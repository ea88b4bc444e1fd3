"""Reuse beyond the cached prefix: blocks after a gap, blocks in host memory, and caches of earlier calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from cache_cases import drop
from generate_cases import (
    BY_NAME,
    CACHE,
    assert_same,
    both,
    cache_of,
    cached,
    cached_each,
    enabled,
    first_quick,
    left_padded,
    prompt,
)
from torch.nn.modules.module import register_module_forward_hook

from pc.cache.policies import POLICIES
from pc.demo._measure import MiddleFirst
from pc.integrations.huggingface import enable_prefix_caching
from pc.integrations.huggingface.store.storage import KVStorage


@pytest.mark.parametrize(
    ("name", "gone", "hit", "whole"),  # blocks before a window are not needed
    [
        ("llama", [2, 3], 64, 109),
        ("mistral-window", [2, 3], 96, 96),
        ("gemma2", [2, 3], 64, 96),
        ("gpt2", [2, 3], 64, 109),
    ],
)
def test_blocks_behind_a_gap(name: str, gone: list[int], hit: int, whole: int, storages: list[Any]) -> None:
    model = BY_NAME[name].build()
    with enabled(model, num_blocks=64, reuse="gap") as handle:
        assert_same(model, input_ids=prompt(110))
        for pool, part in zip(handle.manager.pools, storages[0].parts, strict=True):
            blocks = pool.table.find(words(handle, prompt(110)))[gone]
            for side in part.tensors.values():
                side[blocks.tolist()] = torch.nan  # evicted blocks must not be read
            drop(pool, blocks)
        assert cached_each(model, handle, prompt(110)) == [hit, whole]
        drop(pool, pool.table.find(words(handle, prompt(110)))[:1])
        assert_same(model, **left_padded(prompt(110), prompt(20, 1)))


def padded_alone(ids: torch.Tensor, left: int, right: int = 0) -> dict[str, Any]:
    """Return the arguments of a call with one row that has padding, and of which logits are returned."""
    row = torch.nn.functional.pad(ids, (left, right))
    outputs = {"return_dict_in_generate": True, "output_logits": True}
    return {"input_ids": row, "attention_mask": (row != 0).long(), "pad_token_id": 0, "eos_token_id": None, **outputs}


def assert_same_logits(model: Any, handle: Any, **call: Any) -> int:
    """Check the logits of a call, and return how many tokens its first row read from the cache."""
    want, got = both(model, **call)
    for a, b in zip(want.logits, got.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert handle.stats().calls_handed_back == {}
    return int(handle.last_requests[0].cached_tokens)


@pytest.mark.parametrize("name", first_quick(["qwen3-next", "jamba", "lfm2", "granite-4", "inkling"]))
def test_a_single_padded_row_of_a_hybrid(name: str) -> None:
    """A row that is computed before the loop lacks the columns of padding, also if it is alone in its batch."""
    model = BY_NAME[name].build()
    with enabled(model, num_blocks=64) as handle:
        for reused in (0, 48):
            assert assert_same_logits(model, handle, **padded_alone(prompt(60), 5)) == reused
        assert assert_same_logits(model, handle, **padded_alone(prompt(60), 9)) == 48


@pytest.mark.parametrize("name", first_quick(["mistral-window", "gemma3", "gpt-oss"]))
def test_a_single_padded_row_of_a_model_with_windows(name: str, short_steps: None) -> None:
    model = BY_NAME[name].build()
    with enabled(model, num_blocks=64) as handle:
        for left, right in ((40, 0), (5, 0), (40, 3)):
            assert_same_logits(model, handle, **padded_alone(prompt(150, left + right), left, right))


@pytest.mark.parametrize(("left", "right"), [(5, 0), (0, 5), (5, 3)])
def test_a_single_padded_row_behind_a_gap(left: int, right: int) -> None:
    model = BY_NAME["llama"].build()
    with enabled(model, num_blocks=64, reuse="gap") as handle:
        assert_same(model, input_ids=prompt(110))
        pool = handle.manager.pools[0]
        drop(pool, pool.table.find(words(handle, prompt(110)))[2:4])
        assert assert_same_logits(model, handle, **padded_alone(prompt(110), left, right)) == 64


@pytest.mark.parametrize("policy", [*POLICIES, MiddleFirst])
def test_policies_leave_prefixes_and_gaps_come_from_others(policy: Any) -> None:
    model = BY_NAME["llama"].build()
    with enable_prefix_caching(model, num_blocks=28, policy=policy, reuse="gap") as handle:
        assert_same(model, input_ids=prompt(421), max_new_tokens=4)
        assert_same(model, input_ids=prompt(200, 1), max_new_tokens=4)
        assert_same(model, input_ids=prompt(421), max_new_tokens=4)
        spans = handle.last_requests[0].cached_spans
        assert [start == 0 for start, _ in spans] == ([True, False] if policy is MiddleFirst else [True])
        assert spans[-1][1] < 416 or policy is MiddleFirst


@pytest.mark.parametrize("name", first_quick(["llama", "mistral-window", "gemma2", "gpt2"]))
def test_a_row_is_gone_on_with_in_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reads, read, used = BY_NAME[name].build(), [], KVStorage.read, [None]

    def counted(storage: KVStorage, *arguments: Any) -> None:
        reads.append(storage)
        read(storage, *arguments)

    def again(seed: int, tokens: int = 20) -> tuple[int, bool]:
        reads.clear()
        assert_same(model, input_ids=torch.cat([prompt(64), prompt(tokens, seed)], 1))
        return handle.last_requests[0].cached_tokens, not reads

    monkeypatch.setattr(KVStorage, "read", counted)
    with enabled(model, num_blocks=256) as handle, caches_used(used):
        assert again(1) == (0, True)
        assert again(2) == (64, True)
        assert again(3, 300) == (64, True)  # longer than the buffers of the kept cache
        with handle.salt("of another"):
            assert again(2) == (0, True)
            assert again(3) == (64, True)
        assert again(4) == (64, True)
        used[0].layers[0].keys[:] = torch.nan
        assert again(5) == (64, False)
        _, got = both(model, input_ids=prompt(64), return_dict_in_generate=True)
        cache_of(got).layers[0].keys[:] = torch.nan  # the cache belongs to the caller
        assert again(9)[0] == 64
        drop(handle.manager.pools[0], handle.manager.pools[0].table.find(words(handle, prompt(64))))
        assert again(6) == (0, True)
    with enable_prefix_caching(model, num_blocks=12) as handle:
        assert again(7)[0] == 0
        assert (again(8), again(9)) == ((64, False), (64, False)), "too large to be kept"


def test_there_is_room_for_a_question_behind_a_document() -> None:
    model = BY_NAME["llama"].build()
    used = [None]
    with enable_prefix_caching(model, num_blocks=256), caches_used(used):

        def buffer(tokens: torch.Tensor) -> int:
            model.generate(tokens, max_new_tokens=1)
            return int(used[0].layers[1].values.data_ptr())

        first = buffer(prompt(256))
        assert buffer(torch.cat([prompt(256), prompt(32, 1)], 1)) == first
        assert buffer(torch.cat([prompt(256), prompt(32, 2)], 1)) == first


@pytest.mark.quick
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_drafts_that_are_rejected_are_not_taken_for_an_evicting_hook(name: str) -> None:
    model, repeated = BY_NAME[name].build(), prompt(12).repeat(1, 8)
    with enable_prefix_caching(model, num_blocks=256) as handle:
        for _ in range(2):  # longer than the room of buffers, so parts are published before the end
            assert_same(model, input_ids=repeated, prompt_lookup_num_tokens=4, max_new_tokens=150)
            assert len(handle.last_requests) == 1
        assert handle.last_requests[0].cached_tokens == 95


def test_the_first_tokens_of_a_block_are_read() -> None:
    model = BY_NAME["llama"].build()
    with enabled(model, num_blocks=64, host_blocks=64) as handle:
        assert_same(model, input_ids=torch.cat([prompt(40), prompt(20, 1)], 1))
        assert_same(model, **left_padded(torch.cat([prompt(40), prompt(20, 2)], 1), prompt(33)), times=2)
        assert [r.cached_tokens for r in handle.last_requests] == [59, 32]
        assert cached(model, handle, torch.cat([prompt(40), prompt(20, 3)], 1)) == 40


@contextmanager
def caches_used(last: list[Any]) -> Iterator[None]:
    """Put the cache of each forward pass into `last`. A hook on the model would count as a change."""

    def note(module: Any, arguments: Any, output: Any) -> None:
        last[0] = getattr(output, CACHE, None) or last[0]

    hook = register_module_forward_hook(note)
    try:
        yield
    finally:
        hook.remove()


def words(handle: Any, ids: torch.Tensor) -> Any:
    """Return the hashes of a prompt's blocks, as in the pool's table."""
    handle.manager.allocate("words", ids[0].numpy())
    raw = b"".join(handle.manager.block_hashes("words"))
    handle.manager.free("words")
    return np.frombuffer(raw, np.uint64).reshape(-1, 4)
