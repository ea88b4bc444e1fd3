"""A cached document behind another prefix, a tenth of its tokens recomputed: position-independent reuse.

Blocks of the document are copied and their keys turned to the new positions; a few tokens are then computed again where
they stand: with CacheBlend those whose keys and values change most, with EPIC the first ones. The result is compared
with computing everything. Recomputing all of the document is exact, and costs what was to be saved.
"""

import torch
from paged_model import LAYERS, SIZE, VOCABULARY, PagedModel, device, ints

import pc

DOCUMENT, QUESTION, OLD, NEW = 640, 16, 32, 96
model = PagedModel(num_blocks=160)
document, question, old, new = (
    torch.randint(0, VOCABULARY, (n,), device=device) for n in (DOCUMENT, QUESTION, OLD, NEW)
)
text, everything = torch.cat([new, document, question]), torch.arange(NEW + DOCUMENT + QUESTION, device=device)
blocks = -(-len(text) // SIZE)

# The document is in the cache behind the old prefix; and everything computed, to compare with.
first = ints(range(blocks))
model(torch.cat([old, document]), everything[: OLD + DOCUMENT], first, OLD + DOCUMENT)
exact_table = ints(range(blocks, 2 * blocks))
exact = model(text, everything, exact_table, len(text))[-QUESTION:]

table = ints(range(2 * blocks, 3 * blocks))
source = first[OLD // SIZE : (OLD + DOCUMENT) // SIZE]
target = table[NEW // SIZE : (NEW + DOCUMENT) // SIZE]
deltas = ints([NEW - OLD] * len(source))


def reuse(turned, again):
    """The question's hidden states, with the document's blocks copied and its tokens `again` recomputed."""
    for keys, values in model.caches:
        pc.rotate_keys(keys, source, target, deltas * turned, model.inv_freq)
        pc.copy_blocks(values, source, target)
    rows = torch.cat([everything[:NEW], NEW + again.sort().values, everything[NEW + DOCUMENT :]])
    return model(text[rows], rows, table, len(text))[-QUESTION:]


def error(found):
    """Distance from the exact states."""
    return float((found - exact).norm() / exact.norm())


def changed_most(count):
    """The tokens whose keys and values differ most in the second layer: all that computing the first one tells."""
    stands, fresh = (model.caches[1, :, t[NEW // SIZE : (NEW + DOCUMENT) // SIZE].long()] for t in (table, exact_table))
    return (stands - fresh).flatten(1, 2).pow(2).sum((0, 2, 3)).topk(count).indices


nothing = torch.arange(0, device=device)
as_it_was = error(reuse(0, nothing))
turned = error(reuse(1, nothing))
tenth = changed_most(DOCUMENT // 10)
a_tenth = error(reuse(1, tenth))
beginning = error(reuse(1, torch.arange(DOCUMENT // 10, device=device)))
half = error(reuse(1, torch.arange(DOCUMENT // 2, device=device)))
whole = error(reuse(1, torch.arange(DOCUMENT, device=device)))
print(f"{DOCUMENT} tokens behind {NEW} others instead of {OLD}, {LAYERS} layers: error of the question's states")
for name, value in (
    ("blocks as they were", as_it_was),
    ("keys turned to their new positions", turned),
    ("and the first tenth recomputed", beginning),
    ("and the tenth that changes most", a_tenth),
    ("half", half),
    ("all of them", whole),
):
    print(f"  {name:38} {value:.6f}")
assert as_it_was > turned > max(a_tenth, beginning) > half > whole
assert whole < 1e-4, "all recomputed is exact"
