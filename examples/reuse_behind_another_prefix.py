"""Reuse a cached document after another prefix, and compute a tenth of its tokens again.

The program copies the document's blocks and rotates their keys to the new positions. Then it computes a few tokens
again: those whose keys and values change most, as CacheBlend does, or the first ones, as EPIC does. It compares the
result with computing everything. Computing the whole document again is exact and saves nothing.
"""

import torch
from custom_model import BLOCK, Llama
from paged_model import ints, read
from small_model import DEVICE, article, load

import pc

model, tokenizer = load()
llama = Llama(model, num_blocks=384)


def whole_blocks(text):
    """Return the token ids of a text, cut to whole blocks."""
    ids = tokenizer.encode(text)
    return torch.tensor(ids[: len(ids) // BLOCK * BLOCK], device=DEVICE)


old, document, new = (whole_blocks(article(*which)) for which in (("V", "VI"), ("III", "IV"), ("IV", "V")))
question = torch.tensor(
    tokenizer.encode("\n\nThe judicial power of the United States shall be vested in"), device=DEVICE
)
text, begin, end = torch.cat([new, document, question]), len(new), len(new) + len(document)
everything, blocks = torch.arange(len(text), device=DEVICE), -(-len(text) // BLOCK)

# Cache the document after the old prefix. Then compute the whole new text into other blocks, to compare with.
first = ints(range(blocks))
read(llama, torch.cat([old, document]), everything[: len(old) + len(document)], first, len(old) + len(document))
exact_table = ints(range(blocks, 2 * blocks))
exact = read(llama, text, everything, exact_table, len(text))[-len(question) :].log_softmax(-1)

table = ints(range(2 * blocks, 3 * blocks))
source = first[len(old) // BLOCK : (len(old) + len(document)) // BLOCK]
target = table[begin // BLOCK : end // BLOCK]
deltas = ints([begin - len(old)] * len(source))


def reuse(turned, again):
    """Copy the document's blocks, compute its tokens `again`, and return the mean KL divergence at the question.

    `turned` is 1 to rotate the keys to their new positions, or 0 to copy them as they are.
    """
    for keys, values in llama.cache:
        pc.rotate_keys(keys, source, target, deltas * turned, llama.body.rotary_emb.inv_freq)
        pc.copy_blocks(values, source, target)
    rows = torch.cat([everything[:begin], begin + again.sort().values, everything[end:]])
    found = read(llama, text, rows, table, len(text))[-len(question) :].log_softmax(-1)
    return float((exact.exp() * (exact - found)).sum(-1).mean())


def changed_most(count):
    """Return the tokens whose keys and values differ most in the second and third layer."""
    stands, fresh = (llama.cache[1:3, :, t[begin // BLOCK : end // BLOCK].long()] for t in (table, exact_table))
    return (stands - fresh).pow(2).sum((0, 1, 4, 5)).flatten().topk(count).indices


tokens = torch.arange(len(document), device=DEVICE)
tenth = len(document) // 10
as_it_was = reuse(0, tokens[:0])
turned = reuse(1, tokens[:0])
most = reuse(1, changed_most(tenth))
beginning = reuse(1, tokens[:tenth])
whole = reuse(1, tokens)
print(f"{len(document)} tokens after {len(new)} others instead of {len(old)}: mean KL divergence of what comes next")
for name, value in (
    ("blocks as they were", as_it_was),
    ("keys rotated to their new positions", turned),
    ("and the first tenth recomputed", beginning),
    ("and the tenth that changes most", most),
    ("all of them", whole),
):
    print(f"  {name:38} {value:.6f}")
assert whole < 1e-6 < min(turned, most, beginning), "all recomputed is exact"
