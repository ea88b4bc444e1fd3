"""The calls that `pc check` runs, each with the results that it must give."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from .._attention.arguments import AttentionArgs
from . import oracle
from .oracle import Expected, Near

F16, BF16, F32, E4M3, INT8 = torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8
NAN = float("nan")
Options = dict[str, Any]


class CaseCall(NamedTuple):
    """The arguments of a call in host memory, and its expected results.

    Attributes:
        arguments: By name.
        returned: The expected results (`Expected`), in order.
        written: By name, the expected contents of the arguments that the operator writes; a list for a list.
        planned: Whether a plan is built before the call and passed to it.
    """

    arguments: dict[str, Any]
    returned: tuple[Any, ...] = ()
    written: Mapping[str, Any] = {}
    planned: bool = False


class Case(NamedTuple):
    """A named call of an operator: one row of the table that `pc check` prints.

    Attributes:
        operator: The operator whose kernels the case is about.
        name: What is special about the call.
        make: Builds the call.
        calls: The function to call, if it is not the operator.
    """

    operator: str
    name: str
    make: Callable[[], CaseCall]
    calls: str = ""


class Shape(NamedTuple):
    """The properties of a model's attention layers that kernels are compiled for."""

    dtype: torch.dtype = BF16
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 16
    windows: tuple[int, ...] = (50,)


class _Draw:
    """Random tensors, the same each time: the case's name is the seed."""

    def __init__(self, name: str) -> None:
        self._generator = torch.Generator("cpu").manual_seed(zlib.crc32(name.encode()))

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device="cpu", dtype=F32)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self._generator, device="cpu", dtype=F32)

    def order(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self._generator, device="cpu")

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator, device="cpu")

    def some(self, of: int, count: int) -> torch.Tensor:
        """Return `count` different numbers below `of`, ascending."""
        return self.order(of)[:count].sort().values


