"""Run an agent that drops stale tool results, without computing the text after them again.

In every turn, a prefix cache loses everything after the first dropped result. `reuse="anywhere"` finds the rest, some
hundred positions earlier, and computes a tenth of it again. That is approximate.
"""

import torch
from small_model import DEVICE, article, load

from pc.integrations.huggingface import enable_prefix_caching

TURNS, KEPT = 6, 2
model, tokenizer = load()


def encode(text):
    """Return the token ids of a text."""
    return tokenizer.encode(text, add_special_tokens=False)


law = encode(article("II", "V"))
results = [law[turn * 300 : (turn + 1) * 300] for turn in range(TURNS)]
notes = []
with enable_prefix_caching(model, num_blocks=1024, reuse="anywhere", recompute=0.1) as handle:
    for turn in range(TURNS):
        ids = encode("You look things up in a law and note in a few words what each part is about.\n")
        for number in range(turn + 1):
            ids += encode(f"\nCall {number + 1}: read(part={number + 1})\nResult:\n")
            ids += results[number] if turn - number <= KEPT else encode("(dropped)")
            ids += encode(f"\nNote {number + 1}: this part is about")
            ids += notes[number] if number < turn else []
        tokens = model.generate(torch.tensor([ids], device=DEVICE), max_new_tokens=8, do_sample=False, pad_token_id=0)
        notes.append(tokens[0, len(ids) :].tolist())
        report = handle.last_requests[0]
        computed = report.prompt_tokens - report.cached_tokens - report.moved_tokens + report.repaired_tokens
        print(
            f"turn {turn + 1}: {report.prompt_tokens} tokens, {computed} computed, {report.moved_tokens} moved:"
            f" {tokenizer.decode(notes[-1]).strip().splitlines()[0]}"
        )
