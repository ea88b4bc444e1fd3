"""The runners of calls of generate as one table, so that a test makes the same promise for each of them."""

from __future__ import annotations

import contextlib
import functools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import batching_cases
import pytest
import torch
from batching_cases import GEMMA3, SHARP, batched
from generate_cases import (
    BY_NAME,
    DEEPSEEK,
    FAMILIES,
    HYBRIDS,
    LLAMA,
    PAGED,
    Family,
    assert_nothing_held,
    counting,
    interrupts,
    left_padded,
    plain,
    prompt,
    remembering,
)
from graph_double import TapeCapturer

from pc.integrations.huggingface import enable_continuous_batching, enable_prefix_caching
from pc.integrations.huggingface.runners import graphs, passes

DOCUMENT = prompt(48, 99)
"""The text of the compressed document, which keeps all of its tokens. So answers over it are the model's own."""
OWN_ATTENTION = [
    Family("bloom", "BloomConfig", "BloomForCausalLM", {"n_layer": 2, "n_head": 4}),
    Family("falcon", "FalconConfig", "FalconForCausalLM", {"alibi": True}),
    Family("diff-llama", "DiffLlamaConfig", "DiffLlamaForCausalLM"),
    DEEPSEEK,
    Family("wide heads", "LlamaConfig", "LlamaForCausalLM", {"head_dim": 512}),
    Family("phimoe", "PhimoeConfig", "PhimoeForCausalLM", {"num_local_experts": 2, "sliding_window": 16}),
]
"""Families that compute attention in other ways than those of `FAMILIES`."""
LFM2 = HYBRIDS[1]


@dataclass(frozen=True)
class Runner:
    """A runner.

    Attributes:
        name: Its name, which begins with "packed" if the device must seem to have kernels.
        families: The model families whose tokens are compared.
        options: The options of `enable_prefix_caching` with which it serves calls.
        few: A number of blocks that holds each call of `test_runners.CALLS`, but not all of them.
        warm: The tokens that a cached batch of 100, 30 and 5 tokens computes.
        sampled: Whether sampled tokens are those of generate for every seed.
    """

    name: str
    families: list[Any]
    options: dict[str, Any] = field(default_factory=dict)
    few: int = 16
    warm: int = 4 + 14 + 5
    sampled: bool = True

    @contextlib.contextmanager
    def enable(self, model: Any, **options: Any) -> Iterator[Caching]:
        """Enable caching of a model, and check at the end that this runner has served it and holds nothing."""
        with pytest.MonkeyPatch.context() as patch:
            if self.name.startswith("packed"):
                patch.setitem(graphs.CAPTURERS, "cpu", TapeCapturer)
            if self.name == "packed, captured":  # with plans, which operators check
                patch.setattr(passes, "needs_plan", lambda device: True)
            make = enable_continuous_batching if self.name == "batching" else enable_prefix_caching
            with make(model, **self.options | options) as handle:
                caching = Caching(self, model, handle)
                yield caching
                assert_nothing_held(handle)
                if self.name != "batching":
                    report = handle.graphs
                    assert (report.eager_steps > 0) == self.name.startswith("packed")
                    assert (report.replays > 0) == (self.name == "packed, captured")
                    assert (handle.stats().document_calls > 0) == (self.name == "documents")


WANTED: dict[tuple[Any, ...], list[Any]] = {}
"""The answers of the model's own generate, by model and call."""


