"""Random calls of generate with deterministic caching, whose logits must equal those of uncached calls bit by bit.

`make bits` runs 100 random histories for SmolLM2 and for a model with windows, in float32 and bfloat16. It compares
them with fresh processes that have no cache. `make bits SEED=... ARGS="gemma2 float32 10"` repeats the first 10.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import itertools
import multiprocessing
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from generate_cases import BY_NAME, CACHE, assert_nothing_held, left_padded, prompt
from torch.nn.modules.module import register_module_forward_pre_hook

from pc.demo._measure import MiddleFirst
from pc.integrations.huggingface import PrefixCaching, enable_prefix_caching

CHUNK = 32
TRAINED = "smollm2"


def build(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a family's tiny model, or the trained SmolLM2."""
    if name == TRAINED:
        from pc.demo import trained_model_folder

        model = transformers.AutoModelForCausalLM.from_pretrained(trained_model_folder(), dtype=dtype).eval()
    else:
        model = BY_NAME[name].build().to(dtype)
    model.generation_config.eos_token_id = None
    return model


def enable(model: Any, **options: Any) -> PrefixCaching:
    """Enable deterministic caching with blocks of 16 tokens and chunks of two blocks."""
    return enable_prefix_caching(model, **{"num_blocks": 64, "deterministic": True, "chunk": CHUNK} | options)


@torch.no_grad()
def in_chunks(model: Any, tokens: torch.Tensor, steps: int, behind: int = 1) -> list[torch.Tensor]:
    """Return the logits `[vocabulary]` of a prompt `[1, n]` and its greedy answer, with transformers' own cache."""
    cache, length = transformers.DynamicCache(config=model.config), tokens.shape[1]
    last = max(length - behind, 0) // CHUNK * CHUNK
    for begin in range(0, last + 1, CHUNK):
        part = tokens[:, begin : length if begin == last else begin + CHUNK]
        keep = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
        logits = [model(part, **{CACHE: cache}, use_cache=True, **keep).logits[0, -1].float()]
    while len(logits) < steps:
        logits.append(model(logits[-1].argmax()[None, None], **{CACHE: cache}, use_cache=True).logits[0, -1].float())
    return logits


def logits_of(model: Any, steps: int, **call: Any) -> list[list[torch.Tensor]]:
    """Return, for each row, the logits of its answer's tokens."""
    wanted = {"return_dict_in_generate": True, "output_logits": True, "do_sample": False, "max_new_tokens": steps}
    return [list(row) for row in zip(*model.generate(**wanted | call).logits, strict=True)]


def assert_bits(got: list[torch.Tensor], want: list[torch.Tensor], *where: Any) -> None:
    assert len(got) == len(want), where
    for step, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), (*where, step, (a - b).abs().max())


class StopError(Exception):
    """An interrupt in the middle of a forward pass."""


@contextlib.contextmanager
def interrupted(after: int) -> Iterator[None]:
    """Raise `StopError` in the block once `after` modules have run."""
    count = itertools.count()

    def stop(*_: Any) -> None:
        if next(count) >= after:
            raise StopError

    hook = register_module_forward_pre_hook(stop)
    try:
        with contextlib.suppress(StopError):
            yield
    finally:
        hook.remove()


