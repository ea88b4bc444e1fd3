"""Text that moved, with a trained model: time to the first token and loss, by the share that is computed again.

SmolLM2-135M-Instruct (`pc.demo.trained_model_folder`) answers the prompts of three workloads, one after another:

    order: six questions over the same five documents, each time in another order.
    agent: an agent's loop of twenty turns that keeps the latest tool results.
    edit: a long text, with another edit in its middle for each of five prompts.

The reference is exact prefix caching with greedy answers of eight tokens. Every other way is forced to produce these
answers. The rows compare its next-token distributions: KL divergence, equal most likely tokens, and answers whose
tokens are all the most likely ones. Prompts from before anything moved do not count.

Examples:
    python -m benchmarks reuse_anywhere [order agent edit] [--size 2048] [--shares 0 .05 .1 .2 1]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..harness.experiment import Experiment, option
from ..harness.timing import TokenClock, over
from .load import NAME, read_document, trained_model, trained_tokenizer

ANSWER, TURNS, KEPT = 8, 20, 3
"""Tokens of an answer, turns of an agent, and the tool results that it keeps besides the newest."""


class Outcome(NamedTuple):
    """The outcome of one prompt."""

    prompt: int
    """Tokens of the prompt."""
    answer: list[int]
    logits: torch.Tensor
    seconds: float
    """CPU time to the first token."""
    computed: int
    moved: int


class Workload(NamedTuple):
    """Prompts of a workload."""

    prompt: Callable[[int, Sequence[list[int]]], list[int]]
    """Function from a turn and the answers so far to a prompt."""
    turns: int
    skipped: int = 1
    """Turns before anything has moved."""


def cut(ids: list[int], count: int, end: int) -> list[list[int]]:
    """Return pieces of a text of about equal length, each ending with a line."""
    pieces, begin = [], 0
    for number in range(1, count + 1):
        at = len(ids) * number // count
        while at < len(ids) and ids[at - 1] != end:
            at += 1
        pieces.append(ids[begin:at])
        begin = at
    return pieces


def order(encode: Any, text: list[int], size: int, line: int) -> Workload:
    """Return six questions over five documents in changing order."""
    from pc.demo._workloads import QUESTIONS, WORKED

    pieces = cut(text[:size], 5, line)
    orders = ((0, 1, 2, 3, 4), (2, 0, 3, 1, 4), (4, 3, 2, 1, 0), (1, 2, 0, 4, 3), (3, 4, 1, 0, 2), (0, 4, 2, 3, 1))

    def prompt(turn: int, answers: Sequence[list[int]]) -> list[int]:
        body = [token for piece in orders[turn] for token in pieces[piece]]
        return encode("The text:\n\n") + body + encode(f"\n{WORKED}\n\nQ: {QUESTIONS[turn]}\nA:")

    return Workload(prompt, len(orders))


def agent(encode: Any, text: list[int], size: int, line: int) -> Workload:
    """Return twenty turns of a loop, in which the newest tool result and the latest others stay."""
    long = size // (KEPT + 1) - 40
    results = [text[i * long % (len(text) - long) :][:long] for i in range(TURNS)]

    def prompt(turn: int, answers: Sequence[list[int]]) -> list[int]:
        ids = encode("You look things up in a law and note in a few words what each part is about.\n")
        for number in range(turn + 1):
            ids += encode(f"\nCall {number + 1}: read(part={number + 1})\nResult:\n")
            ids += results[number] if turn - number <= KEPT else encode("(dropped)")
            ids += encode(f"\nNote {number + 1}: this part is about")
            ids += answers[number] if number < turn else []
        return ids

    return Workload(prompt, TURNS, KEPT + 1)


def edit(encode: Any, text: list[int], size: int, line: int) -> Workload:
    """Return prompts of a text with a different sentence in its middle each time."""
    from pc.demo._workloads import QUESTIONS, WORKED

    body, names = text[:size], ("", "Ann", "the tall Mister Bell", "Carl", "a Daughter of the second Senator")

    def prompt(turn: int, answers: Sequence[list[int]]) -> list[int]:
        new = encode(f" This was added by {names[turn]}.\n") if names[turn] else []
        asked = encode(f"\n{WORKED}\n\nQ: {QUESTIONS[turn]}\nA:")
        return encode("The text:\n\n") + body[: size // 2] + new + body[size // 2 :] + asked

    return Workload(prompt, len(names))


def ask(model: Any, ids: list[int], answer: list[int] | None, handle: Any = None) -> Outcome:
    """Send one prompt through generate, which gives this answer, or the model's own one for None."""
    clock, begin = TokenClock(time.process_time), time.process_time()
    got = model.generate(
        torch.tensor([ids]),
        max_new_tokens=ANSWER,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        prefix_allowed_tokens_fn=None if answer is None else lambda _, said: [answer[len(said) - len(ids)]],
        streamer=clock,
        output_logits=True,
        return_dict_in_generate=True,
    )
    report = handle.last_requests[0] if handle is not None else None
    moved = report.moved_tokens if report else 0
    known = report.cached_tokens + moved - report.repaired_tokens if report else 0
    logits = torch.cat(list(got.logits)).log_softmax(-1)
    spoken = got.sequences[0, len(ids) :].tolist()
    return Outcome(len(ids), spoken, logits, clock.times[1] - begin, len(ids) - known, moved)


