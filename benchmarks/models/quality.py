"""The loss of a trained model whose cache holds less: every method against full attention in float32.

SmolLM2-135M (`pc.demo.trained_model_folder`) reads prompts with full attention, only through torch.ops.pc.*. A method
then chooses which keys and values of the prompt are kept, or which ones a query reads. The model reads the following
tokens over them, all in one pass. The rows have the perplexity and the mean KL divergence from full attention. They
also have the share of equal most likely tokens, and the share of answers that are the same word for word. A budget is a
share of the prompt's tokens; tokens after the prompt are always read. About 15 minutes on one core.

Examples:
    python -m benchmarks quality [alice constitution questions] [--methods snapkv Quest] [--budgets .05 .1 .2 .5]
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pc.integrations import presses

from ..harness.experiment import Experiment, option
from ..harness.inputs import paged_batch
from ..harness.tables import ROOT
from .load import NAME, alice, read_document, trained_model, trained_tokenizer

sys.path.insert(0, str(ROOT / "examples"))
from custom_model import BLOCK, Llama

ANSWERS = ("Vice President", "President", "two", "Congress", "Congress", "Constitution")
"""What a right answer to each of the demo's questions says."""


class Step:
    """Tokens at `positions` of a sequence that lies in blocks 0, 1, ...: a batch of `Llama`.

    Args:
        positions: `[tokens]` int64, ascending; position and slot are the same.
        attend: A layer's attention, from this step, the layer's number, its queries, keys and values.
    """

    def __init__(self, positions: torch.Tensor, attend: Attend) -> None:
        self.positions = self.slots = positions
        self.length = int(positions[-1]) + 1
        numbers = torch.arange(-(-self.length // BLOCK))
        self.table, self.lens, self.starts = paged_batch([self.length], [len(positions)], BLOCK, numbers)
        self._attend = attend

    def attend(self, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return self._attend(self, layer, q, keys, values)


Attend = Callable[[Step, int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def full(step: Step, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attend to all keys up to a query's own."""
    return torch.ops.pc.paged_attention(q, keys, values, step.table, step.lens, step.starts, q.shape[-1] ** -0.5)


def scattered(step: Step, layer: int, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **which: Any) -> Any:
    """Attend with queries at any position, with a table of the blocks that are left, or with lists of blocks."""
    table, positions = which.pop("table", step.table), step.positions.int()
    call = (q, keys, values, table, step.lens, step.starts, positions, q.shape[-1] ** -0.5)
    return torch.ops.pc.sparse_gap_attention(*call, **which)


def weights(q: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return attention `[kv_heads, group, queries, tokens]` of `[queries, heads, head_dim]` to a layer's blocks."""
    k = keys.flatten(0, 1)[: int(positions[-1]) + 1]
    scores = torch.einsum("qhgd,thd->hgqt", q.unflatten(1, (k.shape[1], -1)), k) * q.shape[-1] ** -0.5
    return scores.masked_fill_(torch.arange(len(k)) > positions[:, None], -math.inf).softmax(-1)


class Reading:
    """A prompt that was read with full attention: its keys and values, and its last queries.

    Args:
        llama: With blocks for the prompt, and for what follows.
        prompt: As many tokens as fill blocks.
        parts: Texts after the prompt: tokens, and the index of the first token that counts.
    """

    def __init__(self, llama: Llama, prompt: list[int], parts: Sequence[tuple[list[int], int]]) -> None:
        self.llama, self.prompt, self.parts = llama, torch.tensor(prompt), parts
        self.blocks = len(prompt) // BLOCK
        self.queries: list[torch.Tensor] = []  # of each layer the last, as presses take them
        self.read(self.prompt, torch.arange(len(prompt)), self._attend_and_note)
        self.exact = llama.cache[:, :, : self.blocks].clone()
        self.expected: list[torch.Tensor] = []

    def _attend_and_note(self, step: Step, layer: int, q: torch.Tensor, *cache: torch.Tensor) -> torch.Tensor:
        self.queries.append(q[-presses.EXPECTED :].transpose(0, 1))
        return full(step, layer, q, *cache)

    def read(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Write tokens to their places, and return their last hidden states."""
        return self.llama.hidden(tokens, Step(positions, attend))

    def log_probabilities(self, attend: Attend) -> Iterator[torch.Tensor]:
        """Yield the log-probabilities of each part, `[tokens that count, vocabulary]`."""
        for tokens, first in self.parts:
            at = len(self.prompt) + torch.arange(len(tokens))
            hidden = self.read(torch.tensor(tokens), at, attend)
            yield self.llama.head(hidden[first - 1 : -1]).log_softmax(-1)


@dataclass(frozen=True)
class Method:
    """A way to hold less of a prompt.

    Attributes:
        kind: The table that has the method.
        name: Name of the method.
        budget: Share of the prompt that it reads.
        begin: Changes a reading's cache as the method does, and returns the attention over it.
    """

    kind: str
    name: str
    budget: float
    begin: Callable[[Reading], Attend]


def keep_pressed(reading: Reading, budget: float, press: str) -> Attend:
    """Keep what `handle.compress` keeps: tokens by a press's scores, with budgets over the heads of a layer."""
    chosen = []
    for query, cache in zip(reading.queries, reading.exact, strict=True):
        keys, values = (part.flatten(0, 1).transpose(0, 1) for part in cache)
        chosen.append(presses.kept_tokens(press, query, keys, values, query.shape[-1] ** -0.5, budget))
    kept = torch.stack(chosen)  # [layers, kv_heads, tokens]
    count = reading.llama.cache[0, 0].shape[:2].numel()
    slots = torch.arange(count, dtype=torch.int32).expand(*kept.shape[:2], -1).clone()
    slots[..., : kept.shape[2]][~kept] = -1

    def attend(step: Step, layer: int, q: torch.Tensor, *cache: torch.Tensor) -> torch.Tensor:
        tokens = (part.view(-1, 1, *part.shape[2:]) for part in cache)  # blocks of one token
        return scattered(step, layer, q, *tokens, table=slots[layer : layer + 1, :, : step.length])

    return attend


def choose(reading: Reading, budget: float, score: Callable[..., torch.Tensor], whole: int = 0) -> Attend:
    """Let each query read the blocks with its highest scores for a KV head; the first layers read all."""
    count = max(1, round(budget * reading.blocks))

    def attend(step: Step, layer: int, q: torch.Tensor, *cache: torch.Tensor) -> torch.Tensor:
        if layer < whole:
            return full(step, layer, q, *cache)
        best = score(step, layer, q, cache[0]).topk(count).indices.sort().values
        own = torch.arange(reading.blocks, step.table.shape[1]).expand(*best.shape[:2], -1)
        return scattered(step, layer, q, *cache, query_blocks=torch.cat([best, own], -1).int())

    return attend


def choose_pages(reading: Reading, budget: float) -> Attend:
    """Choose, like Quest, by bounds on scores: a block's smallest and largest key. Two layers read all."""
    low, high = reading.exact[:, 0].amin(2), reading.exact[:, 0].amax(2)

    def score(step: Step, layer: int, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        q = q.unflatten(1, (keys.shape[2], -1))
        up = torch.einsum("qhgd,bhd->qhgb", q.clamp(min=0), high[layer])
        return (up + torch.einsum("qhgd,bhd->qhgb", q.clamp(max=0), low[layer])).amax(2)

    return choose(reading, budget, score, whole=2)


def choose_best(reading: Reading, budget: float) -> Attend:
    """Choose the blocks with most attention, known from computing all of it: a bound for other choices."""

    def score(step: Step, layer: int, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        mass = weights(q, keys, step.positions).sum(1).transpose(0, 1)
        return mass[..., : len(reading.prompt)].unflatten(-1, (-1, BLOCK)).sum(-1)

    return choose(reading, budget, score)


def quantize(reading: Reading, dtype: torch.dtype) -> Attend:
    """Store keys and values in 8 bits, with a scale for each layer and KV head."""
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scales = reading.exact.abs().amax((2, 3, 5)) / limit
    codes = torch.zeros(reading.llama.cache.shape, dtype=dtype)

    def write(layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        new = (part.flatten(0, 1)[slots] for part in (keys, values))
        torch.ops.pc.reshape_and_cache(*new, *codes[layer], slots, *scales[layer])

    for layer, cache in enumerate(reading.exact):
        write(layer, *cache, torch.arange(len(reading.prompt)))

    def attend(step: Step, layer: int, q: torch.Tensor, *cache: torch.Tensor) -> torch.Tensor:
        write(layer, *cache, step.slots)
        call = (q, *codes[layer], step.table, step.lens, step.starts, q.shape[-1] ** -0.5)
        return torch.ops.pc.paged_attention(*call, k_scale=scales[layer, 0], v_scale=scales[layer, 1])

    return attend


def methods(budgets: Sequence[float]) -> Iterator[Method]:
    """Yield all methods, the cheapest first."""
    for name in ("float8_e4m3fn", "int8"):
        yield Method("cache", name, 1, functools.partial(quantize, dtype=getattr(torch, name)))
    by_budget: dict[tuple[str, str], Callable[..., Attend]] = {
        ("chosen", "Quest-like pages"): choose_pages,
        ("chosen", "best blocks"): choose_best,
    }
    for press in presses.SCORES:
        by_budget["pressed", press] = functools.partial(keep_pressed, press=press)
    for (kind, name), begin in by_budget.items():
        for budget in budgets:
            yield Method(kind, name, budget, functools.partial(begin, budget=budget))


@torch.inference_mode()
def measure(reading: Reading, method: Method | None, right: Sequence[bool] = ()) -> dict[str, str]:
    """Return the columns of a row over all parts of a reading; without a method, full attention is measured."""
    loss = divergence = tokens = same = 0.0
    answers = []
    reading.llama.cache[:, :, : reading.blocks] = reading.exact
    attend = method.begin(reading) if method else full
    for number, found in enumerate(reading.log_probabilities(attend)):
        part, first = reading.parts[number]
        if not method:
            reading.expected.append(found)
        expected = reading.expected[number]
        equal = found.argmax(-1) == expected.argmax(-1)
        loss -= found.gather(1, torch.tensor(part[first:])[:, None]).double().sum().item()
        divergence += (expected.exp() * (expected - found)).double().sum().item()
        same, tokens = same + equal.sum().item(), tokens + len(equal)
        answers.append(bool(equal.all()))
    return {
        "tokens": f"{tokens:.0f}",
        "perplexity": f"{math.exp(loss / tokens):.4f}",
        "kl": f"{divergence / tokens:.3g}",
        "same_top1": f"{same / tokens:.4f}",
        "answers": str(sum(a and r for a, r in zip(answers, right, strict=True))) if right else "",
        "questions": str(len(right)) if right else "",
    }


def questions(llama: Llama, tokenizer: Any) -> tuple[Reading, list[bool]]:
    """Return the demo's text with its questions and full attention's answers, and which answers are right."""
    from pc.demo import _workloads

    prompts = list(_workloads.document_prompts(tokenizer, _workloads.excerpt(read_document())))
    shared = next(i for i, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1) // BLOCK * BLOCK
    reading, right = Reading(llama, prompts[0][:shared], ()), []
    end, parts = _workloads.line_end(tokenizer), []
    for ids, answer in zip(prompts, ANSWERS, strict=True):
        part = ids[shared:]
        todo, at, said = part, shared, []
        while not said or (said[-1] not in (end, tokenizer.eos_token_id) and len(said) < 16):
            hidden = reading.read(torch.tensor(todo), at + torch.arange(len(todo)), full)
            said.append(int(llama.head(hidden[-1]).argmax()))
            todo, at = said[-1:], shared + len(part) + len(said) - 1
        print(tokenizer.decode(said).strip(), file=sys.stderr)
        right.append(answer in tokenizer.decode(said))
        parts.append((part + said, len(part)))
    reading.parts = parts
    return reading, right


TEXTS = ("alice", "constitution", "questions")
PROMPT, SCORED = 1792, 385
"""Tokens of prose before those that count, and tokens behind them, of which the first does not count."""


@torch.inference_mode()
def rows(given: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yield a row for each text and method."""
    llama, tokenizer = Llama(trained_model(), num_blocks=512), trained_tokenizer()
    chosen = [m for m in methods(given.budgets) if any(part in f"{m.kind} {m.name}" for part in given.methods)]
    text = {"alice": alice(), "constitution": read_document()}
    for name in given.texts:
        if name == "questions":
            reading, right = questions(llama, tokenizer)
        else:
            ids = tokenizer.encode(text[name])[: PROMPT + SCORED]
            reading, right = Reading(llama, ids[:PROMPT], [(ids[PROMPT:], 1)]), []
        for method in (None, *chosen):
            row = {"text": name, "kind": method.kind if method else "full", "method": method.name if method else "full"}
            row |= {"budget": f"{method.budget:g}" if method else "1"}
            row |= {"prompt_tokens": str(len(reading.prompt))}
            yield row | measure(reading, method, right) | {"model": NAME, "dtype": "float32"}


main = Experiment(
    "quality.csv",
    rows,
    {
        "texts": option(TEXTS, choices=TEXTS),
        "--methods": option([""], "parts of kinds or names"),
        "--budgets": option([0.05, 0.1, 0.2, 0.5]),
    },
    ("text", "kind", "method", "budget"),
    ("transformers",),
).main