def _attention(
    operator: str,
    name: str,
    lens: tuple[int, ...],
    queries: tuple[int, ...],
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    value_dim: int | None = None,
    block_size: int = 16,
    *,
    latent: bool = False,
    holes: float = 0.0,
    head_tables: bool = False,
    head_major: bool = False,
    scattered: bool = False,
    tree: bool = False,
    top_k: int = 0,
    shared: int = 0,
    alibi: bool = False,
    sinks: bool = False,
    planned: bool = False,
    **options: Any,
) -> CaseCall:
    """Build a batch of sequences for an attention operator, with NaN in all data that the operator must not read.

    Args:
        operator: The operator.
        name: The name of the case. With the operator's, it seeds the random numbers.
        lens: Tokens of each sequence.
        queries: Queries of each sequence.
        dtype: The dtype of queries.
        cache_dtype: The dtype of a quantized cache; None: dtype.
        heads: Query heads and KV heads.
        head_dim: Features of a key.
        value_dim: Features of a value; None: head_dim.
        block_size: Token slots of a block.
        latent: Whether the cache has latent rows.
        holes: The share of absent blocks.
        head_tables: Whether each KV head has a table.
        head_major: Whether heads come before slots in a block's memory.
        scattered: Whether queries have random positions.
        tree: Whether the queries of a sequence are a random tree of drafts.
        top_k: Blocks in each query's list; 0: no lists.
        shared: Blocks that all sequences share.
        alibi: Whether heads have random ALiBi slopes.
        sinks: Whether heads have random sink logits.
        planned: Whether the call gets a plan.
        options: Other options of the operator.
    """
    draw, (num_heads, kv_heads) = _Draw(f"{operator} {name}"), heads
    n, width = len(lens), max(-(-length // block_size) for length in lens) + 1
    num_blocks = n * width + 3
    magnitude = 1.0 if cache_dtype is None else 20.0
    keys = draw.normal(num_blocks, block_size, kv_heads, head_dim) * magnitude
    values = draw.normal(num_blocks, block_size, kv_heads, value_dim or head_dim) * magnitude
    tables = _block_tables(draw, (kv_heads if head_tables else 1, n, width), block_size, shared, holes)
    for i, length in enumerate(lens):
        tables[i, :, -(-length // block_size) :] = 2**31 - 1  # never read
    starts = torch.tensor([0, *queries]).cumsum(0).to(torch.int32)
    total = int(starts[-1])
    arguments: dict[str, Any] = {
        "query": draw.normal(total + 1, num_heads, head_dim).to(dtype),  # the last row is padding
        "block_tables": tables if head_tables else tables[:, 0],
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "query_start_loc": starts,
        "scale": head_dim**-0.5,
        **options,
    }
    if "sparse" in operator:
        arguments["query_positions"] = None
    if tree:
        arguments |= _trees(draw, lens, queries)
    elif scattered:
        rows = [draw.some(length, count) for length, count in zip(lens, queries, strict=True)]
        arguments["query_positions"] = torch.cat((*rows, torch.zeros(1))).to(torch.int32)
    if top_k:
        arguments["query_blocks"] = _block_lists(draw, lens, starts.tolist(), kv_heads, top_k, block_size)
    if shared:
        arguments["num_shared_blocks"] = shared
    if alibi:
        arguments["alibi_slopes"] = -draw.uniform(num_heads) / 4
    if sinks:
        arguments["sinks"] = draw.normal(num_heads)
    if cache_dtype is not None:
        arguments["k_scale"] = draw.uniform(1 if latent else kv_heads) * 0.05 + 0.02
        arguments |= {} if latent else {"v_scale": draw.uniform(1) * 0.05 + 0.02}
    args = oracle.arguments_of(arguments | {"key_cache": keys, "value_cache": values})
    unused = ~_used_slots(args, attended=tree or top_k > 0)
    keys, values = (_as_stored(side, unused, cache_dtype or dtype, head_major) for side in (keys, values))
    if latent:
        arguments |= {"cache": keys[:, :, 0], "value_dim": value_dim}
    else:
        arguments |= {"key_cache": keys, "value_cache": values}
    return CaseCall(arguments, _results(operator, arguments, dtype), planned=planned)


def _results(operator: str, arguments: Options, dtype: torch.dtype) -> tuple[Near, ...]:
    """Return the expected results of an attention operator."""
    exact, lse = oracle.attention(arguments, torch.float64)
    returned = (Near(exact, oracle.attention(arguments, dtype)[0]), Near(lse, lse.float(), 1e-3))
    return returned if operator.endswith("_with_lse") else returned[:1]


def _as_stored(side: torch.Tensor, unused: torch.Tensor, dtype: torch.dtype, head_major: bool) -> torch.Tensor:
    """Return keys or values in the cache's dtype and memory layout, with NaN in unused slots if the dtype has NaN."""
    if dtype != INT8:
        side = side.masked_fill(unused[..., None], NAN)
    side = side.to(dtype)
    return side.transpose(1, 2).contiguous().transpose(1, 2) if head_major else side


def _block_tables(draw: _Draw, sizes: tuple[int, int, int], block_size: int, shared: int, holes: float) -> torch.Tensor:
    """Return random block tables `[num_seqs, tables of a sequence, width]`.

    Args:
        draw: The source of random numbers.
        sizes: Tables of a sequence, sequences, and the width of a table.
        block_size: Token slots of a block.
        shared: How many first blocks all sequences share.
        holes: The share of absent blocks. If it is not 0, each table also lacks one tile of 64 keys; neighbouring
            tables lack different ones.
    """
    count, n, width = sizes
    orders = [draw.order(n * width + 3)[: n * width] for _ in range(count)]
    tables = torch.stack(orders).view(-1, n, width).transpose(0, 1).to(torch.int32).contiguous()
    tables[:, :, :shared] = tables[:1, :, :shared]
    tables[draw.uniform(*tables.shape) < holes] = -1
    for i in range(n if holes else 0):
        for head in range(count):
            first = -(-64 // block_size) * (1 + (i + head) % 2)
            tables[i, head, first : first + -(-64 // block_size)] = -1
    return tables


def _used_slots(args: AttentionArgs, attended: bool) -> torch.Tensor:
    """Return which slots of a cache `[num_blocks, block_size, num_kv_heads]` hold a key of a sequence.

    With `attended`, keys to which no query attends do not count.
    """
    used = torch.zeros(args.key_cache.shape[:3], dtype=torch.bool)
    _, block_size, kv_heads = used.shape
    for i, length in enumerate(args.seq_lens.tolist()):
        t, tables = torch.arange(length), oracle.tables_of(args, i)
        read = oracle.attended(args, i).any(1) if attended else torch.ones(kv_heads, length, dtype=torch.bool)
        for head in range(kv_heads):
            numbers = tables[head % len(tables)].long()[t // block_size]
            live = read[head] & (numbers >= 0)
            used[numbers[live], (t % block_size)[live], head] = True
    return used


def _trees(draw: _Draw, lens: tuple[int, ...], queries: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return the masks and depths of a random tree in each sequence, with a row of padding."""
    masks, positions = [], []
    for length, count in zip(lens, queries, strict=True):
        own: list[int] = []  # of each token, a bit for each of its ancestors and for itself
        for token in range(count):
            parent = int(draw.integers(-1, token, 1)) if token else -1
            own.append((own[parent] if parent >= 0 else 0) | 1 << token)
        masks += own
        positions += [length - count + row.bit_count() - 1 for row in own]
    tree_mask, query_positions = (torch.tensor([*rows, 0]).int() for rows in (masks, positions))
    return {"tree_mask": tree_mask.view(-1, 1), "query_positions": query_positions}


def _block_lists(
    draw: _Draw, lens: tuple[int, ...], starts: list[int], kv_heads: int, top_k: int, block_size: int
) -> torch.Tensor:
    """Return random lists of blocks for each query and KV head, with a row of padding."""
    lists = torch.full((starts[-1] + 1, kv_heads, top_k), -1, dtype=torch.int32)
    for i, length in enumerate(lens):
        blocks = -(-length // block_size)
        for row in range(starts[i], starts[i + 1]):
            for head in range(kv_heads):
                chosen = draw.some(blocks, min(blocks, top_k - row % 2))
                lists[row, head, : len(chosen)] = chosen
    return lists


def _merge(dtype: torch.dtype) -> CaseCall:
    """Build a merge of two results, with rows whose log-sum-exp is -inf."""
    draw = _Draw("merge_attention")
    outs = [draw.normal(37, 5, 96)[..., :80].to(dtype) for _ in range(2)]
    lses = [draw.normal(37, 5) * 3 for _ in range(2)]
    lses[0][3], lses[1][5], lses[0][7], lses[1][7] = -torch.inf, -torch.inf, -torch.inf, -torch.inf
    outs[0][7], outs[1][7] = 0, 0
    call = {"out_a": outs[0], "lse_a": lses[0], "out_b": outs[1], "lse_b": lses[1]}
    exact, lse = oracle.merged(call, torch.float64)
    return CaseCall(call, (Near(exact, oracle.merged(call, dtype)[0]), Near(lse, lse.float(), 1e-5)))


def _cache(draw: _Draw, shape: tuple[int, ...], dtype: torch.dtype, padded: int = 0) -> torch.Tensor:
    """Return a cache with random contents and `padded` unused columns after each row."""
    return (draw.normal(*shape[:-1], shape[-1] + padded) * 5).to(dtype)[..., : shape[-1]]


def _slots(draw: _Draw, count: int, of: int) -> torch.Tensor:
    """Return `count` different slots below `of`, and replace two of them by -1."""
    slots = draw.order(of)[:count]
    slots[[1, count // 2]] = -1
    return slots


def _slots_of(blocks: torch.Tensor, size: int) -> torch.Tensor:
    """Return the slots of blocks of this size, -1 for those of an absent block."""
    return (blocks[:, None] * size + torch.arange(size)).masked_fill((blocks < 0)[:, None], -1).flatten()


def _taken(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the rows of a cache in these slots, and zeros for a slot of -1."""
    rows = cache.flatten(0, 1)[slots.clamp(min=0)]
    rows[slots < 0] = 0
    return rows


def _put(cache: torch.Tensor, rows: Expected, slots: torch.Tensor) -> Any:
    """Return the expected contents of a cache after rows were written to slots."""
    if isinstance(rows, Near):
        exact, rounded = (_put(cache.to(side.dtype), side, slots) for side in (rows.exact, rows.rounded))
        return rows._replace(exact=exact, rounded=rounded)
    out = cache.clone()
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if slot >= 0:
            out[slot // cache.shape[1], slot % cache.shape[1]] = row
    return out


def _write(
    name: str, dtype: torch.dtype, cache_dtype: torch.dtype | None, heads: int, head_dim: int, size: int
) -> CaseCall:
    """Build a call of `reshape_and_cache`. The cache is quantized if `cache_dtype` is given."""
    draw = _Draw(f"reshape_and_cache {name}")
    tokens, kept = 21, dtype if cache_dtype is None else cache_dtype
    sides = [draw.normal(tokens, heads + 1, head_dim)[:, :heads].to(dtype) for _ in range(2)]
    caches = [_cache(draw, (5, size, heads, head_dim), kept, 16) for _ in range(2)]
    slots, names = _slots(draw, tokens, 5 * size), ("key_cache", "value_cache")
    call = {"key": sides[0], "value": sides[1], **dict(zip(names, caches, strict=True)), "slot_mapping": slots}
    rows = sides
    if cache_dtype is not None:
        scales = (draw.uniform(heads) * 0.02 + 0.01, draw.uniform(1) * 0.02 + 0.01)
        call |= {"k_scale": scales[0], "v_scale": scales[1]}
        rows = [oracle.codes(side, scale, kept) for side, scale in zip(sides, scales, strict=True)]
    written = [_put(cache, side, slots) for cache, side in zip(caches, rows, strict=True)]
    return CaseCall(call, (), dict(zip(names, written, strict=True)))


def _angles(positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Return the rotation of each position and pair of features as a complex number, cos + i * sin."""
    angle = positions.double()[:, None] * inv_freq.double()
    return torch.complex(angle.cos(), angle.sin())


def _rotated(x: torch.Tensor, angles: torch.Tensor, interleaved: bool, first: int = 0) -> Near:
    """Return a tensor rotated by these angles, as an expected result; int8 codes are rotated like numbers."""
    exact = oracle.rotated(x, angles, torch.float64, interleaved, first)
    if x.dtype == INT8:
        exact = exact.clamp(-128, 127)
        return Near(exact, exact.round().to(INT8), 0.501)  # half a code
    return Near(exact, oracle.rotated(x, angles, x.dtype, interleaved, first))


def _rope(
    name: str,
    dtype: torch.dtype,
    interleaved: bool,
    head_dim: int,
    rotary_dim: int,
    size: int = 8,
    places: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> CaseCall:
    """Build a call of `rope_and_cache`. `places` are the slots and the positions, below 50, of its tokens."""
    draw, shape = _Draw(f"rope_and_cache {name}"), (9, size, 2, head_dim)
    slots, positions = places or (_slots(draw, 19, 9 * size), draw.integers(0, 50, 19))
    query, key, value = draw.normal(len(slots), 10, head_dim).to(dtype).split((6, 2, 2), 1)
    caches = [_cache(draw, shape, dtype, 16) for _ in range(2)]
    angles = _angles(torch.arange(50), 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim))
    cos_sin = torch.cat((angles.real, angles.imag), 1).float()
    angles = torch.complex(*cos_sin.double().chunk(2, 1))[positions]
    call = {
        **{"query": query, "key": key, "value": value, "positions": positions, "cos_sin": cos_sin},
        **{"key_cache": caches[0], "value_cache": caches[1], "slot_mapping": slots, "interleaved": interleaved},
    }
    keys = _put(caches[0], _rotated(key, angles, interleaved), slots)
    written = {"key_cache": keys, "value_cache": _put(caches[1], value, slots)}
    return CaseCall(call, (_rotated(query, angles, interleaved),), written)


def _move(
    operator: str,
    name: str,
    dtype: torch.dtype,
    is_neox: bool,
    pairs: int,
    first: int,
    latent: bool = False,
    head_dim: int = 64,
) -> CaseCall:
    """Build a call of `rotate_keys`, by block, or `move_slots`, by slot.

    With `latent` there are no values; without `pairs` keys are not rotated.
    """
    draw, size, by_block = _Draw(f"{operator} {name}"), 8, operator == "rotate_keys"
    cache, values = (_cache(draw, (12, size, 2, width), dtype, 16) for width in (head_dim, 32))
    sources = torch.tensor([0, 3, -1, 5, 6]) if by_block else torch.cat((torch.arange(5, 45), torch.tensor([-1, 3])))
    targets = torch.tensor([1, 3, 4, -1, 2]) if by_block else torch.cat((torch.arange(47, 87), torch.tensor([90, -1])))
    deltas, inv_freq = draw.integers(-40, 900, len(sources)).int(), 1000.0 ** (-torch.arange(pairs) / max(pairs, 1))
    unit = "ids" if by_block else "slots"
    call: dict[str, Any] = {"key_cache": cache, f"source_{unit}": sources, f"target_{unit}": targets}
    call |= {"deltas": deltas, "inv_freq": inv_freq if pairs else None, "is_neox": is_neox, "first": first}
    if by_block:
        sources, targets, deltas = *(_slots_of(ids, size) for ids in (sources, targets)), deltas.repeat_interleave(size)
    else:
        call["value_cache"] = None if latent else values
    keys, others = (_taken(side, sources) for side in (cache, values))
    rows = _rotated(keys, _angles(deltas, inv_freq), not is_neox, first) if pairs else keys
    written = {"key_cache": _put(cache, rows, targets)}
    if call.get("value_cache") is not None:
        written["value_cache"] = _put(values, others, targets)
    return CaseCall(call, (), written)


ROWS = ((3, 24), (5,), (2, 6))
"""Features of caches whose rows are moved: an even row, an odd one, and one with loose strides (unused columns)."""


def _stores(draw: _Draw, num_blocks: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return three caches, one for each of `ROWS`."""
    whole = [_cache(draw, (num_blocks, size, *features), dtype) for features in ROWS[:2]]
    return [*whole, _cache(draw, (num_blocks, size, *ROWS[2]), dtype, 3)]


def _moves(operator: str, dtype: torch.dtype) -> CaseCall:
    """Build a gather, scatter or copy; operators of lists take three caches, the others the one with loose strides."""
    draw, num_blocks, size, several = _Draw(operator), 9, 4, operator.endswith("_list")
    stores = _stores(draw, num_blocks, size, dtype)[0 if several else 2 :]
    if operator.startswith("copy"):
        ids = {"source_ids": torch.tensor([0, 3, 5, 8]), "target_ids": torch.tensor([1, 2, -1, 7])}
        sources, targets = (_slots_of(blocks, size) for blocks in ids.values())
        copies = [_put(store, _taken(store, sources), targets) for store in stores]
        return CaseCall(_named(several, cache=stores) | ids, (), _named(several, cache=copies))
    if "slots" in operator:
        slots = index = _slots(draw, 13, num_blocks * size)
        lead: tuple[int, ...] = (len(index),)
    else:
        index = _slots(draw, 6, num_blocks)
        slots, lead = _slots_of(index, size), (len(index), size)
    call = {"slot_mapping" if "slots" in operator else "block_ids": index} | _named(several, cache=stores)
    if operator.startswith("gather"):
        return CaseCall(call, tuple(_taken(store, slots).view(*lead, *store.shape[2:]) for store in stores))
    packed = [_cache(draw, (*lead, *store.shape[2:]), dtype) for store in stores]
    copies = [_put(store, rows.view(-1, *store.shape[2:]), slots) for store, rows in zip(stores, packed, strict=True)]
    return CaseCall(call | _named(several, source=packed), (), _named(several, cache=copies))


def _named(several: bool, **lists: list[torch.Tensor]) -> dict[str, Any]:
    """Return the arguments by name: the lists if `several`, otherwise the only tensor of each list."""
    return {f"{name}s" if several else name: tensors if several else tensors[0] for name, tensors in lists.items()}


def _join(operator: str, dtype: torch.dtype, placed: bool) -> CaseCall:
    """Build a call of `join_prefix` or `join_prefix_list`; with `placed`, new rows are in gaps between cached rows."""
    draw, size, lens, queries = _Draw(operator), 4, (11, 3, 9), (2, 3, 0)
    several = operator.endswith("_list")
    stores = _stores(draw, 9, size, dtype)[0 if several else 2 :]
    tables = draw.order(9).view(3, 3).int()
    tables[0, 1] = -1
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    news = [_cache(draw, (5, *store.shape[2:]), dtype) for store in stores]
    places = [torch.arange(length - count, length) for length, count in zip(lens, queries, strict=True)]
    if placed:
        places = [draw.some(length, count) for length, count in zip(lens, queries, strict=True)]
    begins = torch.tensor([0, *lens]).cumsum(0)
    slots = torch.cat([_slots_of(table, size)[:length] for table, length in zip(tables, lens, strict=True)])
    slots = torch.nn.functional.pad(slots, (0, 2), value=-1)
    at = torch.cat([begin + own for begin, own in zip(begins, places, strict=False)])
    joined = [_taken(store, slots).index_copy_(0, at, new) for store, new in zip(stores, news, strict=True)]
    call: dict[str, Any] = {"block_tables": tables, "seq_lens": torch.tensor(lens, dtype=torch.int32)}
    call |= {"query_start_loc": starts, "num_rows": sum(lens) + 2}
    call["new_positions"] = torch.cat(places).int() if placed else None
    return CaseCall(call | _named(several, cache=stores, new=news), tuple(joined))


def _flash_append(dtype: torch.dtype) -> CaseCall:
    """Build a call of `flash_attn_with_kvcache` that first writes new, rotated keys."""
    draw, size, lens = _Draw("flash_attn_with_kvcache"), 16, torch.tensor((20, 0, 31)).int()
    tables, places = draw.order(9).view(3, 3).int(), (lens[:, None] + torch.arange(2)).flatten().long()
    slots = tables[torch.arange(3).repeat_interleave(2), places // size].long() * size + places % size
    new, (queries,), written, _ = _rope("flash_attn_with_kvcache", dtype, False, 64, 64, size, (slots, places))
    batch: Options = {"block_tables": tables, "seq_lens": lens + 2, "scale": 0.125}
    batch |= {"query_start_loc": torch.tensor([0, 2, 4, 6]).int(), "value_cache": written["value_cache"]}
    keys = written["key_cache"]
    exact, rounded = (
        oracle.attention(batch | {"query": query, "key_cache": cache}, query.dtype)[0].view(3, 2, 6, 64)
        for query, cache in ((queries.exact, keys.exact), (queries.rounded, keys.rounded))
    )
    call = {side[0]: new[side].unflatten(0, (3, 2)) for side in ("query", "key", "value")}
    call |= {"k_cache": new["key_cache"], "v_cache": new["value_cache"], "cache_seqlens": lens, "block_table": tables}
    call |= dict(zip(("rotary_cos", "rotary_sin"), new["cos_sin"].chunk(2, 1), strict=True))
    call |= {"causal": True, "softmax_scale": 0.125, "rotary_interleaved": False}
    return CaseCall(call, (Near(exact, rounded),), {"k_cache": keys, "v_cache": written["value_cache"]})


def _flash_varlen(dtype: torch.dtype) -> CaseCall:
    """Build a call of `flash_attn_varlen_func` with packed keys, for which a kernel makes block tables."""
    lens, queries = (33, 5, 70), (7, 5, 1)
    paged = _attention("paged_attention", "packed keys", lens, queries, dtype, block_size=1)
    given, (expected,) = paged.arguments, paged.returned
    blocks = torch.cat([table[:length] for table, length in zip(given["block_tables"], lens, strict=True)])
    call = {"q": given["query"][:-1], "k": given["key_cache"][blocks, 0], "v": given["value_cache"][blocks, 0]}
    call |= {"cu_seqlens_q": given["query_start_loc"], "cu_seqlens_k": torch.tensor([0, *lens]).cumsum(0).int()}
    call |= {"max_seqlen_q": max(queries), "max_seqlen_k": max(lens), "causal": True, "softmax_scale": given["scale"]}
    return CaseCall(call, (Near(expected.exact[:-1], expected.rounded[:-1]),))


DECODE: Options = {"lens": (1, 33, 200), "queries": (1, 1, 1)}
CHUNK: Options = {"lens": (1, 33, 90), "queries": (1, 33, 40)}


def small_cases(shape: Shape, use: str) -> list[Case]:
    """Return the cases for the kernels that a model with attention layers of this shape launches.

    Args:
        shape: The model's attention layers.
        use: "packed": packed passes over blocks. "moved": text at new positions. "documents": compressed documents.
    """
    dtype, pairs = shape.dtype, shape.head_dim // 2
    sizes: Options = {"heads": (shape.heads, shape.kv_heads), "head_dim": shape.head_dim, "dtype": dtype}
    sizes["block_size"] = shape.block_size
    copy = Case("copy_blocks", "copy", partial(_moves, "copy_blocks", dtype))
    if use == "packed":
        write = partial(_write, "small", dtype, None, shape.kv_heads, shape.head_dim, shape.block_size)
        found = [copy, Case("reshape_and_cache", "write", write)]
        for name, batch in (("decode", DECODE), ("chunk", CHUNK)):
            found.append(_attends("paged_attention", name, **batch, **sizes, planned=True))
            for window in shape.windows:
                about = f"{name}, window {window}"
                found.append(_attends("sliding_window_attention", about, **batch, **sizes, window=window, planned=True))
        return found
    sparse = "sparse_gap_attention"
    if use == "moved":
        move = partial(_move, "move_slots", "small", dtype, True, pairs, 0, False, 2 * pairs)
        return [
            *(copy, Case("move_slots", "move", move)),
            _attends(sparse, "scattered queries", **CHUNK, **sizes, scattered=True),
        ]
    return [
        Case("merge_attention", "merge", partial(_merge, dtype)),
        _attends("paged_attention_with_lse", "decode", **DECODE, **sizes),
        _attends("paged_attention_with_lse", "chunk", **CHUNK, **sizes),
        _attends(f"{sparse}_with_lse", "a table per head, decode", **DECODE, **sizes, holes=0.3, head_tables=True),
        _attends(f"{sparse}_with_lse", "a table per head, chunk", **CHUNK, **sizes, holes=0.3, head_tables=True),
    ]


USES = ("packed", "moved", "documents")


def _attends(operator: str, name: str, dtype: torch.dtype = F16, calls: str = "", **given: Any) -> Case:
    """Return an attention case. float16 shows a small fault more clearly than bfloat16."""
    name = f"{_in(dtype)}, {name}"
    return Case(operator, name, partial(_attention, calls or operator, name, dtype=dtype, **given), calls)


def _in(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def all_cases(wide: bool) -> Iterator[Case]:
    """Yield cases of every operator. `wide`: also sizes that take too long in an interpreter."""
    yield from _attention_cases(wide)
    for dtype in (F16, BF16, F32):
        yield Case("reshape_and_cache", _in(dtype), partial(_write, _in(dtype), dtype, None, 3, 80, 8))
        yield Case("merge_attention", _in(dtype), partial(_merge, dtype))
    for kept in (E4M3, INT8):
        name = f"bfloat16 to {_in(kept)}"
        yield Case("reshape_and_cache", name, partial(_write, name, BF16, kept, 3, 64, 8))
    for name, dtype, interleaved, head_dim, rotary_dim in (
        ("float32, pairs far apart", F32, False, 64, 64),
        ("bfloat16, half of a head", BF16, False, 80, 32),
        ("float16, interleaved", F16, True, 64, 32),
    ):
        yield Case("rope_and_cache", name, partial(_rope, name, dtype, interleaved, head_dim, rotary_dim))
    for operator, name, dtype, is_neox, pairs, first, latent in (
        ("rotate_keys", "float32", F32, True, 32, 0, True),
        ("rotate_keys", "bfloat16, interleaved, last columns", BF16, False, 16, 32, True),
        ("rotate_keys", "int8", INT8, True, 16, 0, True),
        ("move_slots", "float32", F32, True, 32, 0, False),
        ("move_slots", "bfloat16, interleaved, last columns", BF16, False, 16, 32, True),
        ("move_slots", "int8", INT8, True, 16, 0, False),
        ("move_slots", "float16, without positions", F16, True, 0, 0, False),
    ):
        yield Case(operator, name, partial(_move, operator, name, dtype, is_neox, pairs, first, latent))
    for operator in ("gather_blocks", "scatter_blocks", "gather_slots", "scatter_slots", "copy_blocks"):
        yield Case(operator, "bfloat16, loose strides", partial(_moves, operator, BF16))
        yield Case(f"{operator}_list", "float32, three caches", partial(_moves, f"{operator}_list", F32))
    for operator, dtype in (("join_prefix", BF16), ("join_prefix_list", F32)):
        for placed in (False, True):
            name = f"{_in(dtype)}, {'rows in gaps' if placed else 'rows at the end'}"
            yield Case(operator, name, partial(_join, operator, dtype, placed))
    yield Case("flash_attn_with_kvcache", "float32, new keys", partial(_flash_append, F32))
    yield Case("flash_attn_varlen_func", "float16, packed keys", partial(_flash_varlen, F16))


def _attention_cases(wide: bool) -> Iterator[Case]:
    """Yield the cases of attention operators and of plans."""
    everything: Options = {"softcap": 5.0, "alibi": True, "sinks": True}
    paged, window, sparse = "paged_attention", "sliding_window_attention", "sparse_gap_attention"
    for dtype in (BF16, F16, F32):
        yield _attends(paged, "decode", dtype, **DECODE)
        yield _attends(paged, "chunk", dtype, **CHUNK)
    for kept in (E4M3, INT8):
        yield _attends(paged, f"{_in(kept)} cache, decode", BF16, **DECODE, cache_dtype=kept)
        yield _attends(paged, f"{_in(kept)} cache, chunk", **CHUNK, cache_dtype=kept)
    yield _attends("paged_attention_with_lse", "softcap, ALiBi, sinks, decode", F32, **DECODE, **everything)
    yield _attends("paged_attention_with_lse", "softcap, ALiBi, sinks, chunk", F32, **CHUNK, **everything)
    yield _attends(paged, "head_dim 80, head-major cache, chunk", **CHUNK, head_dim=80, head_major=True)
    yield _attends(paged, "value_dim 32, blocks of 64, decode", **DECODE, value_dim=32, block_size=64)
    yield _attends(paged, "batch-invariant, decode", **DECODE, batch_invariant=True)
    yield _attends(window, "decode", **DECODE, window=40, num_sink_tokens=3)
    yield _attends(window, "chunk", **CHUNK, window=20, num_sink_tokens=3)
    yield _attends(f"{window}_with_lse", "decode", **DECODE, window=40, num_sink_tokens=3)
    yield _attends(f"{window}_with_lse", "not causal, chunk", **CHUNK, window=20, causal=False)
    yield _attends(sparse, "holes, decode", **DECODE, holes=0.3)
    yield _attends(sparse, "holes, scattered queries, window", **CHUNK, holes=0.3, scattered=True, window=30)
    yield _attends(sparse, "a table per head, decode", **DECODE, holes=0.3, head_tables=True)
    yield _attends(f"{sparse}_with_lse", "a table per head, chunk", **CHUNK, holes=0.3, head_tables=True)
    yield _attends(f"{sparse}_with_lse", "a tree of drafts", lens=(9, 40, 200), queries=(5, 7, 6), tree=True)
    yield _attends(f"{sparse}_with_lse", "lists of blocks, decode", **DECODE, top_k=4)
    yield _attends(sparse, "lists of blocks, chunk", **CHUNK, top_k=3)
    shared: Options = {"lens": (40, 61, 100), "shared": 2}
    yield _attends("shared_prefix_attention", "decode", **shared, queries=(1, 1, 1))
    yield _attends("shared_prefix_attention_with_lse", "sinks, chunk", **shared, queries=(3, 5, 1), sinks=True)
    latent: Options = {"heads": (16, 1), "head_dim": 576, "value_dim": 512, "latent": True}
    if not wide:
        latent |= {"heads": (4, 1), "head_dim": 96, "value_dim": 64}
    yield _attends("latent_attention", "decode", **DECODE, **latent)
    yield _attends("latent_attention_with_lse", "chunk", **CHUNK, **latent)
    yield _attends("latent_attention", "int8 cache, decode", **DECODE, **latent, cache_dtype=INT8)
    yield _attends("sparse_latent_attention", "holes, window, decode", **DECODE, **latent, holes=0.3, window=145)
    yield _attends("sparse_latent_attention_with_lse", "lists of blocks", **DECODE, **latent, top_k=4)
    plan = "attention_plan"
    gaps: Options = {"holes": 0.3, "window": 30, "scattered": True}
    yield _attends(plan, "decode", calls=sparse, **DECODE, planned=True)
    yield _attends(plan, "window, holes, scattered queries", calls=sparse, **CHUNK, **gaps, planned=True)
    if wide:
        long: Options = {"lens": (5000, 1, 777), "queries": (1, 1, 1), "heads": (8, 2), "head_dim": 128}
        yield _attends(paged, "head_dim 128, 5,000 tokens, decode", **long)
        yield _attends(paged, "head_dim 256, chunk", lens=(700, 300), queries=(300, 300), head_dim=256)
        yield _attends(paged, "float8 cache, 5,000 tokens, decode", **long, cache_dtype=E4M3)
