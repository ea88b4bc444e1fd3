"""Change a sentence in the middle of a long text, without computing the text after it again.

`reuse="anywhere"` finds that text some positions later, rotates its keys and computes a share of it again
(`recompute`). That is approximate: the program compares the next-token probabilities with those of computing
everything.
"""

import torch
from small_model import DEVICE, article, load

from pc.integrations.huggingface import enable_prefix_caching

model, tokenizer = load()


def encode(text):
    """Return the token ids of a text."""
    return tokenizer.encode(text, add_special_tokens=False)


text = encode(article("III", "V"))
middle = len(text) // 2
question = encode("\n\nThe judicial power of the United States shall be vested in")
before = torch.tensor([text + question], device=DEVICE)
added = encode(" The Speaker shall keep a Journal of this.\n")
after = torch.tensor([text[:middle] + added + text[middle:] + question], device=DEVICE)
options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
exact = model.generate(after, **options).logits[0].log_softmax(-1)
for share in (0.0, 0.1, 1.0):
    with enable_prefix_caching(model, num_blocks=1024, reuse="anywhere", recompute=share) as handle:
        model.generate(before, **options)
        found = model.generate(after, **options).logits[0].log_softmax(-1)
        report = handle.last_requests[0]
        computed = report.prompt_tokens - report.cached_tokens - report.moved_tokens + report.repaired_tokens
        loss = float((exact.exp() * (exact - found)).sum())
        print(f"{share:4.0%} again: {computed:4} of {report.prompt_tokens} tokens computed, KL divergence {loss:.6f}")
