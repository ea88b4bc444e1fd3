"""Inputs of attention benchmarks: paged caches, shuffled block tables, holes; what they move, compute and expect."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pc.triton_ops._verify import oracle

from ..harness.inputs import Draw, Expected, Inputs, default_dtype, paged_batch, shuffled
from ..harness.registry import Case

CHECKED_ROWS = 32
# Fast float32 exponentials, PyTorch's on a CPU among them, err by up to 20 units in the last place.
EXP_ERROR = 2.0**-19
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class AttentionCase:
    """Conditions of one attention call; lengths in tokens.

    Attributes:
        seq_lens: Tokens of each sequence, with those of this step.
        q_lens: This step's tokens of each sequence.
        heads: Query heads and KV heads.
        head_dim: Elements of a head.
        block_size: Tokens of a block.
        layout: "NHD", or "HND" for a transposed view of head-major memory.
        dtype: Dtype of queries; None: float32 on a CPU, bfloat16 on a GPU.
        cache_dtype: Dtype of the cache, if it differs.
        window: Sliding window, 0 for none.
        num_sink_tokens: Tokens at the start that a window never leaves behind.
        sinks: Whether heads have a learned sink logit.
        live: Spans of tokens that are present in every sequence; None: all.
        kept: Share of the blocks that each KV head attends to, drawn for each head, with those of the queries; 1: all.
        lists: Whether queries have lists of these blocks, in place of a table for each KV head.
        queries: Spans of positions that the queries are at; None: the last ones.
        shared: Tokens at the start that all sequences share, in the same blocks.
        value_dim: Columns of a latent row that are values; 0: the cache has keys and values.
        scale: Factor on q.k; 0: head_dim ** -0.5.
    """

    seq_lens: tuple[int, ...]
    q_lens: tuple[int, ...]
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    block_size: int = 16
    layout: str = "NHD"
    dtype: str | None = None
    cache_dtype: str | None = None
    window: int = 0
    num_sink_tokens: int = 0
    sinks: bool = False
    live: Ranges | None = None
    kept: float = 1.0
    lists: bool = False
    queries: Ranges | None = None
    shared: int = 0
    value_dim: int = 0
    scale: float = 0

    def query_dtype(self, device: torch.device) -> torch.dtype:
        """Return the dtype of queries on a device."""
        found: torch.dtype = getattr(torch, self.dtype) if self.dtype else default_dtype(device)
        return found

    def count_blocks(self) -> int:
        """Return the number of blocks of all sequences, shared ones once."""
        own = sum(-(-length // self.block_size) - self.shared // self.block_size for length in self.seq_lens)
        return own + self.shared // self.block_size

    def positions(self, i: int) -> np.ndarray:
        """Return the absolute positions of the queries of sequence `i`."""
        if self.queries is None:
            return np.arange(self.seq_lens[i] - self.q_lens[i], self.seq_lens[i])
        return np.concatenate([np.arange(*span) for span in self.queries])

    def chosen(self, i: int) -> np.ndarray:
        """Return the blocks that each KV head of sequence `i` attends to, ascending: [kv_heads, n]."""
        blocks, own = -(-self.seq_lens[i] // self.block_size), (self.seq_lens[i] - self.q_lens[i]) // self.block_size
        count, rng = max(0, round(blocks * self.kept) - (blocks - own)), np.random.default_rng(i)
        drawn = [np.sort(rng.permutation(own)[:count]) for _ in range(self.heads[1])]
        return np.stack([np.concatenate([before, np.arange(own, blocks)]) for before in drawn])

    def present(self, i: int, head: int = 0) -> np.ndarray:
        """Return the key positions of sequence `i` that are in present blocks, for one KV head if heads differ."""
        length = self.seq_lens[i]
        if self.kept < 1:
            return np.asarray(np.isin(np.arange(length) // self.block_size, self.chosen(i)[head]))
        if self.live is None:
            return np.ones(length, dtype=bool)
        mask = np.zeros(length, dtype=bool)
        for begin, end in self.live:
            mask[begin // self.block_size * self.block_size : -(-end // self.block_size) * self.block_size] = True
        return mask

    def visible(self, i: int, positions: np.ndarray, head: int = 0) -> np.ndarray:
        """Return which keys of sequence `i` the queries at `positions` attend to, for a KV head: [queries, seq_len]."""
        t, p = np.arange(self.seq_lens[i])[None], positions[:, None]
        mask = (t <= p) & self.present(i, head)[None]
        if self.window:
            mask &= (t > p - self.window) | (t < self.num_sink_tokens)
        return mask

    def conditions(self) -> dict[str, str]:
        """Return the columns of the row."""
        names = ("head_dim", "block_size", "layout", "dtype", "cache_dtype", "window", "num_sink_tokens")
        live = sum(int(self.present(i).sum()) for i in _indices(self))
        lengths = {"sequences": str(len(self.seq_lens)), "seq_lens": _runs(self.seq_lens), "q_lens": _runs(self.q_lens)}
        columns = lengths | {"heads": f"{self.heads[0]}/{self.heads[1]}"}
        columns |= {name: "" if (value := getattr(self, name)) is None else str(value) for name in names}
        is_whole = self.live is None and self.kept == 1
        return columns | {"live_tokens": "" if is_whole else str(live), "shared": str(self.shared)}


def _indices(case: AttentionCase) -> range:
    return range(len(case.seq_lens))


def _runs(values: tuple[int, ...]) -> str:
    """Return the lengths in short: "31x1024 1x131072"."""
    return " ".join(f"{n}x{value}" for value, n in Counter(values).items())


@dataclass(frozen=True)
class AttentionCall:
    """Tensors of one call, named as the operators name them."""

    case: AttentionCase
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor
    query_positions: torch.Tensor | None = None
    query_blocks: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def scale(self) -> float:
        """Return the factor on q.k."""
        return self.case.scale or self.case.head_dim**-0.5

    def arguments(self, op: str) -> dict[str, Any]:
        """Return the arguments of `pc.<op>`: those that its schema names."""
        case = self.case
        given = vars(self) | {"cache": self.key_cache[:, :, 0], "scale": self.scale, "value_dim": case.value_dim}
        given |= {"window": case.window, "num_sink_tokens": case.num_sink_tokens}
        given |= {"max_query_len": max(case.q_lens), "max_seq_len": max(case.seq_lens)}
        given["num_shared_blocks"] = case.shared // case.block_size
        names = [argument.name for argument in getattr(torch.ops.pc, op).default._schema.arguments]
        return {name: given[name] for name in names if name in given}


def attention_inputs(
    case: AttentionCase,
    device: torch.device,
    rotate: int,
    result: Callable[[AttentionCall, Any], Any] = lambda call, got: got,
) -> Inputs:
    """Return calls over disjoint blocks of one cache, with at least `rotate` bytes of keys and values together.

    Args:
        case: The conditions of the call.
        device: Device of the tensors.
        rotate: Bytes.
        result: From a call and what a run of it returned to the attention's result.
    """
    dtype = case.query_dtype(device)
    stored: torch.dtype = getattr(torch, case.cache_dtype) if case.cache_dtype else dtype
    block, blocks = (case.block_size, case.heads[1], case.head_dim), case.count_blocks()
    if case.layout == "HND":
        block = (block[1], block[0], block[2])

    def cache(draw: Draw, count: int) -> torch.Tensor:
        made = torch.empty(count, *block, dtype=stored, device=device)
        for part in made.split(max(1, (1 << 26) // max(1, made[0].numel()))):
            values = draw(*part.shape)
            # int8 codes are about 32 steps to a unit, so that the scale below gives unit variance back.
            part.copy_(values.mul_(32).clamp_(-127, 127) if stored == torch.int8 else values)
        return made.transpose(1, 2) if case.layout == "HND" else made

    def calls(draw: Draw, copies: int) -> Iterable[AttentionCall]:
        keys = cache(draw, copies * blocks)
        values = keys[..., : case.value_dim] if case.value_dim else cache(draw, copies * blocks)
        for own in shuffled(copies * blocks, torch.device("cpu")).int().split(blocks):
            query = draw(sum(case.q_lens), case.heads[0], case.head_dim).to(dtype)
            yield _call(case, query, keys, values, own, draw(case.heads[0]) if case.sinks else None)

    def reference(call: AttentionCall) -> Iterable[Expected]:
        """Compare a sample of rows; the largest error is held against the largest that is allowed."""
        total, starts = call.query.shape[0], np.cumsum([0, *case.q_lens])
        sample = sorted({0, total - 1, *random.Random(0).sample(range(total), min(total, CHECKED_ROWS))})
        groups = itertools.groupby(sample, lambda row: int(np.searchsorted(starts, row, side="right")) - 1)
        found = [expected_rows(call, i, [int(row - starts[i]) for row in rows]) for i, rows in groups]

        def read(got: Any) -> torch.Tensor:
            got = result(call, got)
            attended: torch.Tensor = got[0] if isinstance(got, tuple) else got
            return attended.reshape(*call.query.shape[:2], -1)[sample]

        yield Expected(torch.cat([exact for exact, _ in found]), read, max(allowed for _, allowed in found))

    held = blocks * (1 if case.value_dim else 2) * math.prod(block) * stored.itemsize
    return Inputs(calls, reference, *_count_work(case, dtype, stored), device, rotate, held)


def _count_work(case: AttentionCase, dtype: torch.dtype, stored: torch.dtype) -> tuple[int, int]:
    """Return bytes of queries, results and live keys and values, each once; and flops over live pairs."""
    columns = case.head_dim + (case.value_dim or case.head_dim)
    token_bytes = case.heads[1] * (case.head_dim if case.value_dim else columns) * stored.itemsize
    moved = sum(case.q_lens) * case.heads[0] * columns * dtype.itemsize
    pairs = 0
    for i, length in enumerate(case.seq_lens):
        positions, live = case.positions(i), np.zeros(length, dtype=bool)
        for part in (positions[at : at + 1024] for at in range(0, len(positions), 1024)):  # a mask takes memory
            mask = case.visible(i, part)
            pairs, live = pairs + int(mask.sum()), live | mask.any(axis=0)
        moved += int(live[case.shared if i else 0 :].sum()) * token_bytes
    return moved, 2 * pairs * case.heads[0] * columns


def _call(
    case: AttentionCase,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    order: torch.Tensor,
    sinks: torch.Tensor | None,
) -> AttentionCall:
    size, device = case.block_size, query.device
    shared, others = order.split([case.shared // size, len(order) - case.shared // size])
    own = others.split([-(-length // size) - len(shared) for length in case.seq_lens])
    numbers = torch.cat([part for each in own for part in (shared, each)])
    tables, lens, starts = paged_batch(case.seq_lens, case.q_lens, size, numbers, absent=-1)
    if case.kept == 1:
        for i in _indices(case):
            absent = ~torch.from_numpy(case.present(i)[::size].copy())
            tables[i, : len(absent)][absent] = -1
    positions = None
    if case.queries is not None:
        positions = torch.from_numpy(np.concatenate([case.positions(i) for i in _indices(case)])).int().to(device)
    scale = None
    if case.cache_dtype:
        scale = torch.full((1,), 1 / 32 if case.cache_dtype == "int8" else 0.5, device=device)
    lists = None
    if case.kept < 1:
        chosen = [torch.from_numpy(case.chosen(i)) for i in _indices(case)]
        if case.lists:
            most = max(own.shape[1] for own in chosen)
            padded = [torch.nn.functional.pad(own, (0, most - own.shape[1]), value=-1) for own in chosen]
            lists = torch.stack(padded).repeat_interleave(torch.tensor(case.q_lens), 0).int().to(device)
        else:
            whole, tables = tables, torch.full((len(chosen), case.heads[1], tables.shape[1]), -1, dtype=torch.int32)
            for i, own in enumerate(chosen):
                tables[i].scatter_(1, own, whole[i][own])
    return AttentionCall(
        case, query, keys, values, *(part.to(device) for part in (tables, lens, starts)), positions, lists, sinks,
        scale, scale,
    )  # fmt: skip


def expected_rows(call: AttentionCall, i: int, queries: list[int]) -> tuple[torch.Tensor, float]:
    """Return rows of sequence `i` in float64, `[queries, num_heads, value_dim]`, and the largest allowed error.

    Twice the error of the formula in the query's dtype is allowed, and a rounding. A relative error of the weights is
    multiplied by the sum of weight * abs(value).
    """
    rows = torch.tensor([sum(call.case.q_lens[:i]) + query for query in queries])
    table, lists, held = call.block_tables[i], call.query_blocks, call.block_tables[i] >= 0
    key, value = (_blocks(cache, table[held]) for cache in (call.key_cache, call.value_cache))
    numbers = (held.flatten().cumsum(0).view(held.shape) - 1).where(held, -1)
    given = call.arguments("sparse_gap_attention") | {"key_cache": key, "value_cache": value}
    given |= {"query": call.query[rows], "seq_lens": call.seq_lens[i : i + 1], "block_tables": numbers[None]}
    given["query_blocks"] = None if lists is None else lists[rows]
    with torch.device(call.query.device):
        given["query_start_loc"] = torch.tensor([0, len(rows)])
        given["query_positions"] = torch.tensor(call.case.positions(i)[queries])
        exact, eager = (oracle.attention(given, dtype)[0] for dtype in (torch.float64, call.query.dtype))
        weighted = oracle.attention(given | {"value_cache": value.double().abs()}, torch.float64)[0]
    error, large, weighted = (x.abs().amax((1, 2)) for x in (eager.double() - exact, exact, weighted))
    allowed = 2 * error + torch.finfo(call.query.dtype).eps * large + EXP_ERROR * weighted
    return exact, allowed.max().item()


def _blocks(cache: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return some blocks of a cache; PyTorch cannot index float8."""
    return cache.view(torch.uint8)[numbers].view(cache.dtype) if cache.dtype.itemsize == 1 else cache[numbers]


