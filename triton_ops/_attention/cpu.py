"""Paged attention on the CPU in plain PyTorch, fast enough to serve a small model.

One predicate for all operators (see `attend`). Queries are cut into runs of consecutive positions; each run attends to
everything before it without a mask and to itself causally, both through PyTorch's flash kernel for CPUs, and the parts
are merged by their log-sum-exp, so that no [queries, keys] matrix is ever built. What that kernel cannot express
(softcap, ALiBi, a window inside a run, a hole inside a run) takes a masked path over slices of bounded size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange

from .._rows.runs import contiguous_runs
from .call import AttentionCall
from .checks import tree_bits
from .cpu_cache import Cache, adjacent, flash_kernel
from .cpu_rows import Row, attend_rows
from .predicate import Mask

# 64 MB of float32 scores per slice of the masked path.
_MAX_SCORES = 1 << 24
# Shorter sequences are decoded in one padded call: a call of its own costs more than 1024 keys of padding.
_BATCHED_DECODE_KEYS = 4096
# Gathers stay this small: larger ones are fresh pages from the system on every call, at several times the copy's cost.
_GATHER_BYTES = 4 << 20
# Runs shorter than this on average share one pass over the keys: each alone would gather all that is before it.
_LONG_RUN = 64


def attend(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed queries over block tables.

    The query at position p attends to key position t when t <= p (causal; without it and with a window,
    t < p + window), t < seq_len, the block of t is present, and (no window, or t > p - window, or t < num_sink_tokens).

    Returns:
        out like query, and lse `[num_tokens, num_heads]` float32: the natural logarithm of the softmax's denominator.
        Rows with nothing to attend to hold 0 and -inf.
    """
    query = call.query
    out = query.new_zeros((*query.shape[:2], call.value_cache.shape[3]))
    lse = query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
    if call.query_blocks is not None:
        _attend_lists(call, out, lse)
    elif call.block_tables.dim() == 3:
        _attend_heads(call, out, lse)
    else:
        _attend_sequences(call, out, lse, set())
    if call.sinks is not None:
        _add_sinks(out, lse, call.sinks, int(call.query_start_loc[-1]))
    return out, lse


def _opened(call: AttentionCall) -> tuple[torch.Tensor, Cache]:
    """Queries and caches as they are computed with."""
    dtype = call.query.dtype if call.key_cache.dtype == call.query.dtype else torch.float32
    return call.query.to(dtype), Cache(call.key_cache, call.value_cache, call.k_scale, call.v_scale, dtype)


