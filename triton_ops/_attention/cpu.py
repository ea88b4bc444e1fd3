"""Paged attention on the CPU in plain PyTorch, fast enough to serve a small model.

One predicate for all operators (`Mask`), and no `[queries, keys]` matrix where PyTorch's flash kernel for CPUs
serves: over all that is before a run of queries without a mask, and over the run itself causally.

    cpu_sequences.py    one block table for all heads: sequence by sequence
    cpu_heads.py        a table per KV head, a list per query: runs of queries (cpu_runs.py)
    cpu_blocks.py       rows of queries, and the live blocks of each
    cpu_rows.py         many short lists of blocks in one call of the flash kernel: decodes, runs
    cpu_in_place.py     single queries over blocks of one KV head, without a copy of keys and values
    cpu_steps.py        over those, steps in which all sequences have as many queries, without padding or masks
    cpu_masked.py       what that kernel cannot express: terms of scores, trees, the edge of a mask or a hole in a run
    cpu_cache.py        blocks read, cpu_flash.py: the kernel, and parts merged by their log-sum-exp
"""

from __future__ import annotations

import math

import torch

from .call import AttentionCall
from .cpu_cache import opened
from .cpu_flash import Part
from .cpu_heads import attend_heads, attend_lists
from .cpu_sequences import attend_sequences
from .cpu_steps import attend_steps


def attend(call: AttentionCall) -> Part:
    """Attention of packed queries over block tables.

    A query attends to those key positions before seq_len whose block is present that the call's `mask` has live.

    Returns:
        out like query, and lse `[num_tokens, num_heads]` float32: the natural logarithm of the softmax's denominator.
        Rows with nothing to attend to hold 0 and -inf.
    """
    query = call.query
    by_head = call.query_blocks is not None or call.block_tables.dim() == 3
    part = attend_steps(call) if by_head else None
    if part is None:
        out = query.new_zeros((*query.shape[:2], call.value_cache.shape[3]))
        lse = query.new_full(query.shape[:2], -math.inf, dtype=torch.float32)
        if call.query_blocks is not None:
            attend_lists(call, *opened(call), out, lse)
        elif by_head:
            attend_heads(call, *opened(call), out, lse)
        else:
            attend_sequences(call, out, lse, set())
    else:
        out, lse = part
    if call.sinks is not None:
        _add_sinks(out, lse, call.sinks, int(call.query_start_loc[-1]))
    return out, lse


def _add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor, num_rows: int) -> None:
    """Adds each head's sink logit to the denominators of the first `num_rows` rows."""
    old, sink = lse[:num_rows], sinks.float()[None]
    out[:num_rows] = out[:num_rows].float() * torch.sigmoid(old - sink)[..., None]
    lse[:num_rows] = torch.logaddexp(old, sink.expand_as(old))
