"""Generation on the CPU: transformers' generate as it is, over the prefix cache, and with a cache that is kept by hand.

    python -m benchmarks.reuse [25M ...] [--prompts 8 256 2048 10240]

All ways alternate in one process, in CPU time. "by hand" keeps a DynamicCache of the document: a deep copy for each
question, as transformers' documentation does, or one that is cropped afterwards and serves one question at a time. What
is asked about a document ends in a question of its own; in a cold call the document is new too. Answers of 1 and 64
tokens are the beginning of those of 256. OMP_NUM_THREADS threads (1). Writes results/cpu/reuse.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .conditions import conditions, version

SIZES = {
    "25M": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8},
    "100M": {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 14},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
}
HEADS = {"25M": (8, 4), "100M": (12, 4), "tiny": (4, 2)}
PROMPTS = (8, 256, 2048, 10240)
QUESTION, ANSWERS = 24, (1, 64, 256)
ROUNDS = {8: 9, 256: 7, 2048: 3, 10240: 1}
"""By length of the document."""
RESULTS = Path(__file__).resolve().parent / "results" / "cpu" / "reuse.csv"
COLD, WARM = ("plain", "pc, cold"), ("plain", "pc", "by hand, deep copy", "by hand, cropped")


def build_model(size: str) -> Any:
    """A Llama with seeded random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    given = dict(SIZES[size])
    heads, kv_heads = HEADS[size]
    config = LlamaConfig(
        vocab_size=8192,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=16384,
        eos_token_id=None,
        pad_token_id=0,
        **given,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


class _Clock:
    """A streamer that notes the CPU time at which tokens come; generate puts the prompt before them."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.process_time())

    def end(self) -> None:
        """Nothing is held back."""


def _peak(reset: bool = False) -> int:
    """The most memory that the process has had since it was last reset, in bytes."""
    if reset:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


class Ways:
    """One document, and what each way keeps of it.

    Args:
        model: Asked as it is.
        cached: The same with prefix caching enabled.
        document: `[1, length]`.
        seed: Of questions.
    """

    def __init__(self, model: Any, cached: Any, document: torch.Tensor, seed: int) -> None:
        self.model, self.cached, self.document = model, cached, document
        self._generator = torch.Generator().manual_seed(seed)
        self._by_hand: Any = None

    def tokens(self, length: int) -> torch.Tensor:
        """`[1, length]`, of nobody else."""
        return torch.randint(3, 8192, (1, length), generator=self._generator)

    def prepare(self) -> None:
        """Lets every way see the document once."""
        from transformers import DynamicCache

        self._by_hand = DynamicCache(config=self.model.config)
        with torch.no_grad():
            self.model(self.document, past_key_values=self._by_hand, logits_to_keep=1)
        self.cached.generate(self.document, do_sample=False, max_new_tokens=1)

    def ask(self, way: str, prompt: torch.Tensor) -> tuple[list[float], torch.Tensor, int]:
        """CPU seconds to each token of the answer, the answer, and bytes of memory it took at most."""
        clock, options = _Clock(), {}
        generate: Callable[..., torch.Tensor] = self.cached.generate if way.startswith("pc") else self.model.generate
        before = _peak(reset=True)
        begin = time.process_time()
        if way == "by hand, deep copy":
            options["past_key_values"] = copy.deepcopy(self._by_hand)
        elif way == "by hand, cropped":
            options["past_key_values"] = self._by_hand
        answer = generate(prompt, do_sample=False, max_new_tokens=ANSWERS[-1], streamer=clock, **options)
        if way == "by hand, cropped":
            self._by_hand.crop(self.document.shape[1] - self._by_hand.get_seq_length())
        return [at - begin for at in clock.times[1:]], answer, _peak() - before


def measure(size: str, length: int, rounds: int) -> list[dict[str, str]]:
    """A row for each way and answer: medians over rounds in which all ways take turns.

    Raises:
        RuntimeError: A way gives other tokens.
    """
    from pc.integrations.huggingface import enable_prefix_caching

    model = build_model(size)
    cached = build_model(size)
    rows: list[dict[str, str]] = []
    with enable_prefix_caching(cached, num_blocks=2 * (length + 600) * (rounds + 2) // 16) as handle:
        ways = Ways(model, cached, torch.zeros(1, 0, dtype=torch.long), length)
        for way in COLD:
            ways.ask(way, ways.tokens(8))  # the first call of a process takes longer
        for names, warm in ((COLD, False), (WARM, True)):
            if warm:
                ways.document = ways.tokens(length)
                ways.prepare()
            times: dict[str, list[list[float]]] = {name: [] for name in names}
            peaks: dict[str, list[int]] = {name: [] for name in names}
            for turn in range(rounds):
                prompt = torch.cat([ways.document, ways.tokens(QUESTION)], 1) if warm else ways.tokens(length)
                answers = []
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    seconds, answer, peak = ways.ask(name, prompt)
                    times[name].append(seconds)
                    peaks[name].append(peak)
                    answers.append(answer)
                if any(not torch.equal(answer, answers[0]) for answer in answers):
                    raise RuntimeError(f"{size}, {length}: tokens differ")
            reused = sum(report.cached_tokens for report in handle.last_requests)
            for name in names:
                row = {"model": f"Llama {size}, random weights, float32", "call": "warm" if warm else "cold"}
                row |= {
                    "way": name,
                    "document_tokens": str(length),
                    "prompt_tokens": str(length + (QUESTION if warm else 0)),
                }
                for tokens in ANSWERS:
                    row[f"s_{tokens}"] = f"{statistics.median(t[tokens - 1] for t in times[name]):.6f}"
                decode = statistics.median((t[-1] - t[0]) / (len(t) - 1) for t in times[name])
                row |= {"decode_s": f"{decode:.6f}", "peak_bytes": str(int(statistics.median(peaks[name])))}
                for column in (*(f"s_{tokens}" for tokens in ANSWERS), "decode_s"):
                    row[f"{column}_over_plain"] = f"{_ratio(times[name], times['plain'], column):.4f}"
                row |= {"reused_tokens": str(reused) if name == "pc" else "", "rounds": str(rounds)}
                rows.append(row | {"transformers": version("transformers")} | conditions("cpu"))
                print(*list(row.values()), flush=True)
    return rows


def _ratio(own: list[list[float]], plain: list[list[float]], column: str) -> float:
    """The median of the ratios of a round, in which both were measured one after the other."""

    def value(seconds: list[float]) -> float:
        if column == "decode_s":
            return (seconds[-1] - seconds[0]) / (len(seconds) - 1)
        return seconds[int(column.removeprefix("s_")) - 1]

    return statistics.median(value(a) / value(b) for a, b in zip(own, plain, strict=True))


def main() -> None:
    """Prints and writes the table; rows of other models and prompts stay."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", nargs="*", default=["25M", "100M"])
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS)
    parser.add_argument("--rounds", type=int, default=9, help="at most")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rows = list(csv.DictReader(arguments.output.open())) if arguments.output.exists() else []
    for size in arguments.sizes:
        for length in arguments.prompts:
            new = measure(size, length, min(ROUNDS.get(length, 1), arguments.rounds))
            own = {(row["model"], row["document_tokens"]) for row in new}
            rows = [row for row in rows if (row["model"], row["document_tokens"]) not in own] + new
            with arguments.output.open("w", newline="") as file:
                writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


if __name__ == "__main__":
    main()
