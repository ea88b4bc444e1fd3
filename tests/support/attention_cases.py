"""Inputs and oracles for the attention operators: dense formulas in float64, nothing shared with the library."""

from __future__ import annotations

import dataclasses
import inspect
import math
import random
from typing import Any

import torch

NAN = float("nan")


@dataclasses.dataclass(frozen=True)
class Case:
    """One batch; `str(case)` is its test id."""

    lens: tuple[int, ...] = (1, 33, 200)
    queries: tuple[int, ...] = (1, 1, 40)
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    per_head_scales: bool = False
    causal: bool = True
    window: int = 0
    num_sink_tokens: int = 0
    scattered: bool = False
    holes: float = 0.0
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    padding: int = 0
    head_major: bool = False
    batch_invariant: bool = False
    bounds: bool = False
    seed: int = 0
    value_dim: int | None = None
    latent: bool = False  # values are the first columns of keys
    head_tables: bool = False  # a block table per KV head
    tree: bool = False  # queries are trees, whose depths are their positions where scattered
    top_k: int = 0  # blocks of each query's own list
    shared: int = 0  # blocks that all sequences begin with

    def __str__(self) -> str:
        fields = dataclasses.fields(self)
        changed = [(f.name, getattr(self, f.name)) for f in fields if getattr(self, f.name) != f.default]
        return " ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in changed) or "default"


@dataclasses.dataclass
class Batch:
    """Tensors of a case, and the options shared by all attention operators."""

    case: Case
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    positions: torch.Tensor | None
    scale: float
    options: dict[str, Any]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        if self.case.latent:
            return (self.query, self.key_cache[:, :, 0], self.block_tables, self.seq_lens, self.query_start_loc)
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
        )

    def to(self, device: torch.device) -> Batch:
        moved = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        for name, value in moved.items():
            if isinstance(value, torch.Tensor):
                moved[name] = value.to(device)
        moved["options"] = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in self.options.items()}
        return Batch(**moved)


def arguments_of(batch: Batch, op: str) -> dict[str, Any]:
    """Return the arguments of an operator for a batch, by name, without options that have defaults everywhere."""
    import pc

    case, span = batch.case, (batch.case.window, batch.case.num_sink_tokens)
    own: dict[str, tuple[Any, ...]] = {
        "paged_attention": (batch.scale,),
        "sliding_window_attention": (batch.scale, *span),
        "sparse_gap_attention": (batch.positions, batch.scale, *span),
        "latent_attention": (batch.scale, case.value_dim),
        "sparse_latent_attention": (batch.positions, batch.scale, case.value_dim, *span),
        "shared_prefix_attention": (case.shared, batch.scale),
    }
    names = inspect.signature(getattr(pc, op)).parameters
    return dict(zip(names, (*batch.tensors, *own[op]), strict=False)) | batch.options


def attend(batch: Batch, op: str = "paged_attention", with_lse: bool = True, **changes: Any) -> Any:
    """Call an operator for a batch and return its result, with the log-sum-exp if asked. `changes` are arguments."""
    import pc

    return getattr(pc, op + "_with_lse" * with_lse)(**arguments_of(batch, op) | changes)


def plan_of(batch: Batch, function: Any = None, **changes: Any) -> torch.Tensor:
    """Return the plan of a batch's attention, made by `pc.attention_plan` or by `function`."""
    import pc

    case = batch.case
    given = (*batch.tensors[-3:], case.block_size, case.causal, case.window, case.num_sink_tokens, batch.positions)
    options = {"num_shared_blocks": case.shared, "num_kv_heads": case.heads[1]}
    return (function or pc.attention_plan)(*given, **options | {"batch_invariant": case.batch_invariant} | changes)


