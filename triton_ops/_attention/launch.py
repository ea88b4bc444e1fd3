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
from .kernel import _attention_kernel
from .merge import _merge_splits_kernel
from .plan import launch_plan
from .prepare import Prepared, prepare
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
    tensors = [query, key_cache, value_cache, block_tables, seq_lens, starts]
    tensors += [t for t in (positions, plan, alibi_slopes, sinks, k_scale, v_scale) if t is not None]
    is_aligned = aligned(*tensors)
    # A kernel that takes the scale to be positive does not serve others.
    key = (with_lse, out_dtype, tiled, is_aligned, _visits is None, call.scale > 0, *call.signature())
    prepared = _prepared.get(key)
    if prepared is None:
        check_attention(call)
    elif torch.is_grad_enabled():
        check_grad(call)
    value_dim = value_cache.shape[3]
    out = query.new_empty((*query.shape[:2], value_dim), dtype=out_dtype)
    lse = query.new_empty(query.shape[:2] if with_lse else 0, dtype=torch.float32)
    if prepared is None:
        if out.shape[0] == 0 or out.shape[1] == 0:
            return out, lse
        if block_tables.shape[0] == 0 or block_tables.shape[1] == 0:
            # Nothing to attend to: sinks alone decide, and only rows of a sequence have them.
            return _empty(call, out, lse)
        prepared = remember(_prepared, key, prepare(call, with_lse, tiled, is_aligned, _visits is not None))

    if plan is None:
        plan = torch.empty(prepared.shape.size, dtype=torch.int32, device=query.device)
        launch_plan(
            plan, block_tables, seq_lens, starts, positions, call.block_size, prepared.options, prepared.target_items
        )
    if prepared.descriptors and not INTERPRET:
        with _scratch_memory(query.device):
            _run(call, prepared, plan, out, lse)
    else:
        _run(call, prepared, plan, out, lse)
    return out, lse


@contextlib.contextmanager
def _scratch_memory(device: torch.device) -> Iterator[None]:
    """Within it, launches have memory on `device` for the descriptors that kernels make."""
    from triton.runtime import _allocation

    def allocate(size: int, align: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    before = _allocation._allocator.get()
    triton.set_allocator(allocate)
    try:
        yield
    finally:
        triton.set_allocator(before)


def _split_buffers(plan: torch.Tensor, rows: int, num_heads: int, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts of rows and their lse, which nothing reads after the call: kept with the plan for the next layer's."""
    # Layers on another stream may run at the same time.
    stream = 0
    if plan.device.type != "cpu":
        driver = triton.runtime.driver.active
        stream = driver.get_current_stream(driver.get_current_device())
    kind = (stream, rows, num_heads, value_dim)
    kept = getattr(plan, "_pc_splits", None)
    if kept is None or kept[0] != kind:
        parts = torch.empty(rows, num_heads, value_dim, dtype=torch.float32, device=plan.device)
        kept = kind, (parts, torch.empty(rows, num_heads, dtype=torch.float32, device=plan.device))
        plan._pc_splits = kept  # type: ignore[attr-defined]
    buffers: tuple[torch.Tensor, torch.Tensor] = kept[1]
    return buffers


def _run(call: AttentionCall, prepared: Prepared, plan: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
    """Launches what was decided, on the addresses of this call."""
    query, key_cache, value_cache, positions = call.query, call.key_cache, call.value_cache, call.query_positions
    seq_lens, starts, sinks = call.seq_lens, call.query_start_loc, call.sinks
    k_scale, v_scale = call.k_scale, call.v_scale
    shape, made_for = prepared.shape, prepared.options
    if prepared.convert_codes:
        key_cache, value_cache = as_codes(key_cache), as_codes(value_cache)
    if k_scale is not None:
        k_scale, v_scale = equal_scales(k_scale, v_scale, key_cache.shape[2])
    num_tokens, num_heads, value_dim = out.shape
    decode_splits = prefill_splits = None
    if prepared.specialized is not None:
        prepared.specialized.launch(
            _specialized_attention_kernel,
            prepared.specialized.programs,
            query,
            key_cache,
            value_cache,
            out,
            lse,
            call.block_tables,
            seq_lens,
            starts,
            plan,
            out if sinks is None else sinks,
            shape.num_seqs,
            num_tokens,
            shape.max_tiles,
            shape.max_items,
            call.scale,
            call.window,
            made_for.num_sink_tokens,
            made_for.key_begin,
            *prepared.numbers,
        )
    for kind in (prepared.decode, prepared.prefill):
        if kind is None:
            continue
        splits = None
        if kind is prepared.decode and kind.split_rows:
            splits = decode_splits = _split_buffers(plan, kind.split_rows, num_heads, value_dim)
        elif kind.split_rows:
            splits = prefill_splits = (
                query.new_empty((kind.split_rows, num_heads, value_dim), dtype=torch.float32),
                query.new_empty((kind.split_rows, num_heads), dtype=torch.float32),
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
            call.block_tables,
            seq_lens,
            starts,
            seq_lens if positions is None else positions,
            plan,
            out if call.alibi_slopes is None else call.alibi_slopes,
            out if sinks is None else sinks,
            out if k_scale is None else k_scale,
            out if v_scale is None else v_scale,
            seq_lens if _visits is None else _visits,
            shape.num_seqs,
            num_tokens,
            shape.max_tiles,
            shape.max_items,
            prepared.decode_q,
            kind.num_splits,
            call.scale,
            call.softcap,
            call.window,
            made_for.num_sink_tokens,
            made_for.key_begin,
            *prepared.numbers,
        )
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
            num_tokens,
            prepared.decode_q,
            prepared.merge.num_splits,
        )


def _empty(call: AttentionCall, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """No sequence or no block table: every row is 0."""
    out.zero_()
    lse.fill_(float("-inf"))
    if lse.numel() and call.sinks is not None:
        rows = torch.arange(out.shape[0], device=out.device) < call.query_start_loc[-1]
        lse.copy_(torch.where(rows[:, None], call.sinks.float()[None], lse))
    return out, lse
