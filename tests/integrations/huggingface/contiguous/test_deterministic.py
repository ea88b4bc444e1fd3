"""Logits over the cache are bitwise equal to those of a model without cache that computes the same chunks."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bits_cases import (
    BY_NAME,
    CHUNK,
    History,
    assert_bits,
    build,
    enable,
    first_seed,
    in_chunks,
    logits_of,
    run_histories,
)
from cache_cases import drop
from generate_cases import HYBRIDS, assert_nothing_held, cache_of, left_padded, prompt

from pc.integrations.huggingface import (
    UnsupportedError,
    enable_continuous_batching,
    enable_prefix_caching,
)
from pc.integrations.huggingface.runners import deterministic

TYPES = (torch.float32, torch.bfloat16)
QUICK = ("llama", "mistral-window", "lfm2")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in BY_NAME])
def test_every_length(name: str, dtype: torch.dtype) -> None:
    """Lengths with hits of no, some and all chunks, that end at and next to ends of chunks and blocks."""
    model, other = build(name, dtype), build(name, dtype)
    lengths = (1, 31, 32, 33, 2, 34, 65, 60, 120, 100, 97, 96, 100, 150, 170)
    with enable(other) as fresh, enable(model) as handle:
        if handle.unsupported is not None:
            pytest.skip(handle.unsupported)
        hybrid = name in {family.name for family in HYBRIDS}
        for length in lengths:
            ids = prompt(length)
            if hybrid:  # transformers alone cannot continue from states in the middle of a prompt
                fresh.reset()
                want = logits_of(other, 3, input_ids=ids)[0]
            else:
                want = in_chunks(model, ids, 3)
            assert_bits(logits_of(model, 3, input_ids=ids)[0], want, length)
        assert_bits(logits_of(model, 3, **left_padded(prompt(5), ids))[1], want)  # from blocks, not from a kept cache
        assert handle.stats().hit_tokens > 300
        assert handle.stats().calls_served == len(lengths) + 1
        assert_nothing_held(handle)


@pytest.mark.parametrize("name", QUICK[:2])
def test_rows_do_not_depend_on_their_neighbours(name: str) -> None:
    model = build(name)
    rows = [prompt(70), torch.cat([prompt(70), prompt(9, 1)], 1), prompt(5, 2), prompt(70)]
    want = [in_chunks(model, row, 4) for row in rows]
    with enable(model) as handle:
        for _ in range(2):
            for got, expected in zip(logits_of(model, 4, **left_padded(*rows)), want, strict=True):
                assert_bits(got, expected)
        assert [report.cached_tokens for report in handle.last_requests] == [64, 64, 0, 64]
        repeated = logits_of(model, 4, input_ids=rows[0], do_sample=True, num_return_sequences=3)
        assert all(torch.equal(row[0], want[0][0]) for row in repeated)
        assert_nothing_held(handle)


def test_an_answer_is_read_again_as_a_prompt() -> None:
    model = build("llama")
    with enable(model) as handle:
        for length in (40, 60, 64):
            said = model.generate(prompt(length), max_new_tokens=60)
            more = torch.cat([said, prompt(7, 1)], 1)
            want = in_chunks(model, more, 3)
            for call in (left_padded(prompt(5), more), {"input_ids": more}):  # in a batch and alone
                assert_bits(logits_of(model, 3, **call)[-1], want, length)
            assert handle.last_requests[0].cached_tokens == (length + 66) // CHUNK * CHUNK


@pytest.mark.parametrize("name", QUICK[:2])
def test_gaps_are_whole_chunks(name: str) -> None:
    model, ids = build(name), prompt(150)
    want = in_chunks(model, ids, 3)
    with enable(model, reuse="gap") as handle:
        model.generate(ids, max_new_tokens=1)
        words = handle._engine.store.manager  # evict blocks 3 and 4, of the chunks from 32 and from 64
        hashes = block_words(words, ids)
        for pool in words.pools:
            drop(pool, pool.table.find(hashes)[[3, 4]])
        assert_bits(logits_of(model, 3, input_ids=ids)[0], want)
        assert handle.last_requests[0].cached_spans == (((0, 32), (96, 128)) if name == "llama" else ((0, 128),))
        assert_nothing_held(handle)


def block_words(manager: Any, ids: torch.Tensor) -> Any:
    """Return the hashes of a prompt's blocks, as in the manager's tables."""
    import numpy as np

    keys = deterministic.conditions(build("llama"))
    manager.allocate("look", ids[0].tolist(), extra_keys=list(keys), num_tokens=0)
    hashes = [np.frombuffer(digest, np.uint64) for digest in manager.block_hashes("look")]
    manager.free("look")
    return np.stack(hashes)


def test_out_of_blocks() -> None:
    """A prompt that does not fit has the same bits and is not cached."""
    model = build("llama")
    with enable(model, num_blocks=3) as handle:
        with pytest.warns(UserWarning, match="num_blocks"):
            got = logits_of(model, 3, input_ids=prompt(100))[0]
        assert_bits(got, in_chunks(model, prompt(100), 3))
        assert_nothing_held(handle)


def test_blocks_of_other_chunks_and_threads_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    threads = torch.get_num_threads()

    def cached(**options: Any) -> int:
        with enable(model, disk=tmp_path, **options) as handle:
            model.generate(prompt(100), max_new_tokens=1)
            return int(handle.last_requests[0].cached_tokens)

    assert [cached(), cached(), cached(chunk=48), cached(deterministic=False), cached()] == [0, 96, 0, 0, 96]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads + 1)
        assert [cached(), cached()] == [0, 96]
    with enable(model) as handle:
        model.generate(prompt(100), max_new_tokens=1)
        handle.save(tmp_path / "blocks")
    for options in ({"chunk": 48}, {"deterministic": False}):
        with enable(model, **options) as handle, pytest.raises(ValueError, match="got KV of another hash"):
            handle.load(tmp_path / "blocks")
    with enable(model) as handle:
        handle.load(tmp_path / "blocks")
        assert handle.explain({"input_ids": prompt(100)}).matched == 96  # in host memory, where the call reads them
        assert_bits(logits_of(model, 2, input_ids=prompt(100))[0], in_chunks(model, prompt(100), 2))
        assert handle.last_requests[0].cached_tokens == 96
        assert handle.explain({"input_ids": prompt(100)}).matched == 96


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"num_beams": 2}, "not beam_search"),
        ({"prompt_lookup_num_tokens": 3}, "not assisted_generation"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "hidden states and attention weights"),
        ({"attention_mask": torch.tensor([[1] * 30 + [0] * 10])}, "padding only on the left"),
    ],
)
def test_what_is_refused_falls_back(call: dict[str, Any], reason: str) -> None:
    model = build("llama")
    with enable(model) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.generate(prompt(40), max_new_tokens=3, **call)
        assert [reason in said for said in handle.stats().calls_handed_back] == [True]


@pytest.mark.parametrize(
    "call", [{"prefill_chunk_size": 0}, {"prefill_chunk_size": 8.0}, {"logits_to_keep": torch.tensor([40])}], ids=str
)
def test_errors_of_generate_come_out(call: dict[str, Any]) -> None:
    model = build("llama")
    with pytest.raises(Exception) as want:  # noqa: PT011
        model.generate(prompt(40), max_new_tokens=3, **call)
    with enable(model), pytest.warns(UserWarning, match="falls back"), pytest.raises(type(want.value)) as got:
        model.generate(prompt(40), max_new_tokens=3, **call)
    assert str(got.value) == str(want.value)


@pytest.mark.parametrize("name", QUICK[1:])
def test_a_prompt_that_is_looked_up_again_counts_once(name: str) -> None:
    model, reports = build(name), []
    with enable(model, num_blocks=64) as handle:
        for number in range(6):
            ids = torch.cat([prompt(60 + number % 3 * 7), prompt(5 + number, number)], 1)
            model.generate(ids, max_new_tokens=2)
            reports += handle.last_requests
        stats = handle.stats()
        assert stats.total_requests == 6
        assert stats.hit_tokens == sum(report.cached_tokens for report in reports) > 100
        always = 6 if name == "lfm2" else 0  # the last token of each prompt
        assert stats.queried_tokens == sum(report.prompt_tokens for report in reports) - always


@pytest.mark.parametrize("make", [enable, enable_prefix_caching], ids=["deterministic", "copies"])
def test_a_result_over_a_document_has_no_cache_under_any_name(make: Any) -> None:
    """The call's cache holds the document's own tensors. An empty one would make the next pass compute wrong values."""
    model = build("llama")
    with make(model) as handle, handle.compress(prompt(64), budget=0.5):
        call = torch.cat([prompt(64), prompt(9, 1)], 1)
        result = model.generate(call, max_new_tokens=3, return_dict_in_generate=True)
        assert handle.stats().document_calls == 1
    assert cache_of(result) is None
    assert list(result) == ["sequences"]


def test_continuous_batching_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="deterministic=True: a step computes all"):
        enable_continuous_batching(build("llama"), deterministic=True)


def test_nothing_of_it_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    from pc.integrations.huggingface.runners import deterministic

    monkeypatch.setattr(deterministic, "RowByRow", None)
    model = build("llama")
    with enable_prefix_caching(model, num_blocks=64) as handle:
        model.generate(prompt(40), max_new_tokens=3)
        assert handle.stats().calls_served == 1
        assert handle.manager.seed is None


@pytest.mark.filterwarnings("ignore:prefix caching")
def test_some_histories(tmp_path: Path) -> None:
    """Some random histories of a model with full and sliding-window attention, seeded by the date.

    `make bits` runs 100, and more with the weights of SmolLM2.
    """
    history, first = History(build("gemma2"), tmp_path), first_seed()
    for seed in itertools.count(first):
        history.run(seed, 6)
        if history.cached > 100:
            break


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:prefix caching")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_histories_against_a_fresh_process(dtype: torch.dtype, capfd: pytest.CaptureFixture[str]) -> None:
    run_histories("gemma2", dtype, 3, first_seed())
    assert "3 histories" in capfd.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_trained_model_warm_and_cold(dtype: torch.dtype, trained_model: Path) -> None:
    """All layers of SmolLM2 have the same bits. They would differ if hits ended at blocks instead of chunks."""
    model = transformers.AutoModelForCausalLM.from_pretrained(trained_model, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    ids = prompt(150)
    want = in_chunks(model, ids, 2)
    with enable(model) as handle:
        for _ in range(2):
            assert_bits(logits_of(model, 2, input_ids=ids)[0], want)
        assert handle.last_requests[0].cached_tokens == 128
        assert_bits(logits_of(model, 2, input_ids=ids[:, :90])[0], in_chunks(model, ids[:, :90], 2))
        assert handle.last_requests[0].cached_tokens == 64
