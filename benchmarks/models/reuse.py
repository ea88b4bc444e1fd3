"""Generation on the CPU: transformers' own generate, generate over the prefix cache, and a cache kept by hand.

All ways alternate in one process, call by call. Times are CPU time. "by hand" keeps a DynamicCache of the document. It
is either copied for each question, as in transformers' documentation, or cropped after each question. Each prompt ends
in a new question; in a cold call the document is new too. An answer of 64 tokens is the beginning of an answer of 256,
plus the time after the last token. OMP_NUM_THREADS threads (1).

Examples:
    python -m benchmarks reuse [25M ...] [--prompts 8 256 2048 10240]
    python -m benchmarks reuse SmolLM2 --prompts 512 2048 6144     (trained, over the Constitution of the United States)
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..harness.experiment import Experiment, option
from ..harness.timing import TokenClock, by_turns, over
from .load import random_llama, read_document, trained_model, trained_tokenizer

SIZES: dict[str, dict[str, Any]] = {
    "25M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "heads": (8, 4)},
    "100M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14, "heads": (12, 4)},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "heads": (4, 2)},
}
TRAINED = "SmolLM2"
PROMPTS = (8, 256, 2048, 10240)
QUESTION, ANSWERS = 24, (1, 64, 256)
ROUNDS = {8: 9, 256: 7, 512: 5, 2048: 3, 6144: 3, 10240: 3}
"""Number of rounds, by length of the document."""
PLAIN, PC, DEEP_COPY, CROPPED = WARM = ("plain", "pc", "by hand, deep copy", "by hand, cropped")


def build_model(size: str) -> Any:
    """Return a Llama with seeded random weights, or the trained one."""
    if size != TRAINED:
        return random_llama(**SIZES[size], vocab_size=8192, max_position_embeddings=16384)
    model = trained_model()
    model.generation_config.eos_token_id = None
    return model


def _peak(reset: bool = False) -> int:
    """Return the most memory in bytes that the process has had since the last reset."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


class Answer(NamedTuple):
    """The outcome of one call."""

    prompt_tokens: int
    tokens: torch.Tensor
    seconds: list[float]
    """CPU time from the beginning of the call to each token, and to its end."""
    peak: int
    """The most memory in bytes that the call took until its first token."""


class _Clock(TokenClock):
    """A clock that also notes the process's peak of memory at the first token of the answer."""

    peak = 0

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        self.peak = self.peak or (_peak() if len(self.times) > 1 else 0)


class Ways:
    """A model, one document, and what each way keeps of it.

    Args:
        model: With prefix caching enabled.
        seed: Seed of documents and questions.
        text: Token ids that these are taken from; None: random ones.
    """

    def __init__(self, model: Any, seed: int, text: torch.Tensor | None = None) -> None:
        self.model, self._text = model, text
        self.document = torch.zeros(1, 0, dtype=torch.long)
        self._generator = torch.Generator().manual_seed(seed)
        self._by_hand: Any = None

    def tokens(self, length: int) -> torch.Tensor:
        """Return tokens `[1, length]` that no other prompt has."""
        if self._text is None:
            return torch.randint(3, 8192, (1, length), generator=self._generator)
        begin = torch.randint(len(self._text), (1,), generator=self._generator)
        return self._text.roll(-int(begin))[None, :length]

    def prepare(self, length: int) -> None:
        """Take a new document, and let every way read it once."""
        from transformers import DynamicCache

        from pc.integrations.huggingface.api import CACHE

        self.document, self._by_hand = self.tokens(length), DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(self.document, **{CACHE: self._by_hand}, logits_to_keep=1)
        self.model.generate(self.document, do_sample=False, max_new_tokens=1)

    def ask(self, way: str, prompt: torch.Tensor, new_tokens: int) -> Answer:
        """Return the answer of one way."""
        from pc.integrations.huggingface.api import CACHE

        clock, before, begin = _Clock(time.process_time), _peak(reset=True), time.process_time()
        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new_tokens, "streamer": clock}
        if way == DEEP_COPY:
            options[CACHE] = copy.deepcopy(self._by_hand)
        elif way == CROPPED:
            options[CACHE] = self._by_hand
        generate = self.model.generate if way == PC else functools.partial(type(self.model).generate, self.model)
        tokens = generate(prompt, **options)
        if way == CROPPED:
            self._by_hand.crop(self.document.shape[1] - self._by_hand.get_seq_length())
        seconds = [at - begin for at in (*clock.times[1:], time.process_time())]
        return Answer(prompt.shape[1], tokens, seconds, clock.peak - before)