class History:
    """Random calls with a small cache that is saved, closed and reopened. `reference` gives the expected logits."""

    def __init__(self, model: Any, folder: Path, reference: Callable[..., list[torch.Tensor]] | None = None) -> None:
        self.model, self.folder = model, folder
        self.reference = reference or functools.partial(in_chunks, model)
        self.known: dict[tuple[bytes, int], list[torch.Tensor]] = {}
        self.asked = self.cached = 0

    def run(self, seed: int, calls: int) -> None:
        """Make `calls` calls. Every third answer ends after whole chunks, and later prompts begin with answers."""
        chance = random.Random(seed)
        options: dict[str, Any] = {"num_blocks": chance.choice([14, 24, 60]), "reuse": chance.choice(["prefix", "gap"])}
        options["policy"] = MiddleFirst if options["reuse"] == "gap" else "default"
        options |= chance.choice([{}, {"host_blocks": 6}, {"disk": self.folder / "disk"}])
        handle, said = enable(self.model, **options), prompt(20)
        for _ in range(calls):
            steps = chance.choice([2, 2, CHUNK + 5])
            rows = [self._row(chance, said) for _ in range(chance.choice([1, 1, 1, 2]))]
            call = left_padded(*rows) if len(rows) > 1 else {"input_ids": rows[0]}
            match chance.randrange(6):
                case 0:
                    with interrupted(chance.randrange(60)):
                        self.model.generate(**call, max_new_tokens=steps)
                    assert_nothing_held(handle)
                case 1:
                    handle.save(self.folder / "blocks")
                    handle.disable()
                    handle = enable(self.model, **options)
                    handle.load(self.folder / "blocks")
                case _:
                    said = self._ask(handle, rows, call, seed, steps)
            assert_nothing_held(handle)
        handle.disable()

    def _row(self, chance: random.Random, said: torch.Tensor) -> torch.Tensor:
        text = said if chance.random() < 0.4 else prompt(120, chance.randrange(3))
        return torch.cat([text[:, : chance.randint(1, 140)], prompt(chance.randint(0, 20), chance.randrange(50))], 1)

    def _ask(self, handle: Any, rows: list[torch.Tensor], call: dict[str, Any], seed: int, steps: int) -> torch.Tensor:
        for row, got in zip(rows, logits_of(self.model, steps, **call), strict=True):
            key = (row.numpy().tobytes(), steps)
            if key not in self.known:
                self.known[key] = self.reference(row, steps)
            assert_bits(got, self.known[key], seed, row.shape, handle.last_requests)
            self.asked += len(got)
            said = torch.cat([row, torch.stack([step.argmax() for step in got])[None]], 1)
        self.cached += sum(report.cached_tokens for report in handle.last_requests)
        return said


def first_seed() -> int:
    """Return the environment's SEED, or the date as a number; print it."""
    seed = int(os.environ.get("SEED") or datetime.date.today().strftime("%Y%m%d"))
    print(f"SEED={seed}", flush=True)
    return seed


_fresh: Any = None  # the model of a process without a cache


def _load(name: str, dtype: torch.dtype, threads: int) -> None:
    global _fresh
    torch.set_num_threads(threads)
    _fresh = build(name, dtype)


def _answer(tokens: torch.Tensor, steps: int) -> list[Any]:
    return [step.numpy() for step in in_chunks(_fresh, tokens, steps)]


def run_histories(name: str, dtype: torch.dtype, count: int, seed: int, calls: int = 6) -> None:
    """Compare `count` histories with processes without a cache, a fresh one for every 20 histories."""
    model, begun, asked, cached = build(name, dtype), time.monotonic(), 0, 0
    for first in range(seed, seed + count, 20):
        with (
            tempfile.TemporaryDirectory() as folder,
            multiprocessing.get_context("spawn").Pool(1, _load, (name, dtype, torch.get_num_threads())) as fresh,
        ):

            def reference(tokens: torch.Tensor, steps: int, ask: Any = fresh.apply) -> list[torch.Tensor]:
                return [torch.from_numpy(step) for step in ask(_answer, (tokens, steps))]

            history = History(model, Path(folder), reference)
            for each in range(first, min(first + 20, seed + count)):
                history.run(each, calls)
        asked, cached = asked + history.asked, cached + history.cached
        done = min(first + 20, seed + count) - seed
        print(
            f"{name} {dtype}: {done} histories, {asked} logits equal, {cached} tokens of prompts cached, "
            f"{time.monotonic() - begun:.0f} s", flush=True,
        )  # fmt: skip


def main() -> None:
    """Run histories. The arguments are a model, a type and a number; without them, 100 histories of each run."""
    seed, given = first_seed(), sys.argv[1:]
    warnings.filterwarnings("ignore", message="prefix caching")
    for name in given[:1] or ["gemma2", TRAINED]:
        for dtype in given[1:2] or ["float32", "bfloat16"]:
            run_histories(name, getattr(torch, dtype), int(given[2]) if given[2:] else 100, seed)


if __name__ == "__main__":
    main()
