"""From the arguments of an attention operator to its reference or its kernels, checked on the way."""

from __future__ import annotations

import torch

from .._debug import debug_mode_enabled
from .checks import check_attention, check_attention_values
from .launch import launch_attention, plan_options
from .plan import check_plan
from .reference import Mask, attend

OPTIONS = (
    "bool causal=True, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, "
    "Tensor? v_scale=None, SymInt? max_query_len=None, SymInt? max_seq_len=None, Tensor? plan=None, "
    "bool batch_invariant=False"
)
"""Schema of the arguments that every attention operator ends with."""


def run_attention(
    use_kernel: bool,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_positions: torch.Tensor | None,
    scale: float,
    window: int,
    num_sink_tokens: int,
    causal: bool = True,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    plan: torch.Tensor | None = None,
    batch_invariant: bool = False,
    with_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Checks the call and computes it; the lse is empty when the kernels were told not to write it."""
    check_attention(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        softcap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        window,
        num_sink_tokens,
        query_positions,
    )
    block_size = key_cache.shape[1]
    mask = Mask(causal, window, num_sink_tokens, softcap, alibi_slopes)
    options = plan_options(mask, query_positions is not None, batch_invariant)
    read_values = query.device.type == "cpu" or debug_mode_enabled()
    if read_values:
        check_attention_values(
            key_cache,
            block_tables,
            seq_lens,
            query_start_loc,
            query.shape[0],
            max_query_len,
            max_seq_len,
            query_positions,
        )
    if plan is not None:
        check_plan(plan, block_tables, seq_lens, query_start_loc, query_positions, block_size, options, read_values)
    tensors = (query, key_cache, value_cache, block_tables, seq_lens, query_start_loc)
    if not use_kernel:
        return attend(
            *tensors, scale, mask, query_positions=query_positions, sinks=sinks, k_scale=k_scale, v_scale=v_scale
        )
    out, lse = launch_attention(
        *tensors,
        scale,
        mask,
        options,
        query_positions=query_positions,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        plan=plan,
        batch_invariant=batch_invariant,
        with_lse=with_lse,
    )
    return out, query.new_empty(0) if lse is None else lse


def fake_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    window: int = 0,
    num_sink_tokens: int = 0,
    query_positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results without data, after the same checks: misuse is refused while tracing."""
    check_attention(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        softcap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        window,
        num_sink_tokens,
        query_positions,
    )
    return query.new_empty(query.shape), query.new_empty(query.shape[:2], dtype=torch.float32)
