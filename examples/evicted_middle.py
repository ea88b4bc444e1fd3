"""Compute the evicted middle of a cached text again, and nothing else; the result is exact.

Blocks after the hole are reused. Each evicted token attends to the tokens before it, at its own position, so the call
writes what a whole prefill writes. A question after the text then gets the same answer. Without the middle, the model
would read another text.
"""

import torch
from custom_model import BLOCK, Llama
from paged_model import ints, read
from small_model import DEVICE, article, load

model, tokenizer = load()
llama = Llama(model, num_blocks=256)
worked = "Q: In what is the executive power vested?\nA: In a President of the United States of America."
text = f"The text:\n\n{article('III', 'IV')}\n\n{worked}\n\nQ: In what court is the judicial power vested?\nA:"
tokens = torch.tensor(tokenizer.encode(text), device=DEVICE)
everything, blocks, total = torch.arange(len(tokens), device=DEVICE), -(-len(tokens) // BLOCK), len(tokens)
question = everything[-BLOCK:]

exact = read(llama, tokens, everything, ints(range(blocks)), total)[-BLOCK:]
kept = llama.cache[:, :, : total // BLOCK].clone()

# Two spans are evicted, and their memory is overwritten.
table, holes = ints(range(blocks)), [*range(1, 16), *range(20, 24)]
for block in holes:
    table[block] = -1
    llama.cache[:, :, block] = float("nan")
dropped = read(llama, tokens, question, table, total)

# The spans get new blocks. One forward pass computes their tokens and the question's.
for n, block in enumerate(holes):
    table[block] = blocks + n
missing = torch.cat([everything[block * BLOCK : (block + 1) * BLOCK] for block in holes])
again = read(llama, tokens, torch.cat([missing, question]), table, total)[-BLOCK:]

error = [float((found - exact).norm() / exact.norm()) for found in (dropped, again)]
words = [tokenizer.decode(found[-1].argmax()) for found in (exact, dropped, again)]
print(f"{len(missing)} of {total} tokens computed again: error of the question's logits {error[1]:.7f}")
print(f"without them: {error[0]:.3f}")
print(f"next word:{words[0]}; without them:{words[1]}; computed again:{words[2]}")
assert error[1] < 1e-5
assert error[0] > 0.01
assert words[2] == words[0]
assert torch.allclose(llama.cache[:, :, table[: total // BLOCK].long()], kept, atol=1e-3), "blocks of a whole prefill"
