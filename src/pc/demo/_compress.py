"""`python -m pc demo --compress`, which compresses the document with several budgets and compares the answers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ._workloads import answer_ends

BUDGETS = (1.0, 0.5, 0.2)


def show_compressed(
    console: Console,
    model: Any,
    handle: Any,
    tokenizer: Any,
    questions: Sequence[str],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
) -> None:
    """Ask all questions about the document with each budget, and print a table of memory and one of answers.

    The document is the longest common prefix of the prompts. A budget of 1 keeps the whole document.
    """
    length = next(i for i, ids in enumerate(zip(*prompts, strict=False)) if len(set(ids)) > 1)
    context = torch.tensor([prompts[0][:length]], device=model.device)
    ends = answer_ends(model, tokenizer)
    options = {"max_new_tokens": max_new_tokens, "do_sample": False, "pad_token_id": tokenizer.pad_token_id}
    memory = Table("kept", "held", "while read", "a head keeps", "read in", "six answers in", title=f"{length} tokens")
    answers = Table("question", *(f"{budget:.0%}" for budget in BUDGETS), title="Answers")
    found: list[list[str]] = []
    for budget in BUDGETS:
        begin = time.perf_counter()
        document = handle.compress(context, budget=budget)
        read, said = time.perf_counter(), []
        with document:
            for prompt in prompts:
                ids = torch.tensor([prompt], device=model.device)
                tokens = model.generate(ids, eos_token_id=ends or None, **options)
                said.append(tokenizer.decode(tokens[0, len(prompt) :], skip_special_tokens=True).strip())
        counts, end = [count for layer in document.kept for count in layer], time.perf_counter()
        sizes = (f"{size / 2**20:.1f} MiB" for size in (document.nbytes, document.peak_nbytes))
        took = f"{read - begin:.1f} s", f"{end - read:.1f} s"
        memory.add_row(f"{budget:.0%}", *sizes, f"{min(counts)} to {max(counts)}", *took)
        found.append(said)
    for question, *row in zip(questions, *found, strict=True):
        answers.add_row(question, *row)
    console.print(memory)
    console.print(answers)
