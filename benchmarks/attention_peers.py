"""Attention kernels of other projects, where they are installed or unpacked: FlashInfer, flash-attn-4, vLLM."""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from .attention import AttentionCall
from .conditions import version
from .registry import UnsupportedError

Run = Callable[[], Any]


def refuse_beyond_dense(call: AttentionCall, name: str, window: bool = True, quantized: bool = False) -> None:
    """Refuses what rivals without holes, sink tokens or scattered queries cannot do."""
    case = call.case
    refused = {
        "holes": case.live is not None,
        "queries at scattered positions": case.queries is not None,
        "sink tokens": case.num_sink_tokens > 0,
        "a window": case.window > 0 and not window,
        "a quantized cache": case.cache_dtype is not None and not quantized,
    }
    for what, present in refused.items():
        if present:
            raise UnsupportedError(f"{name} has no {what}")


def run_flashinfer(call: AttentionCall) -> Run:
    """FlashInfer, planned outside of the timing as it is in use."""
    import flashinfer

    refuse_beyond_dense(call, "FlashInfer", quantized=True)
    case, device = call.case, call.query.device
    if case.cache_dtype == "int8":
        raise UnsupportedError("int8 cache")
    if case.sinks:
        raise UnsupportedError("attention sinks")
    counts = [-(-length // case.block_size) for length in case.seq_lens]
    tables = call.block_tables.cpu()
    indices = torch.cat([row[:n] for row, n in zip(tables, counts, strict=True)]).to(device)
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    last = torch.tensor([(length - 1) % case.block_size + 1 for length in case.seq_lens], dtype=torch.int32)
    workspace = _workspace(device)
    common = {
        "sm_scale": call.scale,
        "window_left": case.window - 1 if case.window else -1,
        "q_data_type": call.query.dtype,
        "kv_data_type": call.key_cache.dtype,
    }
    cache = (call.key_cache, call.value_cache)
    layout = case.layout
    if layout == "HND":
        cache = (call.key_cache.transpose(1, 2), call.value_cache.transpose(1, 2))
    sizes = (*case.heads, case.head_dim, case.block_size)
    if max(case.q_lens) == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, layout, use_tensor_cores=True)
        wrapper.plan(indptr, indices, last, *sizes, **common)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, layout)
        wrapper.plan(call.query_start_loc.cpu(), indptr, indices, last, *sizes, causal=True, **common)
    return lambda: wrapper.run(call.query, cache)


def _workspace(device: torch.device) -> torch.Tensor:
    # Of its own per wrapper: a plan lives in it.
    return torch.zeros(128 << 20, dtype=torch.uint8, device=device)


def run_flash_attn_4(call: AttentionCall) -> Run:
    """flash-attn-4 over the block table."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    refuse_beyond_dense(call, "flash-attn-4")
    case = call.case
    return lambda: flash_attn_varlen_func(
        call.query,
        call.key_cache,
        call.value_cache,
        cu_seqlens_q=call.query_start_loc,
        max_seqlen_q=max(case.q_lens),
        max_seqlen_k=max(case.seq_lens),
        seqused_k=call.seq_lens,
        page_table=call.block_tables,
        softmax_scale=call.scale,
        causal=True,
        window_size=(case.window - 1, 0) if case.window else (None, None),
        learnable_sink=None if call.sinks is None else call.sinks.to(torch.bfloat16),
    )


def run_vllm_triton(call: AttentionCall) -> Run:
    """The Triton kernel of vLLM, with the scratch and thresholds of its backend."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    refuse_beyond_dense(call, "vLLM's unified_attention", quantized=True)
    case, device, heads = call.case, call.query.device, call.case.heads
    if case.cache_dtype == "int8":
        raise UnsupportedError("int8 cache with one scale")
    # As vLLM's backend sets them: at most 16 segments, and none above a threshold of sequences.
    threshold, segments, rows = 128 // heads[1], 16, max(128 // heads[1], len(case.seq_lens))
    padded = 1 << (case.head_dim - 1).bit_length()
    empty = functools.partial(torch.empty, dtype=torch.float32, device=device)
    scratch = (
        empty(rows, heads[0], segments, padded),
        empty(rows, heads[0], segments),
        empty(rows, heads[0], segments),
    )
    descale = None
    if call.k_scale is not None:
        descale = call.k_scale.expand(len(case.seq_lens), heads[1])

    def run() -> torch.Tensor:
        out = torch.empty_like(call.query)
        unified_attention(
            q=call.query,
            k=call.key_cache,
            v=call.value_cache,
            out=out,
            cu_seqlens_q=call.query_start_loc,
            max_seqlen_q=max(case.q_lens),
            seqused_k=call.seq_lens,
            max_seqlen_k=max(case.seq_lens),
            softmax_scale=call.scale,
            causal=True,
            window_size=(case.window - 1, 0) if case.window else (-1, -1),
            block_table=call.block_tables,
            softcap=0,
            q_descale=None,
            k_descale=descale,
            v_descale=descale,
            seq_threshold_3D=threshold,
            num_par_softmax_segments=segments,
            softmax_segm_output=scratch[0],
            softmax_segm_max=scratch[1],
            softmax_segm_expsum=scratch[2],
            sinks=call.sinks,
        )
        return out

    return run


def vllm_version() -> str:
    """Of vLLM, whose attention operators are plain Triton and are imported from an unpacked wheel."""
    found = version("vllm")
    # Compiled extensions and models are not needed for its Triton kernels, and may be missing.
    for name in ("vllm._C", "vllm._moe_C", "vllm._rocm_C"):
        sys.modules.setdefault(name, types.ModuleType(name))
    import vllm.triton_utils  # noqa: F401

    return found
