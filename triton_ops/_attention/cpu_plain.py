"""Sequences one by one in PyTorch alone, each in one pass over its keys: where numpy is not installed."""

from __future__ import annotations

import torch

from .call import AttentionCall
from .cpu_masked import MAX_SCORES, masked_part


def attend_plainly(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Writes the results of all sequences of one block table each, without a tree, sinks left out."""
    starts = call.query_start_loc.tolist()
    for i, length in enumerate(call.seq_lens.tolist()):
        begin, end = starts[i : i + 2]
        positions = torch.arange(length - (end - begin), length)
        if call.query_positions is not None:
            positions = call.query_positions[begin:end].long()
        t = torch.arange(length)
        t = t[call.block_tables[i, t // call.block_size] >= 0]
        # Keys that no query attends to may be NaN.
        t = t[call.mask.live(t, positions).any(0)]
        if begin == end or not len(t):
            continue
        blocks, slots = call.block_tables[i, t // call.block_size].long(), t % call.block_size
        keys, values = (
            _read(cache, scale, blocks, slots)
            for cache, scale in ((call.key_cache, call.k_scale), (call.value_cache, call.v_scale))
        )
        step = max(1, MAX_SCORES // (len(t) * call.query.shape[1]))
        for first in range(begin, end, step):
            rows = slice(first, min(end, first + step))
            own = positions[rows.start - begin : rows.stop - begin]
            live = call.mask.live(t, own)
            part = masked_part(call.query[rows], t, keys, values, own, call, live)
            out[rows], lse[rows] = part[0].to(out.dtype), part[1]


def _read(cache: torch.Tensor, scale: torch.Tensor | None, blocks: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    if cache.dtype.itemsize == 1:  # no index takes float8
        rows = cache.view(torch.uint8)[blocks, slots].view(cache.dtype)
    else:
        rows = cache[blocks, slots]
    return rows if scale is None else rows.float() * scale.float()[:, None]