def run(
    model: Any, workload: Workload, size: int, share: float | None = None, exact: Sequence[Outcome] = ()
) -> list[Outcome]:
    """Send all prompts of a workload; `share` None: exact prefix caching."""
    from pc.integrations.huggingface import enable_prefix_caching

    options = {} if share is None else {"reuse": "anywhere", "recompute": share}
    found: list[Outcome] = []
    with enable_prefix_caching(model, num_blocks=40 * size // 16 // 4, **options) as handle:
        for turn in range(workload.turns):
            prompt = workload.prompt(turn, [one.answer for one in (exact or found)])
            found.append(ask(model, prompt, exact[turn].answer if exact else None, handle))
    return found


def columns(found: Sequence[Outcome], exact: Sequence[Outcome]) -> dict[str, str]:
    """Return the columns of a way over the prompts that count."""
    kl = same = tokens = answers = 0.0
    for one, want in zip(found, exact, strict=True):
        kl += (want.logits.exp() * (want.logits - one.logits)).double().sum().item()
        equal = one.logits.argmax(-1) == want.logits.argmax(-1)
        same, tokens, answers = same + equal.sum().item(), tokens + len(equal), answers + bool(equal.all())
    ratio = over(*((one.seconds for one in both) for both in (found, exact)))
    return {
        "prompts": str(len(found)),
        "prompt_tokens": f"{statistics.mean(one.prompt for one in found):.0f}",
        "computed_tokens": f"{statistics.mean(one.computed for one in found):.0f}",
        "moved_tokens": f"{statistics.mean(one.moved for one in found):.0f}",
        "ttft_cpu_s": f"{statistics.median(one.seconds for one in found):.3f}", "over_prefix_cpu": f"{ratio:.3f}",
        "kl": f"{max(kl, 0) / tokens:.3g}", "same_top1": f"{same / tokens:.4f}",
        "answers": f"{answers:.0f}", "tokens": f"{tokens:.0f}", "model": NAME, "dtype": "float32",
    }  # fmt: skip


MAKERS = {"order": order, "agent": agent, "edit": edit}


def rows(given: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Yield a row for each workload and way."""
    from pc.demo._workloads import line_end

    model, tokenizer = trained_model(), trained_tokenizer()

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    document = read_document()
    text = encode(document[document.index("Article II\n") :])
    for name in given.workloads:
        workload = MAKERS[name](encode, text, given.size, line_end(tokenizer))
        exact = run(model, workload, given.size)
        first = workload.skipped
        row = {"workload": name, "size": str(given.size)}
        yield row | {"way": "prefix", "recompute": ""} | columns(exact[first:], exact[first:])
        if given.plain:
            own = ask(model, workload.prompt(first, [one.answer for one in exact]), exact[first].answer)
            yield row | {"way": "all", "recompute": ""} | columns([own], exact[first : first + 1])
        for share in given.shares:
            found = run(model, workload, given.size, share, exact)
            yield row | {"way": "anywhere", "recompute": f"{share:g}"} | columns(found[first:], exact[first:])


main = Experiment(
    "reuse_anywhere.csv",
    rows,
    {
        "workloads": option(list(MAKERS), choices=list(MAKERS)),
        "--size": option(2048, "tokens of text in a prompt, about"),
        "--shares": option([0, 0.05, 0.1, 0.2, 1], "shares of moved text that are computed again", type=float),
        "--plain": option(False, "the model's own generate too, on one prompt"),
    },
    ("workload", "size", "way", "recompute"),
    ("transformers",),
).main
