"""Sparse attention from a paged cache: StreamingLLM, eviction per head, Quest-like pages and lists of blocks per query.

One layer of attention over 4096 cached tokens. Each method says which keys to keep; the operator's result is compared
with the same choice computed densely in float64 (they agree), and with full attention (the method's own error, which
falls as more is kept).
"""

import torch

import pc

TOKENS, HEADS, KV_HEADS, DIM, SIZE = 4096, 8, 2, 64, 16
BLOCKS, GROUP, SCALE = TOKENS // SIZE, HEADS // KV_HEADS, DIM**-0.5
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def ints(values):
    """An int32 tensor."""
    return torch.as_tensor(values, dtype=torch.int32, device=device)


# Neighbouring tokens have similar keys, as in text: what a query looks for is in a few blocks.
topics = torch.randn(BLOCKS // 2, 1, KV_HEADS, DIM, device=device).repeat_interleave(2, 0)
keys = 1.5 * topics + torch.randn(BLOCKS, SIZE, KV_HEADS, DIM, device=device)
values = torch.randn(BLOCKS, SIZE, KV_HEADS, DIM, device=device) + topics
query = torch.randn(1, HEADS, DIM, device=device) * 2
table, lens, starts = ints([list(range(BLOCKS))]), ints([TOKENS]), ints([0, 1])


def dense(live):
    """Attention of the query over keys that are live `[KV_HEADS, TOKENS]`, and the weights."""
    q = query[0].double().view(KV_HEADS, GROUP, DIM)
    score = torch.einsum("hgd,thd->hgt", q, keys.flatten(0, 1).double()) * SCALE
    weights = score.masked_fill(~live[:, None], float("-inf")).softmax(-1)
    return torch.einsum("hgt,thd->hgd", weights, values.flatten(0, 1).double()).view(1, HEADS, DIM), weights


def of_blocks(chosen):
    """Live keys of chosen blocks `[KV_HEADS, n]`."""
    live = torch.zeros(KV_HEADS, BLOCKS, dtype=torch.bool, device=device)
    return live.scatter_(1, chosen.long(), True).repeat_interleave(SIZE, 1)


full, mass = dense(torch.ones(KV_HEADS, TOKENS, dtype=torch.bool, device=device))


def report(name, kept, out, live):
    """Holds a result against the dense computation, and gives its distance from full attention."""
    exact = dense(live)[0]
    assert (out - exact).abs().max() < 1e-4, name
    lost = (exact - full).norm() / full.norm()
    print(f"{name:28} {kept:5} tokens a head: as computed densely; {lost:.3f} from full attention")
    return lost


arguments = (query, keys, values, table, lens, starts)
errors = {}
for budget in (16, 64, 192):
    kept = budget * SIZE
    # StreamingLLM: the first tokens and the last ones.
    out = pc.sliding_window_attention(*arguments, SCALE, window=kept - 4, num_sink_tokens=4)
    t = torch.arange(TOKENS, device=device)
    live = ((t < 4) | (t >= TOKENS - (kept - 4))).expand(KV_HEADS, -1)
    report("StreamingLLM", kept, out, live)

    # Eviction per head by attention mass (H2O, SnapKV): every head keeps other blocks; the table has a row per head.
    heavy = mass.sum(1).view(KV_HEADS, BLOCKS, SIZE).sum(-1).topk(budget).indices
    tables = torch.full((1, KV_HEADS, BLOCKS), -1, dtype=torch.int32, device=device)
    tables[0].scatter_(1, heavy, heavy.int())
    out = pc.sparse_gap_attention(query, keys, values, tables, lens, starts, None, SCALE)
    report("per-head eviction", kept, out, of_blocks(heavy))

    # Quest: a block's smallest and largest key, by element, bound every score in it; the best blocks are read.
    low, high = keys.amin(1), keys.amax(1)
    q = query[0].view(KV_HEADS, GROUP, 1, DIM)
    bound = torch.maximum(q * low.transpose(0, 1)[:, None], q * high.transpose(0, 1)[:, None]).sum(-1).amax(1)
    pages = bound.topk(budget).indices.sort().values
    out = pc.sparse_gap_attention(*arguments, None, SCALE, query_blocks=pages.int()[None])
    errors[budget] = report("Quest-like pages", kept, out, of_blocks(pages))

assert errors[192] < errors[64] < errors[16], "more pages, less error"

# A list per query, as NSA-like models have in prefill: 64 queries at the end, each with the blocks nearest to it.
many = 64
queries = torch.randn(many, HEADS, DIM, device=device)
means = keys.mean(1)
near = torch.einsum("qhgd,bhd->qhb", queries.view(many, KV_HEADS, GROUP, DIM), means)
positions = torch.arange(TOKENS - many, TOKENS, device=device)
near = near.masked_fill((torch.arange(BLOCKS, device=device) * SIZE > positions[:, None])[:, None], float("-inf"))
lists = near.topk(32).indices.sort().values
call = (queries, keys, values, table, lens, ints([0, many]), None, SCALE)
out = pc.sparse_gap_attention(*call, query_blocks=lists.int())
worst = 0.0
for i in (0, 17, many - 1):
    query, live = queries[i : i + 1], of_blocks(lists[i])
    live = live & (torch.arange(TOKENS, device=device) <= positions[i])
    worst = max(worst, float((out[i] - dense(live)[0][0]).abs().max()))
assert worst < 1e-4
print(f"a list per query              {32 * SIZE:5} tokens a head: as computed densely, for {many} queries in one call")
