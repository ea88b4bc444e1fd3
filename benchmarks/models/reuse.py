"""Generation on the CPU: transformers' own generate, generate over the prefix cache, and a cache kept by hand.

All ways alternate in one process: call by call for the first token, token by token after it. Times are CPU time. "by
hand" keeps a DynamicCache of the document. It is either copied for each question, as in transformers' documentation,
or cropped after each question. Each prompt ends in a new question; in a cold call the document is new too. An answer of
64 tokens is the beginning of an answer of 256, plus the time after the last token.
OMP_NUM_THREADS threads (1).

Examples:
    python -m benchmarks reuse [25M ...] [--prompts 8 256 2048 10240]
    python -m benchmarks reuse SmolLM2 --prompts 512 2048 6144     (trained, over the Constitution of the United States)
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..harness.experiment import Experiment, option
from ..harness.timing import TokenClock, over, rotated
from .load import random_llama, trained_model, trained_tokenizer

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


def read_text() -> torch.Tensor:
    """Return the token ids of the demo's document."""
    from pc.demo._models import read_document

    return torch.tensor(trained_tokenizer().encode(read_document()))


class _Turns:
    """Lets several threads take turns, one token each: what slows the machine down slows all ways down."""

    def __init__(self, names: Sequence[str]) -> None:
        self._order = list(names)
        self._changed = threading.Condition()

    def wait(self, name: str) -> None:
        """Wait for this one's turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._order[0] == name)

    def next(self, name: str, over: bool = False) -> None:
        """End this one's turn; if it is over, it has no further turn."""
        with self._changed:
            self._order.remove(name)
            if not over:
                self._order.append(name)
            self._changed.notify_all()

    def pass_on(self, name: str) -> None:
        """End this one's turn, and wait for its next."""
        self.next(name)
        self.wait(name)


def _peak(reset: bool = False) -> int:
    """Return the most memory in bytes that the process has had since the last reset."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


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

    def ask(self, way: str, prompt: torch.Tensor, new_tokens: int, clock: TokenClock) -> torch.Tensor:
        """Return the answer; the clock notes the times of its tokens."""
        from pc.integrations.huggingface.api import CACHE

        options: dict[str, Any] = {"do_sample": False, "max_new_tokens": new_tokens, "streamer": clock}
        if way == PC:
            return self.model.generate(prompt, **options)  # type: ignore[no-any-return]
        if way == DEEP_COPY:
            options[CACHE] = copy.deepcopy(self._by_hand)
        elif way == CROPPED:
            options[CACHE] = self._by_hand
        answer: torch.Tensor = type(self.model).generate(self.model, prompt, **options)
        if way == CROPPED:
            self._by_hand.crop(self.document.shape[1] - self._by_hand.get_seq_length())
        return answer

    def first_token(self, way: str, prompt: torch.Tensor) -> tuple[float, torch.Tensor, int]:
        """Return CPU seconds to the first token, the answer, and the most memory in bytes that it took."""
        clock, before, begin = TokenClock(time.process_time), _peak(reset=True), time.process_time()
        answer = self.ask(way, prompt, 1, clock)
        return clock.times[1] - begin, answer, _peak() - before

    def decode(self, names: Sequence[str], prompt: torch.Tensor) -> dict[str, list[float]]:
        """Return CPU seconds of each token after the first, and of the work behind the last; ways alternate."""
        turns, seconds, answers = _Turns(names), {}, {}

        def work(name: str) -> None:
            turns.wait(name)
            clock = TokenClock(time.thread_time, lambda: turns.pass_on(name))
            try:
                answers[name] = self.ask(name, prompt, ANSWERS[-1], clock)
                times = [*clock.times[1:], time.thread_time()]
                seconds[name] = [b - a for a, b in itertools.pairwise(times)]
            finally:
                turns.next(name, over=True)

        threads = [threading.Thread(target=work, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(answers) < len(names) or any(not torch.equal(a, answers[names[0]]) for a in answers.values()):
            raise RuntimeError(f"tokens differ between {', '.join(names)}")
        return seconds


def measure(size: str, length: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each way, cold and warm.

    Raises:
        RuntimeError: A way gives other tokens.
    """
    from pc.integrations.huggingface import enable_prefix_caching

    model = build_model(size)
    with enable_prefix_caching(model, num_blocks=(2 * rounds + 4) * (length + 600) // 16) as handle:
        ways = Ways(model, length, read_text() if size == TRAINED else None)
        for name in (PLAIN, PC):
            ways.first_token(name, ways.tokens(8))  # the first call of a process takes longer
        for names, warm in (((PLAIN, PC), False), (WARM, True)):
            if warm:
                ways.prepare(length)
            seconds: dict[str, list[float]] = {name: [] for name in names}
            peaks: dict[str, list[int]] = {name: [] for name in names}
            for turn in range(rounds):
                prompt = torch.cat([ways.document, ways.tokens(QUESTION if warm else length)], 1)
                answers = []
                for name in rotated(names, turn):
                    took, answer, peak = ways.first_token(name, prompt)
                    seconds[name].append(took)
                    peaks[name].append(peak)
                    answers.append(answer)
                if any(not torch.equal(answer, answers[0]) for answer in answers):
                    raise RuntimeError(f"{size}, {length}: tokens differ")
            reused = sum(report.cached_tokens for report in handle.last_requests)
            steps = ways.decode(names, torch.cat([ways.document, ways.tokens(QUESTION)], 1)) if warm else {}
            for name in names:
                label = f"{TRAINED}-135M, trained" if size == TRAINED else f"Llama {size}, random weights"
                row = {"model": f"{label}, float32", "call": "warm" if warm else "cold"}
                row |= {"way": name, "document_tokens": length, "prompt_tokens": prompt.shape[1]}
                row |= _columns(seconds[name], seconds[PLAIN], steps.get(name, []), steps.get(PLAIN, []))
                row |= {"peak_bytes": int(statistics.median(peaks[name]))}
                yield row | {"reused_tokens": reused if name == PC and warm else "", "rounds": rounds}


def _columns(first: list[float], plain: list[float], steps: list[float], plain_steps: list[float]) -> dict[str, str]:
    """Return seconds to the 1st, 64th and 256th token and of a token, with medians of ratios to plain generate."""
    row = {"s_1": f"{statistics.median(first):.6f}", "s_1_over_plain": f"{over(first, plain):.4f}"}
    for tokens in ANSWERS[1:]:
        both = [
            statistics.median(one) + sum(each[: tokens - 1]) + sum(each[ANSWERS[-1] - 1 :])
            for one, each in ((first, steps), (plain, plain_steps))
        ]
        row |= {f"s_{tokens}": f"{both[0]:.6f}" if steps else ""}
        row |= {f"s_{tokens}_over_plain": f"{both[0] / both[1]:.4f}" if steps else ""}
    row["decode_s"] = f"{statistics.median(steps[:-1]):.6f}" if steps else ""
    return row | {"decode_s_over_plain": f"{over(steps[:-1], plain_steps[:-1]):.4f}" if steps else ""}


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
