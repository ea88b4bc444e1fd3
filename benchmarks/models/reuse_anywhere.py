"""Text that moved, with a trained model: time to the first token and loss, by the share that is computed again.

SmolLM2-135M-Instruct (`pc.demo.trained_model_folder`) answers the prompts of three workloads, one after another:

    order: six questions over the same five documents, each time in another order.
    agent: an agent's loop of twenty turns that keeps the latest tool results (`--kept`).
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..harness.experiment import Experiment, option
from ..harness.timing import over
from .load import NAME, trained_model, trained_tokenizer

ANSWER, TURNS = 8, 20


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


@dataclass
class Workload:
    """A function from a turn and the answers so far to a prompt, and the number of turns."""

    name: str
    size: int
    prompts: Any
    skipped: int = 1


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


def order(encode: Any, text: list[int], size: int, line: int, kept: int) -> Any:
    """Return six questions over five documents in changing order."""
    from pc.demo._workloads import QUESTIONS, WORKED

    pieces = cut(text[:size], 5, line)
    orders = ((0, 1, 2, 3, 4), (2, 0, 3, 1, 4), (4, 3, 2, 1, 0), (1, 2, 0, 4, 3), (3, 4, 1, 0, 2), (0, 4, 2, 3, 1))

    def prompt(turn: int, answers: Sequence[list[int]]) -> list[int]:
        body = [token for piece in orders[turn] for token in pieces[piece]]
        return encode("The text:\n\n") + body + encode(f"\n{WORKED}\n\nQ: {QUESTIONS[turn]}\nA:")

    return prompt, len(orders)


def agent(encode: Any, text: list[int], size: int, line: int, kept: int) -> Any:
    """Return twenty turns of a loop, in which the newest tool result and the latest `kept` others stay."""
    long = size // (kept + 1) - 40
    results = [text[i * long % (len(text) - long) :][:long] for i in range(TURNS)]

    def prompt(turn: int, answers: Sequence[list[int]]) -> list[int]:
        ids = encode("You look things up in a law and note in a few words what each part is about.\n")
        for number in range(turn + 1):
            ids += encode(f"\nCall {number + 1}: read(part={number + 1})\nResult:\n")
            ids += results[number] if turn - number <= kept else encode("(dropped)")
            ids += encode(f"\nNote {number + 1}: this part is about")
            ids += answers[number] if number < turn else []
        return ids

    return prompt, TURNS


def edit(encode: Any, text: list[int], size: int, line: int, kept: int) -> Any:
    """Return prompts of a text with a different sentence in its middle each time."""
    from pc.demo._workloads import QUESTIONS, WORKED

    body, names = text[:size], ("", "Ann", "the tall Mister Bell", "Carl", "a Daughter of the second Senator")

    def prompt(turn: int, answers: Sequence[list[int]]) -> list[int]:
        new = encode(f" This was added by {names[turn]}.\n") if names[turn] else []
        asked = encode(f"\n{WORKED}\n\nQ: {QUESTIONS[turn]}\nA:")
        return encode("The text:\n\n") + body[: size // 2] + new + body[size // 2 :] + asked

    return prompt, len(names)


class Said:
    """Makes a model say an answer, and notes when the first token could be chosen."""

    def __init__(self, answer: list[int] | None) -> None:
        self.answer, self.step, self.first = answer, 0, 0.0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.step:
            self.first = time.process_time()
        if self.answer is not None:
            chosen = torch.full_like(scores, -torch.inf)
            chosen[:, self.answer[self.step]] = 0
            scores = chosen
        self.step += 1
        return scores


def ask(model: Any, ids: list[int], answer: list[int] | None, handle: Any = None) -> Outcome:
    """Send one prompt through generate."""
    said, begin = Said(answer), time.process_time()
    got = model.generate(
        torch.tensor([ids]),
        max_new_tokens=ANSWER,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        logits_processor=[said],
        output_logits=True,
        return_dict_in_generate=True,
    )
    report = handle.last_requests[0] if handle is not None else None
    moved = report.moved_tokens if report else 0
    known = report.cached_tokens + moved - report.repaired_tokens if report else 0
    logits = torch.cat(list(got.logits)).log_softmax(-1)
    spoken = got.sequences[0, len(ids) :].tolist()
    return Outcome(len(ids), spoken, logits, said.first - begin, len(ids) - known, moved)


def run(model: Any, workload: Workload, share: float | None, exact: list[Outcome] | None) -> list[Outcome]:
    """Send all prompts of a workload; `share` None: exact prefix caching."""
    from pc.integrations.huggingface import enable_prefix_caching

    options = {} if share is None else {"reuse": "anywhere", "recompute": share}
    prompt, count = workload.prompts
    found: list[Outcome] = []
    with enable_prefix_caching(model, num_blocks=40 * workload.size // 16 // 4, **options) as handle:
        for turn in range(count):
            answers = [one.answer for one in (exact or found)]
            found.append(ask(model, prompt(turn, answers), exact[turn].answer if exact else None, handle))
    return found


def row(workload: Workload, found: list[Outcome], exact: list[Outcome], way: str, share: str) -> dict[str, str]:
    """Return the row of a way over all prompts that count."""
    found, exact = found[workload.skipped :], exact[workload.skipped :]
    kl = same = tokens = answers = 0.0
    for one, want in zip(found, exact, strict=True):
        kl += (want.logits.exp() * (want.logits - one.logits)).double().sum().item()
        equal = one.logits.argmax(-1) == want.logits.argmax(-1)
        same, tokens, answers = same + equal.sum().item(), tokens + len(equal), answers + bool(equal.all())
    ratio = over(*((one.seconds for one in both) for both in (found, exact)))
    return {
        "workload": workload.name, "size": str(workload.size), "way": way, "recompute": share,
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
    from pc.demo._models import read_document
    from pc.demo._workloads import line_end

    model, tokenizer = trained_model(), trained_tokenizer()

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    document = read_document()
    text = encode(document[document.index("Article II\n") :])
    for name in given.workloads:
        made = MAKERS[name](encode, text, given.size, line_end(tokenizer), given.kept)
        skipped = given.kept + 1 if name == "agent" else 1
        workload = Workload(name, given.size, made, skipped)
        exact = run(model, workload, None, None)
        yield row(workload, exact, exact, "prefix", "")
        if given.plain:
            own = ask(model, made[0](skipped, [one.answer for one in exact]), exact[skipped].answer)
            yield row(workload, [own] * (skipped + 1), exact[: skipped + 1], "all", "")
        for share in given.shares:
            yield row(workload, run(model, workload, share, exact), exact, "anywhere", f"{share:g}")


main = Experiment(
    "reuse_anywhere.csv",
    rows,
    {
        "workloads": option(list(MAKERS), choices=list(MAKERS)),
        "--size": option(2048, "tokens of text in a prompt, about"),
        "--kept": option(3, "results that an agent keeps besides the newest"),
        "--shares": option([0, 0.05, 0.1, 0.2, 1], "shares of moved text that are computed again", type=float),
        "--plain": option(False, "the model's own generate too, on one prompt"),
    },
    ("workload", "size", "way", "recompute"),
    ("transformers",),
).main