def build(case: Case) -> Batch:
    """Random tensors of a case, with NaN wherever an operator must not look: past seq_len and in unused blocks."""
    generator = torch.Generator().manual_seed(case.seed)
    rand = random.Random(case.seed)
    num_heads, kv_heads = case.heads
    n, size = len(case.lens), case.block_size
    width = max([0, *(-(-length // size) for length in case.lens)]) + 1
    num_blocks = n * width + 3
    shape = (num_blocks, size, kv_heads, case.head_dim)
    value_shape = (*shape[:3], case.value_dim or case.head_dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    cache_dtype = case.cache_dtype or case.dtype
    if case.cache_dtype is None:
        key, value = normal(*shape), normal(*value_shape)
        key_scale = value_scale = None
    else:
        key, value = normal(*shape) * 20, normal(*value_shape) * 20
        count = kv_heads if case.per_head_scales else 1
        key_scale, value_scale = (torch.rand(m, generator=generator) * 0.05 + 0.02 for m in (count, 1))

    # Heads of a sequence have their blocks at different places.
    table_heads = kv_heads if case.head_tables else 1
    orders = [torch.randperm(num_blocks, generator=generator)[: n * width] for _ in range(table_heads)]
    tables = torch.stack(orders).view(table_heads, n, width).transpose(0, 1).to(torch.int32).contiguous()
    used = torch.zeros(num_blocks, size, kv_heads, dtype=torch.bool)
    for i, length in enumerate(case.lens):
        blocks = -(-length // size)
        for head in range(table_heads):
            heads = head if case.head_tables else slice(None)
            for b in range(blocks):
                if rand.random() < case.holes:
                    tables[i, head, b] = -1
                else:
                    used[tables[i, head, b], : min(size, length - b * size), heads] = True
        tables[i, :, blocks:] = 2**31 - 1  # never read
    tables[:, :, : case.shared] = tables[:1, :, : case.shared]
    if not case.head_tables:
        tables = tables[:, 0]
    if cache_dtype != torch.int8:
        key[~used], value[~used] = NAN, NAN
    key, value = key.to(cache_dtype), value.to(cache_dtype)
    if case.head_major:
        key, value = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (key, value))

    if case.latent:
        value = key[..., : case.value_dim]
    num_tokens = sum(case.queries)
    positions = None
    trees = [_tree(q, rand) for q in case.queries] if case.tree else []
    if case.scattered:
        rows = [sorted(rand.sample(range(length), q)) for length, q in zip(case.lens, case.queries, strict=True)]
        if case.tree:
            rows = [
                [length - len(own[0]) + depth for depth in own[0]] for length, own in zip(case.lens, trees, strict=True)
            ]
        positions = torch.tensor([p for row in rows for p in row] + [0] * case.padding, dtype=torch.int32)
    starts = [0]
    for q in case.queries:
        starts.append(starts[-1] + q)
    options: dict[str, Any] = {"causal": case.causal, "softcap": case.softcap}
    if case.alibi:
        options["alibi_slopes"] = -torch.rand(num_heads, generator=generator) / 4
    if case.sinks:
        options["sinks"] = normal(num_heads)
    if key_scale is not None:
        options |= {"k_scale": key_scale} if case.latent else {"k_scale": key_scale, "v_scale": value_scale}
    if case.batch_invariant:
        options["batch_invariant"] = True
    if case.bounds:
        options |= {"max_query_len": max(case.queries, default=0), "max_seq_len": max(case.lens, default=0)}
    if case.tree:
        words = -(-max([1, *case.queries]) // 32) + 1
        masks = torch.zeros(num_tokens + case.padding, words, dtype=torch.int32)
        for begin, (_, ancestors) in zip(starts, trees, strict=False):
            for row, own in enumerate(ancestors):
                for token in own:
                    masks[begin + row, token // 32] |= torch.tensor(1 << token % 32).int()
        options["tree_mask"] = masks
    if case.top_k:
        options["query_blocks"] = _lists(case, positions, starts, rand)
    batch = Batch(
        case,
        normal(num_tokens + case.padding, num_heads, case.head_dim).to(case.dtype),
        key,
        value,
        tables,
        torch.tensor(case.lens, dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        positions,
        case.head_dim**-0.5,
        options,
    )
    if case.tree or case.top_k:
        _poison_unattended(batch)
    return batch


def _tree(q: int, rand: random.Random) -> tuple[list[int], list[list[int]]]:
    """Depth and ancestors, itself included, of every token of a random tree."""
    depths: list[int] = []
    ancestors: list[list[int]] = []
    for token in range(q):
        parent = rand.randrange(-1, token)
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        ancestors.append([*(ancestors[parent] if parent >= 0 else []), token])
    return depths, ancestors


def _lists(case: Case, positions: torch.Tensor | None, starts: list[int], rand: random.Random) -> torch.Tensor:
    """Blocks drawn for every query and KV head, of all that its sequence has; some lists are short, some empty."""
    rows = starts[-1] + case.padding
    lists = torch.full((rows, case.heads[1], case.top_k), -1, dtype=torch.int32)
    for i, length in enumerate(case.lens):
        blocks = -(-length // case.block_size)
        for row in range(starts[i], starts[i + 1]):
            for head in range(case.heads[1]):
                count = min(blocks, case.top_k, rand.choice([0, case.top_k // 2, case.top_k, case.top_k]))
                lists[row, head, :count] = torch.tensor(sorted(rand.sample(range(blocks), count)), dtype=torch.int32)
    return lists


def _poison_unattended(batch: Batch) -> None:
    """NaN in present keys that no query attends to."""
    case = batch.case
    if batch.key_cache.dtype == torch.int8:
        return
    for i in range(len(case.lens)):
        seen = attended(batch, i).any(1)
        tables = batch.block_tables[i].view(-1, batch.block_tables.shape[-1]).expand(case.heads[1], -1)
        for head, t in (~seen).nonzero().tolist():
            block = int(tables[head, t // case.block_size])
            if block >= 0:
                for cache in (batch.key_cache, batch.value_cache):
                    cache[block, t % case.block_size, head] = NAN


def random_case(rand: random.Random) -> Case:
    """Return a case with some of all options, without sequences."""
    head_dims = (32, 40, 64, 64, 72, 80, 96, 112, 128, 128, 160, 192, 200, 256, 256, 320, 512)
    kv_heads, group = rand.choice([1, 1, 2, 3, 8]), rand.choice([1, 2, 3, 4, 5, 7, 8, 12, 16])
    return Case(
        heads=(kv_heads * group, kv_heads),
        head_dim=rand.choice(head_dims),
        value_dim=rand.choice([None, None, None, *head_dims[:-1]]),
        block_size=rand.choice((8, 16, 16, 32, 32, 64, 128, 5, 24, 48, 1, 100, 528)),
        dtype=rand.choice([torch.float32, torch.float16, torch.bfloat16, torch.bfloat16]),
        cache_dtype=rand.choice([None, None, None, torch.float8_e4m3fn, torch.int8]),
        per_head_scales=rand.random() < 0.5,
        causal=rand.random() < 0.8,
        window=rand.choice([0, 0, 1, rand.randint(2, 300)]),
        num_sink_tokens=rand.choice([0, 0, 4, rand.randint(1, 150)]),
        scattered=rand.random() < 0.3,
        holes=rand.choice([0.0, 0.0, 0.0, 0.3, 0.9]),
        softcap=rand.choice([0.0, 0.0, 5.0]),
        alibi=rand.random() < 0.25,
        sinks=rand.random() < 0.25,
        padding=rand.choice([0, 0, 1, 3]),
        head_major=rand.random() < 0.3,
        batch_invariant=rand.random() < 0.15,
        bounds=rand.random() < 0.3,
        head_tables=rand.random() < 0.2,
        tree=rand.random() < 0.15,
        top_k=rand.choice([0, 0, 0, 1, 3, 12]),
    )


def with_random_lengths(case: Case, rand: random.Random, work: float) -> Case:
    """Return the case with random sequences, whose scores take at most `work` multiplications by eight numbers."""
    kind = rand.choice(["decodes", "decodes", "mixed", "mixed", "one long", "prefills", "empty"])
    count = {"decodes": rand.randint(1, 12), "one long": 1, "empty": rand.randint(0, 2)}.get(kind, rand.randint(1, 5))
    counts = {"decodes": [1, 1, 1, 2, 5, 8], "prefills": [130], "mixed": [1, 4, 9, 40]}.get(kind, [2])
    lens, queries, left = [], [], 8 * work / (case.heads[0] * case.head_dim)
    for _ in range(count):
        boundary = rand.choice((0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200, 257))
        length = rand.randint(700, 3000) if kind == "one long" else rand.choice([boundary, rand.randint(1, 700)])
        length, top = min(length, max(1, int(left))), rand.choice(counts)
        # With more queries than tokens, those before the first token attend to no key.
        most = length if case.scattered or case.tree or length else 3
        q = max(0, min(rand.choice([rand.randint(0, top), top]), most, int(left / max(1, length))))
        left -= q * length
        lens.append(length)
        queries.append(q)
    return dataclasses.replace(case, lens=tuple(lens), queries=tuple(queries), seed=rand.randrange(10**6))


def attended(batch: Batch, i: int) -> torch.Tensor:
    """Which keys the queries of sequence `i` attend to, by definition: `[kv_heads, queries, seq_len]`."""
    case, length = batch.case, batch.case.lens[i]
    t, p = torch.arange(length), _positions(batch, i)[:, None]
    live = torch.ones(len(p), length, dtype=torch.bool)
    if case.causal:
        live &= t <= p
    if case.window:
        live &= (t > p - case.window) | (t < case.num_sink_tokens)
        if not case.causal:
            live &= t < p + case.window
    begin, end = (int(start) for start in batch.query_start_loc[i : i + 2])
    if case.tree:
        masks = batch.options["tree_mask"][begin:end]
        for own in range(max(0, length - (end - begin)), length):
            bit = own - (length - (end - begin))
            live[:, own] = (masks[:, bit // 32] >> (bit % 32)) & 1 != 0
    tables = batch.block_tables[i].view(-1, batch.block_tables.shape[-1])
    present = tables[:, t // case.block_size] >= 0
    live = (present[:, None] & live).expand(case.heads[1], -1, -1)
    if case.top_k:
        lists = batch.options["query_blocks"][begin:end].transpose(0, 1)
        live = live & (lists[..., None] == t // case.block_size).any(2)
    return live


def _positions(batch: Batch, i: int) -> torch.Tensor:
    begin, end = (int(start) for start in batch.query_start_loc[i : i + 2])
    if batch.positions is not None:
        return batch.positions[begin:end].long()
    return torch.arange(batch.case.lens[i] - (end - begin), batch.case.lens[i])


def formula(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    live: torch.Tensor,
    scale: float,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention `[queries, heads, d]` and its log-sum-exp `[heads, queries]`, in the dtype of the query.

    Keys and values are `[keys, heads, d]`, sinks `[heads]`. `live` and `bias` broadcast to `[heads, queries, keys]`.
    """
    score = torch.einsum("qhd,thd->hqt", query, key) * scale
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias
    score = score.masked_fill(~live, -math.inf)
    if sinks is not None:
        score = torch.cat([score, sinks.to(query.dtype).view(-1, 1, 1).expand(-1, len(query), 1)], -1)
    lse = torch.logsumexp(score, -1) if score.shape[-1] else score.new_full(score.shape[:2], -math.inf)
    weight = torch.exp(score - lse.masked_fill(lse == -math.inf, 0.0)[..., None])[..., : len(key)]
    return torch.einsum("hqt,thd->qhd", weight, value), lse


def dense(batch: Batch, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the formula's result over gathered keys, and its log-sum-exp; all is computed in `dtype`."""
    case, query = batch.case, batch.query
    num_heads, kv_heads = case.heads
    out = torch.zeros((*query.shape[:2], batch.value_cache.shape[3]), dtype=dtype)
    lse = torch.full(query.shape[:2], -math.inf, dtype=dtype)
    for i, length in enumerate(case.lens):
        begin, end = int(batch.query_start_loc[i]), int(batch.query_start_loc[i + 1])
        t, p = torch.arange(length), _positions(batch, i)
        live = attended(batch, i)
        tables = batch.block_tables[i].view(-1, batch.block_tables.shape[-1]).expand(kv_heads, -1)
        place = tables[:, t // case.block_size].long().clamp(min=0).T, t[:, None] % case.block_size
        read = live.any(1).T[..., None]
        key, value = (
            torch.where(read, cache[(*place, torch.arange(kv_heads))].to(dtype), 0)
            for cache in (batch.key_cache, batch.value_cache)
        )
        if case.cache_dtype is not None:
            key = key * batch.options["k_scale"].to(dtype).view(-1, 1)
            value = value * batch.options["k_scale" if case.latent else "v_scale"].to(dtype).view(-1, 1)
        key, value = (x.repeat_interleave(num_heads // kv_heads, 1) for x in (key, value))
        bias = None
        if case.alibi:
            at = t.clone()
            if case.tree and length:
                at[length - len(p) :] = p
            bias = batch.options["alibi_slopes"].to(dtype).view(-1, 1, 1) * (at - p[:, None]).to(dtype)
        live = live.repeat_interleave(num_heads // kv_heads, 0)
        sinks = batch.options["sinks"] if case.sinks else None
        out[begin:end], row_lse = formula(
            query[begin:end].to(dtype), key, value, live, batch.scale, case.softcap, bias, sinks
        )
        lse[begin:end] = row_lse.T
    return out, lse


def check_error(out: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor, dtype: torch.dtype) -> None:
    """Check that a result errs at most twice as much as the formula does in `dtype`, plus one rounding."""
    error, eager_error = out.double().cpu() - exact, eager.double() - exact
    rounding = torch.finfo(dtype).eps * max(1.0, exact.abs().max().item())
    # In float32 both errors are those of the order of summation: one of many rows may be far out.
    roundings = 8 if dtype == torch.float32 else 1
    for name, measure, slack in (
        ("rms", lambda e: e.square().mean().sqrt(), 1),
        ("max", lambda e: e.abs().max(), roundings),
    ):
        found, budget = measure(error).item(), 2 * measure(eager_error).item() + slack * rounding
        assert found <= budget, f"{name} error {found:.3g}, budget {budget:.3g}"


def check(batch: Batch, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
    """Check a result by `check_error`, and its log-sum-exp to within 1e-3 of float64."""
    assert out.dtype == batch.query.dtype
    assert out.is_contiguous()
    exact, exact_lse = dense(batch)
    if exact.numel() == 0:
        assert out.shape == exact.shape
        return
    eager, _ = dense(batch, batch.case.dtype)
    check_error(out, exact, eager, batch.case.dtype)
    empty = exact_lse == -math.inf
    assert not out.cpu()[empty].any(), "a row with nothing to attend to is not 0"
    if lse is not None:
        assert lse.dtype == torch.float32
        assert torch.equal(lse.cpu() == -math.inf, empty)
        assert (lse.double().cpu() - exact_lse)[~empty].abs().max().item() <= 1e-3 if (~empty).any() else True


def check_merge(*parts: torch.Tensor) -> None:
    """Call merge_attention with two results and their log-sum-exps, and compare with float64."""
    import pc

    out, lse = pc.merge_attention(*parts)
    assert out.is_contiguous()
    lses = torch.stack([parts[1], parts[3]]).double()
    want = lses.logsumexp(0)
    weights = (lses - want.masked_fill(want == -math.inf, 0.0)).exp()[..., None]
    outs = torch.stack([parts[0], parts[2]]).double().masked_fill(weights == 0, 0.0)
    assert torch.equal(lse == -math.inf, want == -math.inf)
    assert torch.allclose(lse.double(), want, atol=1e-5, rtol=1e-6)
    eps = 2 * torch.finfo(out.dtype).eps
    assert torch.allclose(out.double(), (outs * weights).sum(0), atol=eps, rtol=eps)