@dataclass
class Caching:
    """A model over which one runner serves calls."""

    runner: Runner
    model: Any
    handle: Any

    def __post_init__(self) -> None:
        # The models of a family have equal weights, so all runners of a process share the model's own answers.
        self.weights = [float(weight.detach().double().sum()) for weight in self.model.parameters()]
        over = self.runner.name == "documents"
        self.document = self.handle.compress(DOCUMENT, budget=1.0) if over else None
        self.ahead = len(DOCUMENT[0]) if over else 0

    def calls(self, *prompts: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        """Return the calls of generate for some prompts: one, or one for each prompt over a document."""
        if self.ahead:
            return [{"input_ids": torch.cat([DOCUMENT, row], 1)} for row in prompts]
        return [left_padded(*prompts) if len(prompts) > 1 else {"input_ids": prompts[0]}]

    def ask(self, *prompts: torch.Tensor, alone: bool = False, **options: Any) -> tuple[list[Any], int]:
        """Return the answers, and how many tokens of the prompts were cached. `alone`: by the model's own generate."""
        options = {"max_new_tokens": 12} | options
        if self.runner.name == "batching":
            before, rows = self.handle.stats().hit_tokens, [row[0].tolist() for row in prompts]
            answers = (batching_cases.alone if alone else batched)(self.model, rows, options["max_new_tokens"])
            return answers, self.handle.stats().hit_tokens - before
        answers, cached = [], 0
        for call in self.calls(*prompts):
            torch.manual_seed(0)
            if alone:
                answers.append(plain(self.model, **call, **options).tolist())
                continue
            with self.document or contextlib.nullcontext():
                answers.append(self.model.generate(**call, **options).tolist())
            cached += sum(report.cached_tokens - self.ahead for report in self.handle.last_requests)
        return answers, cached

    def check(self, *prompts: torch.Tensor, **options: Any) -> int:
        """Compare the answers with the model's own, and return how many tokens of the prompts were cached."""
        answers, cached = self.ask(*prompts, **options)
        call = repr(([ids.tolist() for ids in prompts], options, self.ahead, self.runner.name == "batching"))
        wanted = WANTED.setdefault((repr(self.model.config), *self.weights, call), [])
        wanted += [] if wanted else self.ask(*prompts, alone=True, **options)[0]
        assert answers == wanted
        return cached

    def computed(self, *prompts: torch.Tensor, **options: Any) -> int:
        """Return how many tokens pass through the model's embedding during a call."""
        with counting(self.model) as seen:
            self.ask(*prompts, **options)
        return sum(seen)


def build(family: Any) -> Any:
    """Return a family's model, with long memory if it has recurrent states."""
    return remembering(family) if family in HYBRIDS else family.build()


CAPTURED = ["qwen3", "gemma2", "gemma3", "mistral-window", "gpt2", "gpt-oss", "mixtral", "opt"]
CHUNKS = {"deterministic": True, "chunk": 16}
RUNNERS = [
    Runner("copies", [*FAMILIES, *OWN_ATTENTION, LFM2], warm=3 * 14),  # short rows take less time in one padded pass
    Runner("packed", PAGED, {"cuda_graphs": False}),
    Runner("packed, captured", [BY_NAME[name] for name in CAPTURED], {"cuda_graphs": True}),
    Runner("deterministic", [LLAMA, BY_NAME["mistral-window"], LFM2], CHUNKS, few=10),
    Runner("documents", [LLAMA, BY_NAME["qwen3"]]),
    Runner("batching", [SHARP[0], GEMMA3], few=12, sampled=False),
]


def cases(*families: str, without: tuple[str, ...] = ()) -> Any:
    """Return a mark that runs a test for each runner, and each of its families, or of those that are named.

    The first family of each runner is quick, except with captured steps, whose double takes long. The others are slow.
    `without` names runners that do not make the promise.
    """
    found = []
    for runner in RUNNERS:
        own = [f for f in runner.families if not families or name_of(f) in families]
        for family in own if runner.name not in without else ():
            quick = family is own[0] and runner.name != "packed, captured"
            slow = [] if quick else [pytest.mark.slow]
            found.append(pytest.param(runner, family, id=f"{runner.name}-{name_of(family)}", marks=slow))
    return pytest.mark.parametrize(("runner", "family"), found)


def interrupted(caching: Caching, calls: int, seed: int = 0) -> int:
    """Make calls with a KeyboardInterrupt at a random moment; return how many had one. After each, nothing is held."""
    chance, count, rows = random.Random(seed), 0, (prompt(64), prompt(30, 1))
    want, times = caching.ask(*rows, alone=True, max_new_tokens=4)[0], []
    for _ in range(4):  # the first call, and one on a busy machine, takes much longer
        begin = time.perf_counter()
        caching.ask(*rows, max_new_tokens=4)
        times.append(time.perf_counter() - begin)
    with interrupts() as attempt:
        for number in range(calls):
            others = prompt(64, number % 5), prompt(30, number % 7)
            call = functools.partial(caching.ask, *others, max_new_tokens=4)
            count += attempt(chance.uniform(1e-5, min(times)), call) is None
            assert_nothing_held(caching.handle)
            if number % 10 == 0:
                assert caching.ask(*rows, max_new_tokens=4)[0] == want
    return count


def name_of(family: Any) -> str:
    return str(getattr(family, "family", family).name)