def measure(size: str, length: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each way, cold and warm.

    Raises:
        RuntimeError: A way gives other tokens.
    """
    from pc.integrations.huggingface import enable_prefix_caching

    model = build_model(size)
    with enable_prefix_caching(model, num_blocks=(2 * rounds + 4) * (length + 600) // 16) as handle:
        text = torch.tensor(trained_tokenizer().encode(read_document())) if size == TRAINED else None
        ways = Ways(model, length, text)
        for name in (PLAIN, PC):
            ways.ask(name, ways.tokens(8), 1)  # the first call of a process takes longer
        for names, warm in (((PLAIN, PC), False), (WARM, True)):
            if warm:
                ways.prepare(length)
            found = by_turns(
                functools.partial(ways.ask, new_tokens=ANSWERS[-1] if warm else 1),
                names,
                rounds,
                lambda own=QUESTION if warm else length: torch.cat([ways.document, ways.tokens(own)], 1),
            )
            for answers in zip(*found.values(), strict=True):
                if any(not torch.equal(answer.tokens, answers[0].tokens) for answer in answers):
                    raise RuntimeError(f"{size}, {length}: tokens differ")
            reused = sum(report.cached_tokens for report in handle.last_requests)
            label = f"{TRAINED}-135M, trained" if size == TRAINED else f"Llama {size}, random weights"
            for name, answers in found.items():
                row = {"model": f"{label}, float32", "call": "warm" if warm else "cold"}
                row |= {"way": name, "document_tokens": length, "prompt_tokens": answers[0].prompt_tokens}
                row |= _columns(answers, found[PLAIN], warm)
                row |= {"peak_bytes": int(statistics.median(answer.peak for answer in answers))}
                yield row | {"reused_tokens": reused if name == PC and warm else "", "rounds": rounds}


def _columns(own: Sequence[Answer], plain: Sequence[Answer], warm: bool) -> dict[str, str]:
    """Return seconds to the 1st, 64th and 256th token and of a token, with medians of ratios to plain generate."""

    def column(name: str, seconds: Callable[[Answer], float], measured: bool = True) -> dict[str, str]:
        if not measured:
            return {name: "", f"{name}_over_plain": ""}
        times = [[seconds(answer) for answer in each] for each in (own, plain)]
        return {name: f"{statistics.median(times[0]):.6f}", f"{name}_over_plain": f"{over(*times):.4f}"}

    def ended(tokens: int) -> Callable[[Answer], float]:
        """Return a function for the time until an answer of this length has ended."""
        return lambda answer: answer.seconds[tokens - 1] + answer.seconds[-1] - answer.seconds[-2]

    row = column("s_1", lambda answer: answer.seconds[0])
    for tokens in ANSWERS[1:]:
        row |= column(f"s_{tokens}", ended(tokens), warm)
    each = lambda answer: statistics.median(b - a for a, b in itertools.pairwise(answer.seconds[:-1]))  # noqa: E731
    return row | column("decode_s", each, warm)


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of each model and length."""
    for size in given.sizes:
        for length in given.prompts:
            yield from measure(size, length, min(ROUNDS.get(length, 1), given.rounds))


main = Experiment(
    "reuse.csv",
    rows,
    {
        "sizes": option(["25M", "100M"]),
        "--prompts": option(PROMPTS),
        "--rounds": option(9, "at most"),
    },
    ("model", "document_tokens"),
    ("transformers",),
).main
