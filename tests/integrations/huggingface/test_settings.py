"""A caller's settings for a conversation reach the eviction policy from the thread that makes them."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from generate_cases import LLAMA, assert_same, enabled, left_padded, prompt
from processes import in_threads

from pc.cache import EvictionPolicy
from pc.cache.policies import POLICIES
from pc.integrations.huggingface import enable_prefix_caching
from pc.integrations.huggingface.settings import value_of, within


def test_policy_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LLAMA.build()
    with enabled(model, num_blocks=64) as handle:
        heard: list[float | None] = []
        free = handle.manager.free

        def listen(request_id: Any, returns: float | None = None) -> None:
            heard.append(returns)
            free(request_id, returns)

        monkeypatch.setattr(handle.manager, "free", listen)
        assert_same(model, input_ids=prompt(40))
        with handle.hint(returns=0.25):
            assert_same(model, **left_padded(prompt(40), prompt(30, 1)))
            with handle.hint(None):
                assert_same(model, input_ids=prompt(40))
            in_threads(lambda ids: assert_same(model, input_ids=ids), prompt(40))
            assert_same(model, input_ids=prompt(40), num_beams=2)
        assert_same(model, input_ids=prompt(40))
        assert heard == [None, 0.25, 0.25, None, None, 0.25, None]


def test_conversations_that_are_over_go_first() -> None:
    model = LLAMA.build()
    kept = []
    for returns in (None, 0.0):
        with enable_prefix_caching(model, num_blocks=16, policy="priority") as handle:
            for seed in range(3):
                assert_same(model, input_ids=prompt(64, seed), max_new_tokens=1)
            with handle.hint(returns):
                assert_same(model, input_ids=prompt(64, 3), max_new_tokens=1)
            assert_same(model, input_ids=prompt(64, 4), max_new_tokens=1)
            assert_same(model, input_ids=prompt(64), max_new_tokens=1)
            kept.append(handle.last_requests[0].cached_tokens)
    assert kept == [0, 63]
    assert issubclass(POLICIES["priority"], EvictionPolicy)


@pytest.mark.parametrize(
    ("returns", "error"), [(1.5, ValueError), (-0.1, ValueError), ("soon", TypeError), (True, TypeError)]
)
def test_bad_hints(returns: Any, error: type[Exception]) -> None:
    with (
        enable_prefix_caching(LLAMA.build()) as handle,
        pytest.raises(error, match="returns: got"),
        handle.hint(returns),
    ):
        pass


def test_threads_begin_without_a_salt_and_asyncio_keeps_it() -> None:
    model = LLAMA.build()
    ids = prompt(64)
    with enable_prefix_caching(model, num_blocks=64) as handle:

        def cached() -> int:
            model.generate(ids, max_new_tokens=1)
            return handle.last_requests[0].cached_tokens

        async def elsewhere() -> tuple[int, int]:
            task = await asyncio.create_task(asyncio.to_thread(cached))
            with handle.salt("other"):
                return task, await asyncio.to_thread(cached)

        with handle.salt("tenant"), ThreadPoolExecutor(1) as thread:
            assert cached() == 0
            assert thread.submit(cached).result() == 0  # a thread started inside has no salt
            assert asyncio.run(elsewhere()) == (63, 0)
            assert cached() == 63
        assert cached() == 63  # what the thread cached without a salt


def test_settings_end_in_any_order() -> None:
    salt, hint = object(), object()
    outer, inner = within(salt, "a"), within(hint, 0.5)
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert (value_of(salt), value_of(hint)) == (None, 0.5)
    inner.__exit__(None, None, None)
    assert value_of(hint) is None
    with within(salt, "a"):
        with pytest.raises(ZeroDivisionError), within(salt, "b"):
            raise ZeroDivisionError
        assert value_of(salt) == "a"