def attention_case(name: str, device: str, quick: bool = False, **conditions: Any) -> Case:
    """Return a case of the registry from the attributes of AttentionCase."""
    case = AttentionCase(**conditions)
    columns = case.conditions()
    columns["dtype"] = columns["dtype"] or ("float32" if device == "cpu" else "bfloat16")
    return Case(name, lambda where, rotate: attention_inputs(case, where, rotate), quick, device, columns)


def uniform(batch: int, seq_len: int, q_len: int = 1, **more: Any) -> dict[str, Any]:
    """Return the conditions of a batch of equal sequences, by default a decode, and `more`."""
    return {"seq_lens": (seq_len,) * batch, "q_lens": (q_len,) * batch, **more}


def variants(name: str, base: dict[str, Any], **changes: tuple[Any, ...]) -> list[tuple[str, dict[str, Any]]]:
    """Return conditions like `base` with another value of one attribute each."""
    fields = {field.name for field in dataclasses.fields(AttentionCase)}
    assert set(changes) <= fields, changes
    shown = lambda value: "/".join(map(str, value)) if isinstance(value, tuple) else value  # noqa: E731
    return [
        (f"{name}, {attribute} {shown(value)}", {**base, attribute: value})
        for attribute, values in changes.items()
        for value in values
    ]
