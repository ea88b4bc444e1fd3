"""Launches the attention kernels of a call: memory for results, addresses filled in, nothing decided."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .._launcher import aligned, remember
from .._quantize import as_codes, equal_scales
from .._triton import INTERPRET, require_triton, triton
from .call import AttentionCall
from .checks import check_attention, check_grad
from .kernel import _attention_kernel, _merge_splits_kernel
from .plan import launch_plan
from .prepare import Grid, Prepared, prepare
from .specialized import _specialized_attention_kernel

_visits: torch.Tensor | None = None
_prepared: dict[object, Prepared] = {}


@contextlib.contextmanager
def count_tiles(device: torch.device) -> Iterator[torch.Tensor]:
    """Within it, every attention kernel adds the key tiles its programs visited to the yielded int32 element."""
    global _visits
    _visits = torch.zeros(1, dtype=torch.int32, device=device)
    try:
        yield _visits
    finally:
        _visits = None


def forget_prepared() -> None:
    """Makes the next calls decide anew: for whoever changes what the decisions rest on."""
    _prepared.clear()


def launch_attention(
    call: AttentionCall, with_lse: bool = True, out_dtype: torch.dtype | None = None, tiled: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs the attention kernels; a launch each for decodes and prefills, and one that sums their splits.

    Args:
        call: The call; checked here as far as metadata tells.
        with_lse: Whether the second result is wanted; without it, it is empty.
        out_dtype: Of the first result; None: like query.
        tiled: Whether even few queries are tiled, not decoded from the work list.
    """
    require_triton("attention")
    query, key_cache, value_cache, block_tables = call.query, call.key_cache, call.value_cache, call.block_tables
    seq_lens, starts, positions, plan = call.seq_lens, call.query_start_loc, call.query_positions, call.plan
    alibi_slopes, sinks, k_scale, v_scale = call.alibi_slopes, call.sinks, call.k_scale, call.v_scale
    is_aligned = aligned(query, key_cache, value_cache, block_tables, seq_lens, starts, positions, plan)
    is_aligned = is_aligned and aligned(alibi_slopes, sinks, k_scale, v_scale)
    signature = (with_lse, out_dtype, tiled, is_aligned, _visits is None, *call.signature())
    prepared = _prepared.get(signature)
    if prepared is None:
        check_attention(call)
    elif torch.is_grad_enabled():
        check_grad(call)
    out = query.new_empty(query.shape, dtype=out_dtype)
    lse = query.new_empty(query.shape[:2] if with_lse else 0, dtype=torch.float32)
    if prepared is None:
        if out.shape[0] == 0 or out.shape[1] == 0:
            return out, lse
        if block_tables.shape[0] == 0 or block_tables.shape[1] == 0:
            # Nothing to attend to: sinks alone decide, and only rows of a sequence have them.
            return _empty(call, out, lse)
        prepared = remember(_prepared, signature, prepare(call, with_lse, tiled, is_aligned, _visits is not None))

    block_size = key_cache.shape[1]
    shape, options = prepared.shape, prepared.options
    if plan is None:
        plan = torch.empty(shape.size, dtype=torch.int32, device=query.device)
        launch_plan(plan, block_tables, seq_lens, starts, positions, block_size, options, prepared.target_items)
    if prepared.convert_codes:
        key_cache, value_cache = as_codes(key_cache), as_codes(value_cache)
    k_scale, v_scale = equal_scales(k_scale, v_scale, key_cache.shape[2])
    if prepared.descriptors and not INTERPRET:
        # Descriptors that a kernel makes lie in memory that the launcher has to give it.
        triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8, device=query.device))

    def launch(kind: Grid | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        if kind is None:
            return None
        splits = None
        if count := kind.split_rows:
            splits = (
                query.new_empty((count, *query.shape[1:]), dtype=torch.float32),
                query.new_empty((count, query.shape[1]), dtype=torch.float32),
            )
        rows, rows_lse = splits or (out, out)
        kind.launch(
            _attention_kernel,
            kind.programs,
            query,
            key_cache,
            value_cache,
            out,
            lse,
            rows,
            rows_lse,
            block_tables,
            seq_lens,
            starts,
            seq_lens if positions is None else positions,
            plan,
            out if alibi_slopes is None else alibi_slopes,
            out if sinks is None else sinks,
            out if k_scale is None else k_scale,
            out if v_scale is None else v_scale,
            seq_lens if _visits is None else _visits,
            shape.num_seqs,
            query.shape[0],
            shape.max_tiles,
            shape.max_items,
            prepared.decode_q,
            kind.num_splits,
            call.scale,
            call.softcap,
            call.window,
            options.num_sink_tokens,
            options.key_begin,
            key_cache.shape[0],
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            block_tables.stride(0),
        )
        return splits

    if prepared.specialized is not None:
        prepared.specialized.launch(
            _specialized_attention_kernel,
            prepared.specialized.programs,
            query,
            key_cache,
            value_cache,
            out,
            lse,
            block_tables,
            seq_lens,
            starts,
            plan,
            out if sinks is None else sinks,
            shape.num_seqs,
            query.shape[0],
            shape.max_tiles,
            shape.max_items,
            call.scale,
            call.window,
            options.num_sink_tokens,
            options.key_begin,
            key_cache.shape[0],
            *query.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            block_tables.stride(0),
        )
    decode_splits, prefill_splits = launch(prepared.decode), launch(prepared.prefill)
    if decode_splits or prefill_splits:
        prepared.merge.launch(
            _merge_splits_kernel,
            prepared.merge.programs,
            out,
            lse,
            *(decode_splits or prefill_splits or ()),
            *(prefill_splits or decode_splits or ()),
            starts,
            plan,
            out if sinks is None else sinks,
            shape.num_seqs,
            query.shape[0],
            prepared.decode_q,
            prepared.merge.num_splits,
        )
    return out, lse


def _empty(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """No sequence or no block table: every row is 0."""
    out.zero_()
    lse.fill_(float("-inf"))
    if lse.numel() and call.sinks is not None:
        rows = torch.arange(out.shape[0], device=out.device) < call.query_start_loc[-1]
        lse.copy_(torch.where(rows[:, None], call.sinks.float()[None], lse))
    return out, lse
