"""Verify a tree of guessed tokens in one call: the same tokens as one by one, in fewer steps.

A tiny untrained model (one layer of attention with ALiBi) continues a prompt greedily. A draft proposes a tree with
wrong tokens and, at some depths, the right one. One `sparse_gap_attention` with a tree_mask scores the whole tree.
"""

import torch

import pc

VOCABULARY, HEADS, DIM, SIZE, NEW = 97, 4, 32, 16, 48
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
embedding = torch.randn(VOCABULARY, HEADS, DIM, device=device)
mix = torch.randn(3, HEADS * DIM, HEADS * DIM, device=device) / (HEADS * DIM) ** 0.5
slopes = torch.tensor([0.5**n for n in range(1, HEADS + 1)], device=device)
cache = torch.zeros(2, 32, SIZE, HEADS, DIM, device=device)
table = torch.randperm(32, device=device).int()[None]


def ints(*values):
    """Return an int32 tensor."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def slots(places):
    """Return the slots of positions of the sequence."""
    places = torch.tensor(places, device=device)
    return table[0].long()[places // SIZE] * SIZE + places % SIZE


def forward(tokens, begin, depths=None, ancestors=None):
    """Write `tokens` after `begin` cached ones, and return the next token after each."""
    x = embedding[torch.tensor(tokens, device=device)]
    query, key, value = (torch.nn.functional.normalize(x.flatten(1) @ m).view_as(x) * 6 for m in mix)
    pc.reshape_and_cache(key, value, *cache, slots(range(begin, begin + len(tokens))))
    lens, starts = ints(begin + len(tokens)), ints(0, len(tokens))
    positions = mask = None
    if ancestors is not None:
        positions = ints(*[begin + depth for depth in depths])
        mask = ints(*[sum(1 << token for token in own) for own in ancestors])[:, None]
    call = (query, *cache, table, lens, starts, positions, DIM**-0.5)
    out = pc.sparse_gap_attention(*call, alibi_slopes=-slopes, tree_mask=mask) + x
    return (out.flatten(1) @ embedding.flatten(1).T).argmax(-1).tolist()


prompt = torch.randint(0, VOCABULARY, (40,)).tolist()
plain = [forward(prompt, 0)[-1]]
while len(plain) < NEW:
    plain += forward(plain[-1:], len(prompt) + len(plain) - 1)

text, calls = [forward(prompt, 0)[-1]], 0
while len(text) < NEW:
    # The draft: the last token, then at each of three depths two guesses; it is right two times in three.
    tokens, depths, ancestors = [text[-1]], [0], [[0]]
    chain = 0
    for depth in range(1, 4):
        at = len(text) + depth - 1
        right = plain[at] if at < NEW and torch.rand(()) < 2 / 3 else int(torch.randint(0, VOCABULARY, ()))
        for guess in (int(torch.randint(0, VOCABULARY, ())), right):
            tokens.append(guess)
            depths.append(depth)
            ancestors.append([*ancestors[chain], len(tokens) - 1])
        chain = len(tokens) - 1
    begin = len(prompt) + len(text) - 1
    following, calls = forward(tokens, begin, depths, ancestors), calls + 1
    # Greedy verification: go down while a child is what the model would have said.
    node, path = 0, [0]
    while True:
        text.append(following[node])
        children = [n for n in range(len(tokens)) if depths[n] == depths[node] + 1 and ancestors[n][-2] == node]
        node = next((n for n in children if tokens[n] == following[node]), -1)
        if node < 0:
            break
        path.append(node)
    # Move the keys and values of accepted tokens to their final slots. The next step overwrites the slots after them.
    source, target = slots([begin + n for n in path]), slots(range(begin, begin + len(path)))
    for part in cache:
        pc.scatter_slots(pc.gather_slots(part, source), part, target)

assert text[:NEW] == plain, "the same tokens as one at a time"
print(f"{NEW} tokens as one at a time, in {calls} calls instead of {NEW - 1}")
