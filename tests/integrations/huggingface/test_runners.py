"""The promises that every runner keeps: right tokens, no token computed twice, tiers, files, threads, interrupts."""

from __future__ import annotations

import functools
import gc
import signal
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from generate_cases import BY_NAME, CACHE, NEW_TOKENS, assert_nothing_held, both, cache_of, left_padded, plain, prompt
from processes import exit_status_of_child, in_threads
from runner_cases import LFM2, RUNNERS, Runner, build, cases, interrupted

from pc.integrations.huggingface import api
from pc.integrations.huggingface.runners import rows as rows_module

SHARED = prompt(70)
CALLS = [
    (SHARED,),
    (torch.cat([SHARED, prompt(9, 1)], 1), prompt(33, 2), SHARED[:, :40], prompt(1, 3)),
    (prompt(64, 4),),  # a whole number of blocks: a hit computes one token
]


def windows_of(family: Any) -> dict[str, Any]:
    """Return options with fewer blocks for windows than a prompt of 150 tokens has; {} for a family without windows."""
    return {"window_blocks": 8} if getattr(family, "name", "") in ("mistral-window", "gemma2") else {}


@cases()
def test_same_tokens_cold_warm_pressed_and_disabled(runner: Runner, family: Any) -> None:
    model = build(family)
    for num_blocks in (None, runner.few):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with runner.enable(model, **({} if num_blocks is None else {"num_blocks": num_blocks})) as caching:
                for _ in range(2):
                    for call in CALLS:
                        caching.check(*call)
                        if runner.sampled and num_blocks is not None:
                            caching.check(*call, do_sample=True, top_k=50)
                assert caching.handle.stats().hit_tokens > 0
                assert (caching.handle.stats().evictions > 0) == (num_blocks is not None)
    ids = SHARED[:, :40]
    assert torch.equal(model.generate(ids, max_new_tokens=NEW_TOKENS), plain(model, input_ids=ids))


MODES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "several beams": {"num_beams": 4, "num_return_sequences": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "several answers": {"num_return_sequences": 3, "do_sample": True},
}
if api.ASSISTED not in api.look().disabled:
    MODES["prompt lookup"] = {"prompt_lookup_num_tokens": 3}


@cases("llama", without=("batching",))
def test_a_call_keeps_nothing_of_its_arguments(runner: Runner, family: Any) -> None:
    """A cycle of references would keep them, with images and caches, until Python's collector runs."""

    class Processor:
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores

    with runner.enable(build(family)) as caching:
        caching.check(SHARED)
        processor = Processor()
        gone = weakref.ref(processor)
        gc.collect()
        gc.disable()
        try:
            caching.check(SHARED, logits_processor=[processor])
            del processor
            assert gone() is None
        finally:
            gc.enable()


@cases("llama", "mistral-window", "gemma2", "gpt2", without=("packed, captured", "batching"))
@pytest.mark.usefixtures("short_steps")
def test_modes(runner: Runner, family: Any) -> None:
    for windows in ({}, windows_of(family)) if windows_of(family) else ({},):
        with warnings.catch_warnings(), runner.enable(build(family), num_blocks=256, **windows) as caching:
            warnings.simplefilter("ignore" if windows else "error")  # there may be too few blocks for all rows
            for seed, (name, options) in enumerate(MODES.items()):
                ids = torch.cat([prompt(30, seed), prompt(30, seed), prompt(7, seed + 9)], 1)  # something to look up
                if name == "several answers" or runner.name != "deterministic":
                    for _ in range(2):
                        cached = caching.check(ids, **options, max_new_tokens=8)
                    if name != "prompt lookup":
                        caching.check(prompt(40), prompt(9, 1), prompt(40), **options, max_new_tokens=8)
                    assert cached >= 64 or windows
                caching.check(ids, max_new_tokens=8)  # reads what the mode has published
            assert caching.handle.stats().calls_handed_back == {}


@pytest.mark.parametrize(
    "runner", [r for r in RUNNERS if r.name in ("copies", "packed", "deterministic")], ids=lambda r: r.name
)
def test_token_types_reach_every_pass(runner: Runner) -> None:
    """A type of 0 differs from no type: GPT-2 adds an embedding for it."""
    with runner.enable(build(BY_NAME["gpt2"])) as caching, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # deterministic calls fall back
        caching.check(SHARED)
        for options in ({}, {}, {"num_beams": 3}, {"num_return_sequences": 2, "do_sample": True}):
            for ids in (SHARED, torch.cat([SHARED, prompt(70, 1)])):
                caching.check(ids, token_type_ids=torch.zeros_like(ids), **options)
        assert caching.handle.stats().hit_tokens > 0 or runner.name == "deterministic"


@cases("llama", without=("packed, captured",))
def test_neither_padding_nor_cached_tokens_are_computed(runner: Runner, family: Any) -> None:
    with runner.enable(build(family)) as caching:
        rows = prompt(100), prompt(30, 1), prompt(5, 2)
        assert caching.computed(*rows, max_new_tokens=1) == 135
        assert caching.computed(*rows, max_new_tokens=1) == runner.warm  # 96 of 100 and 16 of 30 are cached
        sharing = [torch.cat([prompt(64, 9), prompt(n, n)], 1) for n in (3, 7, 20)]
        assert caching.computed(*sharing, max_new_tokens=1) == 64 + 3 + 7 + 20
        caching.check(*rows)


