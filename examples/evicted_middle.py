"""The middle of a cached sequence was evicted: its tokens alone are computed again, and all is as it was, exactly.

Blocks behind the hole are kept. Each evicted token attends to what is before it, at its own position, so that what is
written is what a whole prefill writes; a question behind it then gets the same states. Dropping the middle instead is
another text to the model.
"""

import torch
from paged_model import SIZE, VOCABULARY, PagedModel, device, ints

TEXT, QUESTION = 640, 16
model = PagedModel(num_blocks=96)
text = torch.randint(0, VOCABULARY, (TEXT + QUESTION,), device=device)
everything, blocks = torch.arange(TEXT + QUESTION, device=device), -(-(TEXT + QUESTION) // SIZE)

exact = model(text, everything, ints(range(blocks)), len(text))[-QUESTION:]
kept = model.caches[:, :, : TEXT // SIZE].clone()

# Two spans are evicted, and their memory is given to others.
table, holes = ints(range(blocks)), [*range(10, 16), *range(24, 26)]
for block in holes:
    table[block] = -1
    model.caches[:, :, block] = float("nan")
dropped = model(text[TEXT:], everything[TEXT:], table, len(text))

# New blocks in their place: the spans' tokens and the question's are the call's queries, in one forward pass.
for n, block in enumerate(holes):
    table[block] = blocks + n
missing = torch.cat([everything[block * SIZE : (block + 1) * SIZE] for block in holes])
rows = torch.cat([missing, everything[TEXT:]])
again = model(text[rows], rows, table, len(text))[-QUESTION:]

error = [float((found - exact).norm() / exact.norm()) for found in (dropped, again)]
print(f"{len(missing)} of {TEXT} tokens computed again: error of the question's states {error[1]:.7f}")
print(f"without them: {error[0]:.3f}")
assert error[1] < 1e-5
assert error[0] > 0.01
assert torch.allclose(model.caches[:, :, table[: TEXT // SIZE].long()], kept, atol=1e-4), "blocks of a whole prefill"
