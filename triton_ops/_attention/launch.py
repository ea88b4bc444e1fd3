"""Launches the attention kernels of a call: memory for results, addresses filled in, nothing decided."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

import torch

from .._launcher import aligned, current_stream, remember
from .._quantize import as_codes, equal_scales
from .._repeated import forget_repeated
from .._triton import INTERPRET, require_triton, triton
from .call import TENSOR_NAMES, TENSORS, AttentionCall
from .checks import check_attention, check_grad
from .kernel import _attention_kernel
from .lists_launch import prepare_lists
from .merge import _merge_splits_kernel
from .plan import launch_plan
from .prepare import prepare
from .prepared import Prepared
from .specialized import _specialized_attention_kernel

_visits: torch.Tensor | None = None
_prepared: dict[object, Prepared] = {}

Result = tuple[torch.Tensor, torch.Tensor]


@contextlib.contextmanager
def count_tiles(device: torch.device) -> Iterator[torch.Tensor]:
    """Within it, every attention kernel adds the key tiles its programs visited to the yielded int32 element."""
    global _visits
    _visits = torch.zeros(1, dtype=torch.int32, device=device)
    forget_prepared()
    try:
        yield _visits
    finally:
        _visits = None
        forget_prepared()


def forget_prepared() -> None:
    """Makes the next calls decide anew: for whoever changes what the decisions rest on."""
    _prepared.clear()
    forget_repeated()


def prepare_attention(names: tuple[str, ...], with_lse: bool, *values: Any) -> Callable[..., Any]:
    """What runs an operator's call, and all that differ from it in addresses and values only, on their arguments.

    Args:
        names: The operator's parameters.
        with_lse: Whether it gives the lse too, not the first result alone.
        values: The call's arguments.
    """
    call = AttentionCall.of(names, values, {})
    places = [names.index(name) if name in names else len(names) for name in TENSOR_NAMES]
    tensors = itemgetter(*places)
    if call.query_blocks is not None:
        require_triton("attention")
        check_attention(call)
        if 0 not in call.query.shape[:2] and 0 not in call.block_tables.shape:
            run = prepare_lists(call, with_lse, aligned(*TENSORS(call)), _visits)
            if with_lse:
                return lambda *values: run(tensors((*values, None)))
            return lambda *values: run(tensors((*values, None)))[0]
    prepared = _decided(call, with_lse)
    if prepared is None:

        def none(*values: Any) -> Any:
            results = _empty(AttentionCall.of(names, values, {}), with_lse)
            return results if with_lse else results[0]

        return none
    launch = _launcher_of(prepared)
    if with_lse:
        return lambda *values: launch(prepared, tensors((*values, None)))
    return lambda *values: launch(prepared, tensors((*values, None)))[0]


def launch_attention(
    call: AttentionCall, with_lse: bool = True, out_dtype: torch.dtype | None = None, tiled: bool = False
) -> Result:
    """Runs the attention kernels; a launch each for decodes and prefills, and one that sums their splits.

    Args:
        call: The call; checked here as far as metadata tells.
        with_lse: Whether the second result is wanted; without it, it is empty.
        out_dtype: Of the first result; None: like query.
        tiled: Whether even few queries are tiled, not decoded from the work list.
    """
    prepared = _decided(call, with_lse, out_dtype, tiled)
    if prepared is None:
        return _empty(call, with_lse, out_dtype)
    return _launcher_of(prepared)(prepared, TENSORS(call))


def _decided(
    call: AttentionCall, with_lse: bool, out_dtype: torch.dtype | None = None, tiled: bool = False
) -> Prepared | None:
    """What such a call launches, checked by its metadata; None where there is nothing to attend to."""
    require_triton("attention")
    is_aligned = aligned(*TENSORS(call))
    key = (with_lse, out_dtype, tiled, is_aligned, call.scale, *call.signature())
    prepared = _prepared.get(key)
    if prepared is None:
        check_attention(call)
        if 0 in call.query.shape[:2] or 0 in call.block_tables.shape:
            return None
        prepared = prepare(call, with_lse, tiled, is_aligned, _visits is not None, out_dtype)
        return remember(_prepared, key, prepared)
    if torch.is_grad_enabled():
        check_grad(call)
    return prepared


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


def _split_buffers(
    plan: torch.Tensor, name: str, stream: int | None, rows: int, num_heads: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Parts of rows and their lse, which nothing reads after the call: kept with the plan for the next layer's."""
    # Layers on another stream may run at the same time.
    kind = (stream, rows, num_heads, value_dim)
    kept: dict[object, tuple[torch.Tensor, torch.Tensor]] | None = getattr(plan, name, None)
    if kept is None:
        kept = {}
        setattr(plan, name, kept)
    buffers = kept.get(kind)
    if buffers is None:  # and the others stay, whose addresses a captured graph may hold
        parts = torch.empty(rows, num_heads, value_dim, dtype=torch.float32, device=plan.device)
        buffers = kept[kind] = parts, torch.empty(rows, num_heads, dtype=torch.float32, device=plan.device)
    return buffers