@cases("llama", without=("copies", "packed, captured", "documents", "batching"))
def test_finished_rows_are_not_computed(runner: Runner, family: Any) -> None:
    with runner.enable(build(family)) as caching:
        rows = [prompt(n, n) for n in (40, 30, 20, 10)]
        generated = torch.tensor(caching.ask(*rows, alone=True, eos_token_id=None, max_new_tokens=30)[0][0])[:, 40:]
        eos = generated[1, 2].item()  # the second row's third token, which then ends each answer
        lengths = [(row == eos).nonzero()[0].item() + 1 if (row == eos).any() else 30 for row in generated]
        assert min(lengths) < 30
        options = {"eos_token_id": eos, "max_new_tokens": 30}
        assert caching.computed(*rows, **options) == 100 + sum(n - 1 for n in lengths)
        caching.check(*rows, **options)


def assert_same_cache(got: Any, want: Any, mask: torch.Tensor) -> None:
    """Compare the KV and states of two caches, but for columns that `mask [batch, columns]` leaves out."""
    for own, other in zip(got.layers, want.layers, strict=True):
        for side in ("keys", "values") if getattr(other, "keys", None) is not None else ():
            expected = getattr(other, side)
            found = getattr(own, side)[:, :, -expected.shape[2] :]  # a layer with a window may keep more
            seen = mask[:, -expected.shape[2] :].bool()
            for row in range(len(mask)):
                torch.testing.assert_close(found[row][:, seen[row]], expected[row][:, seen[row]], rtol=1e-4, atol=1e-5)
        for kind in ("conv_states", "recurrent_states"):
            for index, expected in getattr(other, kind, {}).items():
                torch.testing.assert_close(getattr(own, kind)[index], expected, rtol=1e-4, atol=1e-5)


@cases("llama", "mistral-window", "gemma2", "lfm2", without=("documents", "batching"))
def test_the_cache_of_a_result(runner: Runner, family: Any) -> None:
    """It holds the KV of all tokens but the last, as that of the model's own generate, and can be continued."""
    model, rows = build(family), (prompt(70), prompt(41, 1), prompt(3, 2))
    eos = plain(model, **left_padded(*rows), eos_token_id=None)[1, 72].item()  # ends the second row early
    options = {"return_dict_in_generate": True, "eos_token_id": eos}
    calls: list[dict[str, Any]] = [
        {"input_ids": SHARED},
        {"input_ids": SHARED, "max_new_tokens": 1},
        left_padded(*rows),
        {"input_ids": SHARED, "num_return_sequences": 2, "do_sample": True},
    ]
    with runner.enable(model) as caching, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "prefix caching: falls back to the model's own generate: cache of your own")
        for call in [*calls, *calls]:
            want, got = both(model, **call, **options)
            assert list(got) == list(want)
            assert torch.equal(got.sequences, want.sequences)
            mask = torch.ones_like(want.sequences)
            if "attention_mask" in call:
                mask[:, : call["attention_mask"].shape[1]] = call["attention_mask"]
            assert_same_cache(cache_of(got), cache_of(want), mask[:, :-1])
            assert cache_of(got).get_seq_length() == cache_of(want).get_seq_length()
            longer = {"input_ids": torch.cat([want.sequences, prompt(5, 3).expand(len(mask), -1)], 1)}
            longer["attention_mask"] = torch.nn.functional.pad(mask, (0, 5), value=1)
            answers = [
                generate(**longer, **{CACHE: cache_of(result)}, max_new_tokens=8)
                for generate, result in ((functools.partial(plain, model), want), (model.generate, got))
            ]
            assert torch.equal(*answers)
        stats = caching.handle.stats()
        assert stats.hit_tokens > 0
        # The model's own generate continues caches of several answers, of recurrent states and of deterministic calls.
        served = runner.name != "deterministic" and family is not LFM2
        assert stats.calls_handed_back == {f"{CACHE} of your own": 2 if served else 8}


@cases("llama", without=("copies", "documents", "batching"))
def test_no_memory_for_the_cache_of_a_result(runner: Runner, family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(rows_module, "lay_out", full)
    with runner.enable(build(family)) as caching:
        with pytest.warns(UserWarning, match="a result has no cache: OutOfMemoryError: on purpose"):
            want, got = both(caching.model, input_ids=SHARED, return_dict_in_generate=True)
        assert torch.equal(got.sequences, want.sequences)
        assert list(got) == ["sequences"]  # an empty cache would make the next forward pass compute wrong values
        assert cache_of(got) is None


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@cases("llama", without=("batching",))
def test_prompts_that_do_not_fit(runner: Runner, family: Any, together: bool) -> None:
    with warnings.catch_warnings(record=True) as said, runner.enable(build(family), num_blocks=6) as caching:
        warnings.simplefilter("always")
        caching.check(*([prompt(60, 60), prompt(50, 50)] if together else [prompt(130)]))
        assert together or ["give a larger num_blocks" in str(w.message) for w in said] == [True]
        caching.check(prompt(40), max_new_tokens=8)
        assert caching.check(prompt(40), max_new_tokens=8) == 32


@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=["greedy", "sampled"])
@cases("llama", without=("deterministic", "documents", "batching"))
def test_answers_that_outgrow_the_blocks(runner: Runner, family: Any, options: dict[str, Any]) -> None:
    expected = pytest.warns(UserWarning, match="generated without the cache")
    with runner.enable(build(family), num_blocks=5) as caching, expected:
        caching.check(prompt(30), prompt(20, 1), **options, max_new_tokens=40)


