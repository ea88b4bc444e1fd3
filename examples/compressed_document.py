"""Read a long text once, keep half of its keys and values, and ask three questions.

The program prints memory and answers with and without compression. The last tokens of the text decide what is kept, so
some questions lose more than others.
"""

import torch
from small_model import DEVICE, article, load

from pc.integrations.huggingface import enable_prefix_caching

model, tokenizer = load()


def encode(text):
    """Return the token ids `[1, tokens]` of a text."""
    return torch.tensor([tokenizer.encode(text, add_special_tokens=False)], device=DEVICE)


worked = "Questions and short answers.\n\nQ: In what is the executive power vested?\nA: In a President.\n\n"
context = encode(f"The text:\n\n{article('II', 'III')}{article('III', 'IV')}\n\n{worked}")
questions = (
    "In what is the judicial power vested?",
    "On whose testimony is one convicted of treason?",
    "Who takes the place of a President who dies?",
)
with enable_prefix_caching(model, num_blocks=1024) as handle:
    for budget in (1.0, 0.5, 0.2):
        document = handle.compress(context, press="snapkv", budget=budget)
        counts = torch.tensor(document.kept)
        print(
            f"{budget:.0%} of {document.length} tokens: {document.nbytes / 2**20:.1f} MiB held, "
            f"{document.peak_nbytes / 2**20:.1f} MiB while it was read; heads keep {counts.min()} to {counts.max()}"
        )
        with document:
            for question in questions:
                prompt = torch.cat([context, encode(f"Q: {question}\nA:")], 1)
                tokens = model.generate(prompt, max_new_tokens=12, do_sample=False, pad_token_id=0)
                print(f"  {question} {tokenizer.decode(tokens[0, prompt.shape[1] :]).strip().splitlines()[:1]}")
