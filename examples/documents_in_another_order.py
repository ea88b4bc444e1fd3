"""Reuse retrieved documents that come in another order for each question.

A prefix cache computes all documents again after the first one that differs. `reuse="anywhere"` rotates their keys
to the new positions and computes a tenth of their tokens again. That is approximate: use it where a small loss is
harmless.
"""

import time

import torch
from small_model import DEVICE, article, load

from pc.integrations.huggingface import enable_prefix_caching

model, tokenizer = load()


def encode(text):
    """Return the token ids of a text."""
    return tokenizer.encode(text, add_special_tokens=False)


documents = [encode(article(*which)) for which in (("III", "IV"), ("IV", "V"), ("V", "VI"), ("VI", "VII"))]
worked = "Questions and short answers.\n\nQ: In what is the executive power vested?\nA: In a President.\n\n"
questions = (
    ((0, 1, 2, 3), "In what is the judicial power vested?"),
    ((2, 0, 3, 1), "How many witnesses convict of treason?"),
    ((3, 2, 1, 0), "Who may admit new States into the Union?"),
)
with enable_prefix_caching(model, num_blocks=1024, reuse="anywhere", recompute=0.1) as handle:
    for order, question in questions:
        ids = encode("The text:\n\n") + [token for number in order for token in documents[number]]
        ids += encode(f"\n\n{worked}Q: {question}\nA:")
        begin = time.perf_counter()
        tokens = model.generate(torch.tensor([ids], device=DEVICE), max_new_tokens=12, do_sample=False, pad_token_id=0)
        report, took = handle.last_requests[0], time.perf_counter() - begin
        fresh = report.prompt_tokens - report.cached_tokens - report.moved_tokens
        print(
            f"{report.prompt_tokens} tokens: {fresh} new, {report.moved_tokens} found elsewhere, "
            f"{report.repaired_tokens} of those computed again; {took:.1f} s"
        )
        print(f"  {question} {tokenizer.decode(tokens[0, len(ids) :]).strip().splitlines()[0]}")
