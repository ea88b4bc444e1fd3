"""Compression in vLLM's workers: save the queries that presses read, score a prompt's tokens, and pack the kept ones.

If heads have different budgets, each head has its own block table. A block is then divided into pages, one for each KV
head. Attention of a request with such tables is computed twice, first with the whole batch and then for each head.
So the results of other requests do not change.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ....triton_ops import sparse_gap_attention
from ...presses import QUERIES, SCORES, WINDOW, choose
from ..api import call_around_update
from ..scheduler_output import entering_requests
from .scheduler import Packing


@dataclass
class Compressor:
    """Compression in one worker's model runner. Each step's output says what to do; see `Compression.finish_step`.

    Attributes:
        runner: vLLM's model runner.
        layers: vLLM's attention layers, by name.
        block_size: The number of tokens in a block.
        saved: Queries of the chunks so far, by request and layer.
        holes: For each request, its number of packed blocks and of null blocks after them.
        tables: The pages of each KV head, `[num_kv_heads, whole blocks]`, by request and layer; -1 after the last page.
    """

    runner: Any
    layers: dict[str, Any]
    block_size: int
    saved: dict[str, dict[str, list[torch.Tensor]]] = field(default_factory=dict)
    tables: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    holes: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._spans: list[tuple[str, int, int]] = []
        self._holes: list[tuple[int, int]] = []
        self._unseen: set[str] = set()
        self.by_head: Callable[..., None] | None = None
        """The attention of the requests of the running step whose KV heads have their own block tables."""

    def begin_step(self, output: Any) -> None:
        """Pack the prompts that a step names, before the runner zeroes or copies blocks that packing frees."""
        entering = {each.request_id: each.blocks for each in entering_requests(output, 0)}
        for name in (*output.finished_req_ids, *entering):
            for of_request in (self.saved, self.tables, self.holes):
                of_request.pop(name, None)
        self.holes |= {name: (ids.index(0), ids.count(0)) for name, ids in entering.items() if 0 in ids}
        self._spans, self.by_head = [], None
        for packing in getattr(output, "pc_packings", ()):
            saved = self.saved.pop(packing.request_id, {})
            write_table(self.runner, packing)
            num_packed = len(packing.targets)
            self.holes[packing.request_id] = num_packed, len(packing.sources) - num_packed
            tables = {} if packing.peer is None else self.tables.get(packing.peer, {})
            for name, layer in self.layers.items() if packing.peer is None else ():
                pages = pack(layer, packing, saved.get(name, []))
                if pages is not None:
                    tables[name] = pages
            if tables:
                self.tables[packing.request_id] = tables

    def follow(self, names: list[str], output: Any) -> None:
        """Prepare for the forward pass, after the runner has ordered the batch by `names`.

        It finds the rows whose queries presses will read, the holes of requests, and requests with tables by head.
        """
        queries, self._spans, end = getattr(output, "pc_queries", {}), [], 0
        for name in names if queries else ():
            end += output.num_scheduled_tokens[name]
            if name in queries:
                self._spans.append((name, end - queries[name], end))
        self._unseen = set(self.layers) if self._spans else set()
        self._holes = [(0, 0) if name in self.tables else self.holes.get(name, (0, 0)) for name in names]
        counts = [output.num_scheduled_tokens[name] for name in names] if self.tables else []
        rows = [row for row, name in enumerate(names) if name in self.tables] if self.tables else []
        tables = [self.tables[names[row]] for row in rows]
        self.by_head = attention_by_head(rows, counts, tables) if rows else None

    def close_holes(
        self, tables: torch.Tensor, seq_lens: torch.Tensor, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Return a step's block tables without the holes of compressed requests, with lengths to match.

        All queries of a step come after the holes, and layers have no windows or ALiBi. So a query attends to the same
        keys, and kernels have no tiles to skip. Requests with tables for each head keep their holes.

        Args:
            tables: `[num_seqs, max_blocks]` int32, -1 for a hole.
            seq_lens: `[num_seqs]` int32.
            longest: An upper bound of `seq_lens`.
        """
        fewest = min((count for _, count in self._holes), default=0)
        if not any(count for _, count in self._holes):
            return tables, seq_lens, longest
        size, width = self.block_size, tables.shape[1]
        rows = self._holes + [(0, 0)] * (len(tables) - len(self._holes))  # vLLM may pad a batch
        first, count = torch.tensor(rows, device=tables.device).T[..., None]
        longest -= fewest * size
        at = torch.arange(-(-longest // size), device=tables.device)
        at = at + (at >= first) * count
        closed = tables.gather(1, at.clamp(max=width - 1)).masked_fill_(at >= width, -1)
        return closed, seq_lens - (count[:, 0] * size).to(seq_lens.dtype), longest

    def save(self, layer: str, query: torch.Tensor) -> None:
        """Save the queries of one layer that presses will read. Only a layer's first call in a step counts."""
        if layer in self._unseen:
            self._unseen.discard(layer)
            for name, begin, end in self._spans:
                self.saved.setdefault(name, {}).setdefault(layer, []).append(query[begin:end].clone())


def attention_by_head(rows: list[int], counts: list[int], tables: list[dict[str, torch.Tensor]]) -> Callable[..., None]:
    """Return a function that computes attention again for requests whose KV heads have their own block tables.

    Its arguments are a layer, the queries and the cache of the layer, the metadata of the step, and the output. It
    replaces the rows of these requests in the output. Each head attends to its own pages.

    Args:
        rows: The rows of the requests in the batch.
        counts: The number of queries of each request of the batch.
        tables: For each of `rows`, the pages of its heads by layer.
    """
    device = next(iter(tables[0].values())).device
    ends = list(itertools.accumulate(counts))
    tokens = torch.tensor([n for row in rows for n in range(ends[row] - counts[row], ends[row])], device=device)
    lens = [counts[row] for row in rows]
    starts = torch.tensor(list(itertools.accumulate(lens, initial=0)), dtype=torch.int32, device=device)
    places = torch.tensor(rows, device=device)

    def attend(layer: Any, query: torch.Tensor, kv_cache: torch.Tensor, step: Any, output: torch.Tensor) -> None:
        impl, (_, heads, size, width) = layer.impl, kv_cache.shape
        unit, block, head = page_strides(kv_cache)
        num_pages = (kv_cache.shape[0] - 1) * block + (heads - 1) * head + 1
        pages = kv_cache.as_strided(
            (num_pages, size, heads, width), (unit, kv_cache.stride(2), 0, 1), kv_cache.storage_offset()
        )
        if impl.kv_cache_dtype.startswith("fp8"):
            pages = pages.view(torch.float8_e4m3fn)
        keys, values = pages.split(width // 2, dim=-1)
        blocks = step.block_tables[places][:, None]
        table = blocks * block + torch.arange(heads, device=blocks.device)[:, None] * head
        table = table.masked_fill(blocks < 0, -1).int()
        for row, own in enumerate(tables):
            of_heads = own[layer.layer_name]
            table[row, :, : of_heads.shape[1]] = of_heads
        sequences = (table, step.seq_lens[places], starts, None)
        options = {"softcap": impl.softcap, "sinks": impl.sinks, "max_query_len": max(lens), **impl.scales(layer)}
        options |= {"max_seq_len": step.max_seq_len, "batch_invariant": step.batch_invariant}
        output[tokens] = sparse_gap_attention(query[tokens], keys, values, *sequences, impl.scale, **options).to(
            output.dtype
        )

    return attend


def page_strides(kv_cache: torch.Tensor) -> tuple[int, int, int]:
    """Return the elements from one page to the next, and the pages between blocks and between KV heads."""
    block, head, _, _ = kv_cache.stride()
    unit = math.gcd(block, head)
    return unit, block // unit, head // unit


@torch.no_grad()
def pack(layer: Any, packing: Packing, saved: list[torch.Tensor]) -> torch.Tensor | None:
    """Score a prompt's tokens for a layer, and copy the tokens that each KV head keeps to the targets.

    Args:
        layer: The layer.
        packing: The prompt to pack.
        saved: The layer's saved queries of the prompt, in pieces.

    Returns:
        The pages of each KV head; None if all heads have the same number of blocks.
    """
    cache: torch.Tensor = layer.kv_cache
    _, _, size, width = cache.shape
    whole, keep = len(packing.sources) * size, len(packing.targets)
    tail = [] if packing.tail is None else [packing.tail]
    rows = cache.transpose(0, 1)[:, [*packing.sources, *tail]].flatten(1, 2)[:, : packing.tokens]
    query = queries_of(layer, packing, saved)
    scores = SCORES[packing.press](query, *keys_and_values(layer, rows), layer.impl.scale)[:, :whole]
    if packing.by_head:
        return pack_by_head(cache, packing, rows, scores)
    kept = scores.topk(keep * size, dim=-1).indices.sort(-1).values
    source = rows.gather(1, kept[..., None].expand(-1, -1, width))
    write_blocks(cache, packing.targets, source.unflatten(1, (keep, size)).transpose(0, 1))
    return None


def pack_by_head(cache: torch.Tensor, packing: Packing, rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Copy the tokens that a layer's KV heads keep to pages of the targets, and return the pages of each head.

    Args:
        cache: The layer's KV cache.
        packing: The prompt to pack.
        rows: The prompt's keys and values, `[num_kv_heads, tokens, 2 * head_dim]`.
        scores: Scores of the tokens in the prompt's whole blocks, `[num_kv_heads, tokens]`.
    """
    (_, heads, size, width), keep = cache.shape, len(packing.targets)
    counts = pages_by_head(scores, keep, size)
    tokens = [scores[head].topk(count * size).indices.sort().values for head, count in enumerate(counts)]
    source = torch.cat([rows[head, own] for head, own in enumerate(tokens)])
    write_blocks(cache, packing.targets, source.view(keep, heads, size, width))  # a block's pages follow each other
    _, block, head_stride = page_strides(cache)
    pages = [target * block + head * head_stride for target in packing.targets for head in range(heads)]
    table = torch.full((heads, len(packing.sources)), -1, dtype=torch.int32)
    for head, (end, count) in enumerate(zip(itertools.accumulate(counts), counts, strict=True)):
        table[head, :count] = torch.tensor(pages[end - count : end], dtype=torch.int32)
    return table.to(cache.device)


def write_blocks(cache: torch.Tensor, blocks: list[int], rows: torch.Tensor) -> None:
    """Write keys and values `[len(blocks), num_kv_heads, block_size, 2 * head_dim]` into blocks of a layer's cache."""
    cache[blocks] = rows


def pages_by_head(scores: torch.Tensor, keep: int, size: int) -> list[int]:
    """Return the number of pages of `size` tokens that each KV head of a layer keeps, divided by score as in Ada-KV.

    The average is `keep`. Every head has room for the last `WINDOW` tokens. Fractions of pages go to the heads with the
    largest remainders.
    """
    heads, tokens = scores.shape
    share = choose(scores, keep * size / tokens).sum(1).double() / size
    least, most = -(-WINDOW // size), tokens // size
    pages = share.floor().long().clamp(least, most)
    while missing := keep * heads - int(pages.sum()):
        sign, has_room = (1, pages < most) if missing > 0 else (-1, pages > least)
        pages[((share - pages) * sign).masked_fill(~has_room, -torch.inf).argmax()] += sign
    return pages.tolist()


def keys_and_values(layer: Any, rows: torch.Tensor) -> list[torch.Tensor]:
    """Return the keys and values in rows `[num_kv_heads, tokens, 2 * head_dim]` for presses, with scales applied."""
    scales = layer.impl.scales(layer)
    if not scales:
        return list(rows.chunk(2, dim=-1))
    sides = rows.view(torch.float8_e4m3fn).float().chunk(2, dim=-1)
    factors = (scales[name].to(rows.device, torch.float32).reshape(-1, 1, 1) for name in ("k_scale", "v_scale"))
    return [side * factor for side, factor in zip(sides, factors, strict=True)]


def queries_of(layer: Any, packing: Packing, saved: list[torch.Tensor]) -> torch.Tensor:
    """Return the queries that a press reads, `[num_heads, queries, head_dim]`."""
    wanted, found = min(QUERIES[packing.press], packing.tokens), sum(map(len, saved))
    if found != wanted:
        raise RuntimeError(f"request {packing.request_id}: got {found} saved queries, needs {wanted}")
    query = torch.cat(saved) if saved else layer.kv_cache.new_empty(0, layer.impl.num_heads, layer.impl.head_size)
    return query.transpose(0, 1)


def write_table(runner: Any, packing: Packing) -> None:
    """Write packed blocks and null blocks into a request's block table in a model runner."""
    name, ids = packing.request_id, packing.targets + [0] * (len(packing.sources) - len(packing.targets))
    if hasattr(runner, "update_requests"):
        row = runner.req_states.req_id_to_index.get(name)
        if row is not None:
            runner.block_tables.block_tables[0].stage_write(row, 0, ids)
    elif name in runner.requests:
        runner.requests[name].block_ids[0][: len(ids)] = ids
        row = runner.input_batch.req_id_to_index.get(name)
        if row is not None:
            runner.input_batch.block_table[0].block_table.np[row, : len(ids)] = ids


def prepare(worker: Any) -> str:
    """Enable compression in a worker that has its model and caches. Return why it cannot compress, or ""."""
    runner, config = worker.model_runner, worker.vllm_config
    if config.parallel_config.enable_dbo:
        return "dual-batch overlap"
    layers = dict(config.compilation_config.static_forward_context)
    (group, *_) = runner.kv_cache_config.kv_cache_groups
    size = group.kv_cache_spec.block_size
    if reason := why_not_packed(layers, size):
        return reason
    compressor = Compressor(runner, layers, size)
    for layer in layers.values():
        layer.impl.compressor = compressor
    call_around_update(runner, compressor.follow, compressor.begin_step)
    return ""


def why_not_packed(layers: dict[str, Any], block_size: int) -> str:
    """Return why the caches of a model's attention layers cannot be packed, or ""."""
    from ..attention.backend import PagedAttention

    for name, layer in layers.items():
        impl, cache = getattr(layer, "impl", None), getattr(layer, "kv_cache", None)
        if type(impl) is not PagedAttention:
            return f"layer {name}, whose attention is not of PC_VLLM=attention"
        if impl.window or impl.alibi_slopes is not None or impl.kv_sharing_target_layer_name is not None:
            kind = "a window" if impl.window else "ALiBi" if impl.alibi_slopes is not None else "no KV of its own"
            return f"layer {name}, which has {kind}"
        if cache is None or cache.dim() != 4 or cache.shape[-1] != 2 * impl.head_size or cache.stride(-1) != 1:
            return f"layer {name}, whose KV cache has the shape {list(getattr(cache, 'shape', ()))}"
        if cache.shape[2] != block_size:
            return "kernels with another block size than the KV cache"
    return "" if layers else "a model without attention"
