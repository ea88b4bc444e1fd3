"""Read a paged cache as StreamingLLM, eviction per head, Quest-like pages and lists of blocks per query do.

The cache is one layer of a Llama that read 1024 tokens of real text. Each method chooses which keys to keep. The
program compares the operator's result with the same choice computed densely in float64, and they agree. It also
compares the result with full attention. That difference is the method's own error, which falls as more is kept;
docs/quality.md has its effect on answers.
"""

import torch
from custom_model import BLOCK as SIZE
from custom_model import Llama
from paged_model import Scattered, ints
from small_model import DEVICE as device  # noqa: N811
from small_model import article, load

import pc

TOKENS = 1024
BLOCKS = TOKENS // SIZE


class Watched(Scattered):
    """A batch that records the queries of every layer."""

    def attend(self, layer, q, keys, values):
        queries.append(q)
        return super().attend(layer, q, keys, values)


model, tokenizer = load()
llama, queries, table = Llama(model, BLOCKS), [], ints([list(range(BLOCKS))])
text = torch.tensor(tokenizer.encode(article("II", "V"))[:TOKENS], device=device)
with torch.inference_mode():
    llama.hidden(text, Watched(torch.arange(TOKENS, device=device), table[0], TOKENS))
layer = len(queries) // 2
keys, values = llama.cache[layer]
KV_HEADS, (HEADS, DIM) = llama.kv_heads, queries[layer].shape[1:]
GROUP, SCALE = HEADS // KV_HEADS, DIM**-0.5
query, lens, starts = queries[layer][-1:], ints([TOKENS]), ints([0, 1])


def dense(live):
    """Return the query's attention over live keys `[KV_HEADS, TOKENS]`, and its weights."""
    q = query[0].double().view(KV_HEADS, GROUP, DIM)
    score = torch.einsum("hgd,thd->hgt", q, keys.flatten(0, 1).double()) * SCALE
    weights = score.masked_fill(~live[:, None], float("-inf")).softmax(-1)
    return torch.einsum("hgt,thd->hgd", weights, values.flatten(0, 1).double()).view(1, HEADS, DIM), weights


def of_blocks(chosen):
    """Return which keys are live for chosen blocks `[KV_HEADS, n]`."""
    live = torch.zeros(KV_HEADS, BLOCKS, dtype=torch.bool, device=device)
    return live.scatter_(1, chosen.long(), True).repeat_interleave(SIZE, 1)


full, mass = dense(torch.ones(KV_HEADS, TOKENS, dtype=torch.bool, device=device))


def report(name, kept, out, live):
    """Compare a result with the dense computation, and print its distance from full attention."""
    exact = dense(live)[0]
    assert (out - exact).abs().max() < 1e-4, name
    lost = (exact - full).norm() / full.norm()
    print(f"{name:28} {kept:5} tokens a head: as computed densely; {lost:.3f} from full attention")
    return lost


arguments = (query, keys, values, table, lens, starts)
errors = {}
for budget in (4, 16, 48):
    kept = budget * SIZE
    # StreamingLLM: the first tokens and the last ones.
    out = pc.sliding_window_attention(*arguments, SCALE, window=kept - 4, num_sink_tokens=4)
    t = torch.arange(TOKENS, device=device)
    live = ((t < 4) | (t >= TOKENS - (kept - 4))).expand(KV_HEADS, -1)
    report("StreamingLLM", kept, out, live)

    # Eviction per head by attention mass (H2O, SnapKV): heads keep different blocks; the table has a row per head.
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

assert errors[48] < errors[16] < errors[4], "more pages, less error"

# A list per query, as NSA-like models have in prefill: 64 queries at the end, each with the blocks nearest to it.
many = 64
queries = queries[layer][-many:]
means = keys.mean(1)
near = torch.einsum("qhgd,bhd->qhb", queries.view(many, KV_HEADS, GROUP, DIM), means)
positions = torch.arange(TOKENS - many, TOKENS, device=device)
near = near.masked_fill((torch.arange(BLOCKS, device=device) * SIZE > positions[:, None])[:, None], float("-inf"))
lists = near.topk(16).indices.sort().values
call = (queries, keys, values, table, lens, ints([0, many]), None, SCALE)
out = pc.sparse_gap_attention(*call, query_blocks=lists.int())
worst = 0.0
for i in (0, 17, many - 1):
    query, live = queries[i : i + 1], of_blocks(lists[i])
    live = live & (torch.arange(TOKENS, device=device) <= positions[i])
    worst = max(worst, float((out[i] - dense(live)[0][0]).abs().max()))
assert worst < 1e-4
print(f"a list per query              {16 * SIZE:5} tokens a head: as computed densely, for {many} queries in one call")