def _attend_sequences(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor, done: set[int]) -> None:
    """Writes the rows of all sequences but those that are done, sinks left out."""
    compute_query, cache = _opened(call)
    tables = call.block_tables.numpy()
    lens = call.seq_lens.tolist()
    starts = call.query_start_loc.tolist()
    positions = None if call.query_positions is None else call.query_positions.numpy()

    single = np.array([i for i in range(len(lens)) if starts[i + 1] - starts[i] == 1 and i not in done], dtype=np.int64)
    batched = set(done)
    plain = call.terms.PLAIN and not call.mask.BOUNDED
    if plain and positions is None and call.tree_mask is None and len(single) > 1:
        batched |= _decode_batch(compute_query, out, lse, cache, tables, lens, starts, single, call.scale)

    for i, seq_len in enumerate(lens):
        q_begin, q_end = starts[i], starts[i + 1]
        if q_begin == q_end or i in batched:
            continue
        if call.tree_mask is not None:
            rows = slice(q_begin, q_end)
            own = np.arange(seq_len - (q_end - q_begin), seq_len) if positions is None else positions[rows]
            bits = tree_bits(call.tree_mask[rows], q_end - q_begin)
            out[rows], lse[rows] = _attend_tree(
                compute_query[rows], cache, tables[i], seq_len, own.astype(np.int64), bits, call
            )
            continue
        if positions is None:
            position = seq_len - (q_end - q_begin)
            # A causal query at a negative position sees nothing.
            begin = max(0, -position) if call.causal else 0
            runs = [(begin, q_end - q_begin, position + begin)] if q_begin + begin < q_end else []
        else:
            own = positions[q_begin:q_end].astype(np.int64)
            runs = [(begin, begin + count, first) for begin, first, count in contiguous_runs(own).tolist()]
            if not call.mask.BOUNDED and len(runs) > max(1, len(own) // _LONG_RUN):
                rows = slice(q_begin, q_end)
                out[rows], lse[rows] = _attend_scattered(compute_query[rows], cache, tables[i], seq_len, own, call)
                continue
        for begin, end, position in runs:
            rows = slice(q_begin + begin, q_begin + end)
            own_out, own_lse = _attend_run(compute_query[rows], cache, tables[i], seq_len, position, call)
            out[rows], lse[rows] = own_out, own_lse


def _attend_heads(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor) -> None:
    """A block table per KV head: sequences of one query all at once, longer ones head by head."""
    done: set[int] = set()
    if call.terms.PLAIN and call.tree_mask is None:
        rows, done = _single_rows(call)
        attend_rows(*_opened(call), rows, call.scale, out, lse)
    if len(done) < call.seq_lens.shape[0]:
        for head in range(call.table_heads):
            heads, own = _of_head(call, head, call.table_heads)
            _attend_sequences(own, out[:, heads], lse[:, heads], done)


def _single_rows(call: AttentionCall) -> tuple[list[Row], set[int]]:
    """A row per KV head of the sequences that have one query, and their indices."""
    lens, starts = call.seq_lens.tolist(), call.query_start_loc.tolist()
    tables, size, mask = call.block_tables.numpy(), call.block_size, call.mask
    rows: list[Row] = []
    done: set[int] = set()
    for i, seq_len in enumerate(lens):
        if starts[i + 1] - starts[i] != 1:
            continue
        done.add(i)
        position = seq_len - 1 if call.query_positions is None else int(call.query_positions[starts[i]])
        for head in range(call.table_heads):
            own = tables[i, head, : -(-max(0, seq_len) // size)]
            rows.append(_row_of(starts[i], head, np.flatnonzero(own >= 0), own, position, seq_len, size, mask))
    return rows, done


def _attend_lists(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor) -> None:
    """A list of blocks per query and KV head: queries in a row that have the same are taken together."""
    assert call.query_blocks is not None
    lens, starts = call.seq_lens.tolist(), call.query_start_loc.tolist()
    tables, lists = call.block_tables.numpy(), call.query_blocks.numpy()
    plain, size, mask = call.terms.PLAIN, call.block_size, call.mask
    rows: list[Row] = []
    one = torch.tensor([0, 1], dtype=torch.int32)
    for i, seq_len in enumerate(lens):
        begin, end = starts[i], starts[i + 1]
        if begin == end or seq_len == 0:
            continue
        positions = np.arange(seq_len - (end - begin), seq_len)
        if call.query_positions is not None:
            positions = call.query_positions.numpy()[begin:end].astype(np.int64)
        for head in range(lists.shape[1]):
            table = tables[i] if tables.ndim == 2 else tables[i, head]
            own = lists[begin:end, head]
            changes = np.flatnonzero((own[1:] != own[:-1]).any(axis=1)) + 1
            for first, last in itertools.pairwise([0, *changes.tolist(), end - begin]):
                logical = own[first][own[first] >= 0]
                logical = logical[table[logical] >= 0]
                if plain and last - first == 1:
                    rows.append(
                        _row_of(begin + first, head, logical, table, int(positions[first]), seq_len, size, mask)
                    )
                    continue
                kept = np.full_like(table, -1)
                kept[logical] = table[logical]
                heads, part = _of_head(call, head, lists.shape[1])
                run = slice(begin + first, begin + last)
                part = part.changed(
                    query=part.query[run],
                    block_tables=torch.from_numpy(kept)[None],
                    seq_lens=call.seq_lens[i : i + 1],
                    query_start_loc=one * (last - first),
                    query_positions=torch.from_numpy(positions[first:last].astype(np.int32)),
                    query_blocks=None,
                )
                _attend_sequences(part, out[run, heads], lse[run, heads], set())
    attend_rows(*_opened(call), rows, call.scale, out, lse)


def _row_of(
    token: int, head: int, logical: np.ndarray, table: np.ndarray, position: int, seq_len: int, size: int, mask: Mask
) -> Row:
    """A query at `position` over those of some present blocks that it reaches."""
    sink_end, begin, end = mask.reach(position, position, seq_len)
    logical = logical[logical * size < end]
    if begin:
        logical = logical[(logical * size + size > begin) | (logical * size < sink_end)]
    return Row(token, head, logical, table[logical], begin, end, sink_end)


def _of_head(call: AttentionCall, head: int, kv_heads: int) -> tuple[slice, AttentionCall]:
    """Query heads of a KV head that has keys of its own, and the call of these alone."""
    group = call.query.shape[1] // kv_heads
    heads = slice(head * group, (head + 1) * group)

    def part(per_head: torch.Tensor | None, of: slice) -> torch.Tensor | None:
        return per_head if per_head is None or per_head.numel() == 1 else per_head[of]

    own = slice(head, head + 1)
    return heads, call.changed(
        query=call.query[:, heads],
        key_cache=call.key_cache[:, :, own],
        value_cache=call.value_cache[:, :, own],
        block_tables=call.block_tables if call.block_tables.dim() == 2 else call.block_tables[:, head],
        alibi_slopes=part(call.alibi_slopes, heads),
        sinks=part(call.sinks, heads),
        k_scale=part(call.k_scale, own),
        v_scale=part(call.v_scale, own),
    )


def _attend_run(
    query: torch.Tensor, cache: Cache, table: np.ndarray, seq_len: int, position: int, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries at positions position, position + 1, ... of one sequence."""
    count = query.shape[0]
    plain = call.terms.PLAIN
    if plain and call.mask.is_whole(position + count - 1):
        parts = _plain_parts(query, cache, table, seq_len, position, call.scale, call.causal)
        if parts is not None:
            return _merge_parts(parts, query, cache.width)
    elif plain and count == 1:
        return _merge_parts(_window_parts(query, cache, table, seq_len, position, call), query, cache.width)
    sink_end, first, end = call.mask.reach(position + count - 1, position + count - 1, seq_len)
    keys = sink_end + end - first
    # A slice of as many queries as one of them has keys reads twice as many.
    step = max(1, min(count, max(16, keys), _MAX_SCORES // max(1, min(seq_len, 2 * keys) * query.shape[1])))
    slices = [
        _attend_masked(query[b : b + step], cache, table, seq_len, position + b, call) for b in range(0, count, step)
    ]
    return torch.cat([part[0] for part in slices]), torch.cat([part[1] for part in slices])


_Part = tuple[torch.Tensor, torch.Tensor]


def _plain_parts(
    query: torch.Tensor, cache: Cache, table: np.ndarray, seq_len: int, position: int, scale: float, causal: bool
) -> list[_Part] | None:
    """A run without window or score terms; None when a hole inside the run asks for a mask."""
    if not causal or query.shape[0] == 1:
        end = min(seq_len, position + 1) if causal else seq_len
        return _full_parts(query, cache, table, 0, end, scale)
    end = min(seq_len, position + query.shape[0])
    if end <= position:
        return _full_parts(query, cache, table, 0, end, scale)
    own = table[position // cache.block_size : -(-end // cache.block_size)]
    if bool((own < 0).any()):
        return None
    keys, values = cache.read(own)
    skip = position % cache.block_size
    square = _flash(query, keys[skip : skip + end - position], values[skip : skip + end - position], scale, True)
    return [*_full_parts(query, cache, table, 0, position, scale), square]


def _window_parts(
    query: torch.Tensor, cache: Cache, table: np.ndarray, seq_len: int, position: int, call: AttentionCall
) -> list[_Part]:
    """One query with a window: its window and its sink tokens."""
    sink_end, begin, end = call.mask.reach(position, position, seq_len)
    return [
        *_full_parts(query, cache, table, 0, sink_end, call.scale),
        *_full_parts(query, cache, table, begin, end, call.scale),
    ]


def _full_parts(
    query: torch.Tensor, cache: Cache, table: np.ndarray, begin: int, end: int, scale: float
) -> list[_Part]:
    """All present keys of [begin, end), no mask: one part where the blocks are adjacent, else one per gather."""
    if end <= begin:
        return []
    size = cache.block_size
    own = table[begin // size : -(-end // size)]
    if adjacent(own):
        keys, values = cache.read(own)
        skip = begin % size
        return [_flash(query, keys[skip : skip + end - begin], values[skip : skip + end - begin], scale, False)]
    pieces = _present(cache, table, begin, end)
    return [_flash(query, piece.keys, piece.values, scale, False) for piece in pieces]


@dataclass(frozen=True)
class _Piece:
    """Keys and values `[tokens, num_kv_heads, head_dim]` of some present tokens of a sequence, in its order."""

    keys: torch.Tensor
    values: torch.Tensor
    blocks: np.ndarray  # logical
    skip: int  # slots of the first block
    block_size: int

    @property
    def positions(self) -> np.ndarray:
        """`[tokens]`, of the sequence."""
        slots = self.blocks[:, None] * self.block_size + np.arange(self.block_size)
        return slots.reshape(-1)[self.skip : self.skip + len(self.keys)]


def _present(cache: Cache, table: np.ndarray, begin: int, end: int) -> Iterator[_Piece]:
    """The present tokens of [begin, end), as many at once as a gather may hold."""
    size = cache.block_size
    first = begin // size
    own = table[first : -(-end // size)] if end > begin else table[:0]
    present = np.flatnonzero(own >= 0)
    step = max(1, _GATHER_BYTES // cache.token_bytes // size)
    for cut in range(0, len(present), step):
        live = present[cut : cut + step]
        keys, values = cache.read(own[live])
        skip = begin - first * size if live[0] == 0 else 0
        stop = len(live) * size - (len(own) * size - (end - first * size) if live[-1] == len(own) - 1 else 0)
        yield _Piece(keys[skip:stop], values[skip:stop], live + first, skip, size)


def _flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool) -> _Part:
    """`[rows, heads, dim]` over `[keys, kv_heads, dim]`, and the lse `[rows, heads]`."""
    rows, heads, dim = query.shape
    kv_heads = keys.shape[1]
    q = query.transpose(0, 1)
    if not causal:
        # The queries of a group as rows of one KV head: each key is read once per group.
        q = q.reshape(kv_heads, heads // kv_heads * rows, dim)
    out, lse = flash_kernel(q[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None], causal, scale)
    return out.reshape(heads, rows, -1).transpose(0, 1), lse.reshape(heads, rows).transpose(0, 1)


def _merge_parts(parts: list[_Part], query: torch.Tensor, width: int) -> _Part:
    """Parts over disjoint keys, each with at least one key, as one; `width` is the head_dim of the result."""
    if not parts:
        out = query.new_zeros((*query.shape[:2], width))
        return out, query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
    out, lse = parts[0]
    for other, other_lse in parts[1:]:
        weight = torch.sigmoid(other_lse - lse).masked_fill_(other_lse == -math.inf, 0.0)
        out = torch.lerp(out.float(), other.float(), weight[..., None])
        lse = torch.logaddexp(lse, other_lse)
    return out, lse


def _attend_masked(
    query: torch.Tensor, cache: Cache, table: np.ndarray, seq_len: int, position: int, call: AttentionCall
) -> _Part:
    """A slice of a run with the predicate as a mask."""
    rows = query.shape[0]
    sink_end, begin, end = call.mask.reach(position, position + rows - 1, seq_len)
    pieces = [piece for b, e in ((0, sink_end), (begin, end)) for piece in _present(cache, table, b, e)]
    if not pieces:
        return _merge_parts([], query, cache.width)
    t = np.concatenate([piece.positions for piece in pieces])
    keys = torch.cat([piece.keys for piece in pieces])
    values = torch.cat([piece.values for piece in pieces])
    return _masked_part(query, t, keys, values, np.arange(position, position + rows), call)


def _attend_tree(
    query: torch.Tensor,
    cache: Cache,
    table: np.ndarray,
    seq_len: int,
    positions: np.ndarray,
    bits: np.ndarray,
    call: AttentionCall,
) -> _Part:
    """The queries of one sequence, whose own tokens attend to one another as `bits` say."""
    own_begin = max(0, seq_len - len(positions))
    parts: list[_Part] = []
    sees_all = not call.causal or int(positions.min()) >= own_begin - 1
    if call.terms.PLAIN and not call.mask.BOUNDED and sees_all:
        parts += _full_parts(query, cache, table, 0, own_begin, call.scale)
    else:
        sink_end, begin, end = call.mask.reach(int(positions.min()), int(positions.max()), own_begin)
        for span in ((0, sink_end), (begin, end)):
            for piece in _present(cache, table, *span):
                live = call.mask.live(piece.positions, positions)
                parts.append(_live_part(query, piece, live, positions, call))
    for piece in _present(cache, table, own_begin, seq_len):
        own = piece.positions - own_begin
        parts.append(_live_part(query, piece, bits[:, own], positions, call, positions[own]))
    return _merge_parts(parts, query, cache.width)


def _live_part(
    query: torch.Tensor,
    piece: _Piece,
    live: np.ndarray,
    positions: np.ndarray,
    call: AttentionCall,
    key_positions: np.ndarray | None = None,
) -> _Part:
    """Queries over those keys of a piece that one of them attends to, `live` saying which; the others may be NaN."""
    some = live.any(axis=0)
    t = (piece.positions if key_positions is None else key_positions)[some]
    index = torch.from_numpy(np.flatnonzero(some))
    keys, values = piece.keys[index], piece.values[index]
    step = max(1, _MAX_SCORES // max(1, len(t) * query.shape[1]))
    parts = []
    for b in range(0, len(query), step):
        rows = slice(b, b + step)
        parts.append(_masked_part(query[rows], t, keys, values, positions[rows], call, live[rows][:, some]))
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def _masked_part(
    query: torch.Tensor,
    key_positions: np.ndarray,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: np.ndarray,
    call: AttentionCall,
    live: np.ndarray | None = None,
) -> _Part:
    """Queries at `positions` over some keys, with the predicate as a mask, or what is `live`."""
    rows, heads, _ = query.shape
    t, p = torch.from_numpy(key_positions), torch.from_numpy(positions)[:, None]
    kv_heads = keys.shape[1]
    q = rearrange(query.float(), "row (kv group) dim -> kv (group row) dim", kv=kv_heads)
    score = torch.matmul(q, rearrange(keys.float(), "key kv dim -> kv dim key")).view(heads, rows, -1).mul_(call.scale)
    score = call.terms.apply(score, t - p, call.alibi_slopes)
    dead = torch.from_numpy(~(call.mask.live(key_positions, positions) if live is None else live))
    score.masked_fill_(dead, -math.inf)
    lse = torch.logsumexp(score, -1)
    weight = torch.exp_(score.sub_(lse.masked_fill(lse == -math.inf, 0.0)[..., None]))
    out = torch.matmul(weight.view(kv_heads, -1, len(t)), rearrange(values.float(), "key kv dim -> kv key dim"))
    return rearrange(out, "kv (group row) dim -> row (kv group) dim", row=rows), lse.transpose(0, 1)


def _attend_scattered(
    query: torch.Tensor, cache: Cache, table: np.ndarray, seq_len: int, positions: np.ndarray, call: AttentionCall
) -> _Part:
    """Queries at ascending positions far apart, without a window: one pass over the keys for all of them."""
    plain = call.terms.PLAIN
    out = query.new_zeros((*query.shape[:2], cache.width), dtype=torch.float32)
    lse = query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
    end = min(seq_len, int(positions[-1]) + 1) if call.causal else seq_len
    for piece in _present(cache, table, 0, end):
        t, keys, values = piece.positions, piece.keys, piece.values
        # Ascending positions: the queries from `some` on see a key of the piece, those from `every` on all of them.
        some, every = (int(np.searchsorted(positions, bound)) if call.causal else 0 for bound in (t[0], t[-1]))
        every = every if plain else len(positions)
        step = max(1, _MAX_SCORES // (len(t) * query.shape[1]))
        cuts = [slice(b, min(b + step, every)) for b in range(some, every, step)]
        parts = [(rows, _masked_part(query[rows], t, keys, values, positions[rows], call)) for rows in cuts]
        if every < len(positions):
            rows = slice(every, len(positions))
            parts.append((rows, _flash(query[rows], keys, values, call.scale, False)))
        for rows, part in parts:
            out[rows], lse[rows] = _merge_parts([(out[rows], lse[rows]), part], query, cache.width)
    return out, lse


def _decode_batch(
    query: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cache: Cache,
    tables: np.ndarray,
    lens: list[int],
    starts: list[int],
    single: np.ndarray,
    scale: float,
) -> set[int]:
    """Decodes short sequences together in padded calls; returns the indices of those it did."""
    keys_of = np.array([lens[i] for i in single], dtype=np.int64)
    order = np.argsort(keys_of, kind="stable")
    order = order[(keys_of[order] > 0) & (keys_of[order] <= _BATCHED_DECODE_KEYS)]
    done: set[int] = set()
    while len(order):
        # As many of the longest as keep the padding below the live keys.
        longest = int(keys_of[order[-1]])
        fit = max(1, _GATHER_BYTES // (longest * cache.token_bytes))
        count = min(fit, int((keys_of[order] * 2 >= longest).sum()))
        group, order = order[-count:], order[:-count]
        if len(group) == 1:
            continue
        members = single[group]
        blocks = -(-longest // cache.block_size)
        table = tables[members, :blocks]
        valid = np.arange(blocks * cache.block_size)[None, :] < keys_of[group][:, None]
        valid &= np.repeat(table >= 0, cache.block_size, axis=1)
        if not valid.any(axis=1).all():
            continue
        table = np.where(valid[:, :: cache.block_size], table, 0)
        keys, values = cache.read(table.reshape(-1))
        if not valid.all():
            dead = torch.from_numpy(np.flatnonzero(~valid))
            keys = _zeroed(keys, cache.key, dead)
            values = _zeroed(values, cache.value, dead)
        _, heads, dim = query.shape
        kv_heads = keys.shape[1]
        rows = torch.tensor([starts[i] for i in members])
        bias = torch.zeros(valid.shape, dtype=query.dtype).masked_fill_(torch.from_numpy(~valid), -math.inf)
        own_out, own_lse = flash_kernel(
            query[rows].view(len(members), kv_heads, heads // kv_heads, dim),
            keys.view(len(members), -1, kv_heads, dim).transpose(1, 2),
            values.view(len(members), -1, kv_heads, cache.width).transpose(1, 2),
            False,
            scale,
            bias[:, None, None, :],
        )
        out[rows] = own_out.reshape(-1, heads, cache.width).to(out.dtype)
        lse[rows] = own_lse.reshape(-1, heads)
        done.update(members.tolist())
    return done


def _zeroed(rows: torch.Tensor, cache: torch.Tensor, dead: torch.Tensor) -> torch.Tensor:
    """`rows` with its dead rows 0, since a masked NaN would still poison the product. Never writes to the cache."""
    if rows.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr():
        rows = rows.clone()
    return rows.index_fill_(0, dead, 0.0)


def _add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, num_rows: int) -> None:
    """Adds each head's sink logit to the denominators of the first `num_rows` rows."""
    old, sink = lse[:num_rows], sinks.float()[None]
    out[:num_rows] = out[:num_rows].float() * torch.sigmoid(old - sink)[..., None]
    lse[:num_rows] = torch.logaddexp(old, sink.expand_as(old))