@cases("llama", without=("packed, captured", "documents", "batching"))
def test_a_child_frees_the_blocks_of_calls_of_other_threads(runner: Runner, family: Any) -> None:
    begun, done = threading.Event(), threading.Event()

    class Waiting(transformers.generation.streamers.BaseStreamer):  # type: ignore[misc]
        def put(self, value: torch.Tensor) -> None:
            if value.numel() == 1:  # a token of the answer
                begun.set()
                done.wait(20)

        def end(self) -> None:
            pass

    with runner.enable(build(family)) as caching:
        call = functools.partial(caching.model.generate, SHARED, max_new_tokens=4)
        want = plain(caching.model, input_ids=SHARED, max_new_tokens=4)
        other = threading.Thread(target=call, kwargs={"streamer": Waiting()})
        other.start()

        def child() -> None:
            torch.set_num_threads(1)
            assert torch.equal(call(), want)
            assert_nothing_held(caching.handle)

        try:
            assert begun.wait(20)
            assert exit_status_of_child(child) == 0
            assert caching.handle.stats().held_blocks > 0  # the call in this process goes on
        finally:
            done.set()
            other.join()


TIERS: dict[str, dict[str, Any]] = {
    "both": {"host_blocks": 2, "disk": "."},
    "file": {},
    "host memory": {"host_blocks": 64},
    "disk": {"disk": "."},
}


@pytest.mark.parametrize(
    "tier", [pytest.param(t, marks=[pytest.mark.slow] if t in ("host memory", "disk") else []) for t in TIERS]
)
@cases("llama", "mistral-window", "gemma2", "gpt2", "lfm2", without=("packed, captured", "batching"))
@pytest.mark.usefixtures("short_steps")
def test_evicted_and_saved_blocks_come_back(runner: Runner, family: Any, tier: str, tmp_path: Path) -> None:
    options = {"num_blocks": 24} if tier == "file" else {"num_blocks": 12, **TIERS[tier], **windows_of(family)}
    if "disk" in options:
        options["disk"] = tmp_path
    with runner.enable(build(family), **options) as caching:
        handle = caching.handle
        for expected in (0, 144):
            for seed in range(1 if tier == "file" else 3):
                assert caching.check(prompt(150, seed), max_new_tokens=4) == expected
        with handle.salt("tenant"):
            assert caching.check(prompt(150), max_new_tokens=4) == 0
        assert (handle.stats().evictions > 0) or tier == "file"
        if tier == "file":
            assert handle.save(tmp_path / "blocks") == handle.stats().cached_blocks
        elif caching.document is None and family is not LFM2:  # some of its states were not evicted yet
            handle.reset()  # empties memory but not the disk
            assert caching.check(prompt(150), max_new_tokens=4) == (144 if "disk" in options else 0)
    if tier == "host memory":
        return
    with runner.enable(build(family), **options) as caching:  # another process
        if tier == "file":
            assert caching.handle.load(tmp_path / "blocks") > 0
            with caching.handle.salt("tenant"):
                assert caching.check(prompt(150), max_new_tokens=4) == 144
        longer = torch.cat([prompt(150), prompt(9, 1)], 1)
        assert caching.check(longer, max_new_tokens=4) == 144


@cases("llama", "gemma2", "lfm2")
@pytest.mark.usefixtures("short_steps")
def test_threads(runner: Runner, family: Any) -> None:
    prompts = [torch.cat([SHARED, prompt(9 + seed, seed)], 1) for seed in range(4)]
    with warnings.catch_warnings(), runner.enable(build(family), num_blocks=24, **windows_of(family)) as caching:
        warnings.simplefilter("ignore")  # there may be too few blocks for all
        want = [caching.ask(ids, alone=True, max_new_tokens=8)[0] for ids in prompts]

        def ask(first: int) -> None:
            for number in [*range(first, 4), *range(first)]:
                assert caching.ask(prompts[number], max_new_tokens=8)[0] == want[number]

        in_threads(ask, *range(3))
        assert caching.handle.stats().hit_tokens > 0


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers")
@cases("llama", "mistral-window", "gemma2", "lfm2", without=("batching",))
def test_interrupted_calls_hold_nothing(runner: Runner, family: Any) -> None:
    with warnings.catch_warnings(), runner.enable(build(family), num_blocks=40, **windows_of(family)) as caching:
        warnings.simplefilter("ignore")
        assert interrupted(caching, 30) > 8
