"""Paged attention on the CPU in PyTorch, fast enough to serve a small model: the entry, and which path a call takes.

One predicate for all operators (`Mask`), and no `[queries, keys]` matrix where PyTorch's flash kernel for CPUs
serves: over all that is before a chunk of queries without a mask, and over the chunk itself causally.

    cpu_dense.py        one block table for all heads: sequence by sequence
    cpu_sparse.py       decodes together; a table per KV head, a list per query
    cpu_masked.py       the flash kernel, and what it cannot express: score modifiers, trees, the edge of a mask
    cpu_cache.py        keys and values read from blocks
    cpu_plain.py        without numpy
"""

from __future__ import annotations

import math

import torch

from .._numpy import HAS_NUMPY, np
from .call import AttentionCall
from .cpu_dense import LONG_CHUNK, attend_sequences
from .cpu_masked import Part, attend_united
from .cpu_plain import attend_plainly
from .cpu_sparse import Chunks, attend_chunks, attend_decodes

# Neighbours whose lists are united where scores have a mask or a modifier of their own.
_UNITED = 16


def attend(call: AttentionCall) -> Part:
    """Results like query, and natural lse `[num_tokens, num_heads]` float32; 0 and -inf for rows without a key."""
    query, by_head = call.query, call.query_blocks is not None or call.block_tables.dim() == 3
    may_decode = by_head and query.shape[0] > 0 and _flash_serves(call)
    if may_decode and call.query_start_loc.tolist() == [*range(query.shape[0] + 1)]:
        out, lse = attend_decodes(call)
    else:
        out = query.new_zeros((*query.shape[:2], call.value_cache.shape[3]))
        lse = query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
        if call.query_blocks is not None:
            _attend_lists(call, out, lse)
        elif by_head:
            _attend_tables(call, out, lse)
        else:
            (attend_sequences if HAS_NUMPY or call.tree_mask is not None else attend_plainly)(call, out, lse)
    if call.sinks is not None:
        _add_sinks(out, lse, call.sinks, int(call.query_start_loc[-1]))
    return out, lse


def _flash_serves(call: AttentionCall) -> bool:
    """Whether scores have no modifiers, and no mask of a tree."""
    return call.terms.PLAIN and call.tree_mask is None


def _attend_tables(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor) -> None:
    """A block table per KV head."""
    counts = np.diff(call.query_start_loc.numpy())
    rest = np.ones(len(counts), dtype=bool)
    if _flash_serves(call):
        chunks = Chunks.of(call, call.table_heads)
        # Short chunks share one pass over the keys: each alone would gather all that is before it.
        many = np.bincount(chunks.sequence, minlength=len(rest)) // call.table_heads
        rest = (counts > 1) if call.mask.BOUNDED else many > np.maximum(1, counts // LONG_CHUNK)
        rest[chunks.sequence[chunks.own < 0]] = True
        attend_chunks(call, chunks[~rest[chunks.sequence]], out, lse)
    if rest.any():
        for head in range(call.table_heads):
            heads, own = _of_head(call, head)
            attend_sequences(own, out[:, heads], lse[:, heads], set(np.flatnonzero(~rest).tolist()))


def _attend_lists(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor) -> None:
    """A list of blocks per query and KV head."""
    assert call.query_blocks is not None
    lists, serves = call.query_blocks.numpy(), _flash_serves(call)
    if serves:
        chunks = Chunks.of(call, lists.shape[1], alone=call.mask.BOUNDED)
        attend_chunks(call, chunks[chunks.own >= 0], out, lse)
        chunks = chunks[chunks.own < 0]
        rest = np.stack([chunks.sequence, chunks.token, chunks.count, chunks.head], axis=1).tolist()
    else:
        starts = call.query_start_loc.tolist()
        sequences = [i for i, length in enumerate(call.seq_lens.tolist()) if length]
        rest = [[i, starts[i], starts[i + 1] - starts[i], head] for i in sequences for head in range(lists.shape[1])]
    for sequence, token, count, head in rest:
        heads, own = _of_head(call, head)
        for first in range(token, token + count, _UNITED):
            rows = slice(first, min(token + count, first + _UNITED))
            part = attend_united(own, sequence, rows, lists[rows, head])
            out[rows, heads], lse[rows, heads] = part


def _of_head(call: AttentionCall, head: int) -> tuple[slice, AttentionCall]:
    """Query heads of a KV head that has keys of its own, and the call of these alone."""
    group = call.query.shape[1] // call.key_cache.shape[2]
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


def _add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, num_tokens: int) -> None:
    """Adds each head's sink logit to the denominators of the first `num_tokens` tokens."""
    old, sink = lse[:num_tokens], sinks.float()[None]
    out[:num_tokens] = out[:num_tokens].float() * torch.sigmoid(old - sink)[..., None]
    lse[:num_tokens] = torch.logaddexp(old, sink.expand_as(old))