def _launcher_of(prepared: Prepared) -> Callable[[Prepared, tuple[Any, ...]], Result]:
    return _run_described if prepared.descriptors and not INTERPRET else _run


def _run_described(prepared: Prepared, tensors: tuple[Any, ...]) -> Result:
    """`_run` with memory for descriptors."""
    with _scratch_memory(tensors[0].device):
        return _run(prepared, tensors)


def _run(prepared: Prepared, tensors: tuple[Any, ...]) -> Result:
    """Launches what was decided, on the addresses of this call: its TENSORS."""
    query, key_cache, value_cache, tables, seq_lens, starts, *others = tensors
    positions, plan, alibi, sinks, k_scale, v_scale, tree, _ = others
    results = prepared.results
    # Of a contiguous tensor, half the time of `new_empty`.
    out = torch.empty_like(query) if results.like_query else query.new_empty(results.shape, dtype=results.dtype)
    lse = query.new_empty(results.shape[:2], dtype=torch.float32) if results.with_lse else prepared.no_lse
    if plan is None:
        plan = torch.empty(prepared.shape.size, dtype=torch.int32, device=query.device)
        launch_plan(
            plan,
            tables,
            seq_lens,
            starts,
            positions,
            key_cache.shape[1],
            prepared.options,
            prepared.target_items,
        )
    stream = None if query.is_cpu else current_stream()
    if prepared.convert_codes:
        key_cache, value_cache = as_codes(key_cache), as_codes(value_cache)
    if k_scale is not None:
        k_scale, v_scale = equal_scales(k_scale, v_scale, key_cache.shape[2])
    lengths = (seq_lens, starts)
    positions = seq_lens if positions is None else positions
    alibi, sinks = (out if alibi is None else alibi), (out if sinks is None else sinks)
    k_scale, v_scale = (out if k_scale is None else k_scale), (out if v_scale is None else v_scale)
    visits = seq_lens if _visits is None else _visits
    tree = seq_lens if tree is None else tree
    splits: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    if (special := prepared.specialized) is not None:
        special.launch.launch(
            _specialized_attention_kernel,
            special.programs,
            (query, key_cache, value_cache, out, lse, tables, *lengths, plan, sinks),
            special.numbers,
            stream,
        )
    for name, kind in (("_pc_decode_splits", prepared.decode), ("_pc_prefill_splits", prepared.prefill)):
        if kind is None:
            continue
        rows = (out, out)
        if kind.split_rows:
            rows = splits[name] = _split_buffers(
                plan, name, stream, kind.split_rows, kind.split_heads, results.shape[2]
            )
        kind.launch.launch(
            _attention_kernel,
            kind.programs,
            (
                *(query, key_cache, value_cache, out, lse, *rows, tables, *lengths, positions, plan),
                *(alibi, sinks, k_scale, v_scale, visits, tree),
            ),
            kind.numbers,
            stream,
        )
    if splits:
        merge, (one, *other) = prepared.merge, splits.values()
        merge.launch.launch(
            _merge_splits_kernel,
            merge.programs,
            (out, lse, *one, *(other[0] if other else one), starts, plan, sinks),
            merge.numbers,
            stream,
        )
    return out, lse


def _empty(call: AttentionCall, with_lse: bool, out_dtype: torch.dtype | None = None) -> Result:
    """No sequence or no block table: every row is 0. Sinks alone decide, and only rows of a sequence have them."""
    query = call.query
    out = query.new_zeros((*query.shape[:2], call.value_cache.shape[3]), dtype=out_dtype)
    lse = query.new_full(query.shape[:2] if with_lse else (0,), float("-inf"), dtype=torch.float32)
    if lse.numel() and call.sinks is not None:
        rows = torch.arange(out.shape[0], device=out.device) < call.query_start_loc[-1]
        lse.copy_(torch.where(rows[:, None], call.sinks.float()[None], lse))
    return out, lse
