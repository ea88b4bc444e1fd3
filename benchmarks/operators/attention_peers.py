"""Attention kernels of other projects, installed or unpacked: FlashInfer, FlashAttention-3 and 4, vLLM."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from ..harness.conditions import version
from ..harness.registry import UnsupportedError
from .attention import AttentionCall

Run = Callable[[], Any]


def refuse_beyond_dense(call: AttentionCall, name: str, window: bool = True, quantized: bool = False) -> None:
    """Refuses what rivals without holes, sink tokens or scattered queries cannot do."""
    case = call.case
    refused = {
        "holes": case.live is not None,
        "blocks of each head's own": case.kept < 1,
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
    scales = {}
    if call.k_scale is not None and call.v_scale is not None:
        scales = {"k_scale": float(call.k_scale), "v_scale": float(call.v_scale)}
    if max(case.q_lens) == 1:
        # As serving engines choose: tensor cores pay once a few query heads share a KV head.
        grouped = case.heads[0] // case.heads[1] >= 4
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, layout, use_tensor_cores=grouped)
        wrapper.plan(indptr, indices, last, *sizes, **common)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, layout)
        wrapper.plan(call.query_start_loc.cpu(), indptr, indices, last, *sizes, causal=True, **common)
    return lambda: wrapper.run(call.query, cache, **scales)


def _workspace(device: torch.device) -> torch.Tensor:
    # Of its own per wrapper: a plan lives in it.
    return torch.zeros(128 << 20, dtype=torch.uint8, device=device)


def run_flash_attn_4(call: AttentionCall) -> Run:
    """flash-attn-4 over the block table."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    refuse_beyond_dense(call, "flash-attn-4")
    case = call.case
    # 0 lets it choose how to split long sequences, which it can do on these architectures only.
    num_splits = 0 if torch.cuda.get_device_capability()[0] in (10, 11) else 1
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
        learnable_sink=call.sinks,
        num_splits=num_splits,
    )


def run_flash_attn_3(call: AttentionCall) -> Run:
    """FlashAttention-3 over the block table: its own package, or the build in vLLM's wheel."""
    refuse_beyond_dense(call, "FlashAttention-3")
    case = call.case
    common = {
        "cu_seqlens_q": call.query_start_loc,
        "max_seqlen_q": max(case.q_lens),
        "softmax_scale": call.scale,
        "causal": True,
        "window_size": (case.window - 1, 0) if case.window else (-1, -1),
    }
    caches = (call.query, call.key_cache, call.value_cache)
    if importlib.util.find_spec("flash_attn_interface"):
        from flash_attn_interface import flash_attn_with_kvcache

        if case.sinks:
            raise UnsupportedError("attention sinks")
        return lambda: flash_attn_with_kvcache(
            *caches, cache_seqlens=call.seq_lens, page_table=call.block_tables, **common
        )
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    given = common | {"max_seqlen_k": max(case.seq_lens), "seqused_k": call.seq_lens, "block_table": call.block_tables}
    if call.sinks is not None:
        given["s_aux"] = call.sinks.to(call.query.dtype)
    return lambda: flash_attn_varlen_func(*caches, fa_version=3, **given)


def flash_attn_3_version() -> str:
    """Return the version of the package, or of the wheel that contains a build of it."""
    try:
        return version("flash-attn-3")
    except ImportError:
        return f"vLLM {version('vllm')}"


def run_vllm_triton(call: AttentionCall) -> Run:
    """The Triton kernel of vLLM, with the scratch and thresholds of its backend."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

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
    scales = {}
    if call.k_scale is not None and call.v_scale is not None:
        shape = (len(case.seq_lens), heads[1])
        scales = {"k_descale": call.k_scale.expand(shape), "v_descale": call.v_scale.expand(shape)}

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
            k_descale=scales.get("k_descale"),
            v_descale=scales.get("v_descale"),
            kv_quant_mode=KVQuantMode.FP8_PER_TENSOR if scales else KVQuantMode.NONE,
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
    """Return the version of vLLM, whose Triton operators are imported from an unpacked wheel."""
    found = version("vllm")
    if "vllm" not in sys.modules:
        for name, contents in _vllm_stand_ins().items():
            module = types.ModuleType(name)
            vars(module).update(contents)
            sys.modules.setdefault(name, module)
        cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        import vllm.triton_utils  # noqa: F401

        torch.backends.cuda.enable_cudnn_sdp(cudnn)  # importing it turns this off for everyone
    return found


def _vllm_stand_ins() -> dict[str, dict[str, Any]]:
    """Modules its Triton kernels hardly need: extensions that may not load, configuration that needs pydantic."""
    extensions = ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch", "_rocm_C")
    limits = torch.finfo(torch.float8_e4m3fn)
    quantization = {"FP8_DTYPE": torch.float8_e4m3fn, "get_fp8_min_max": lambda: (limits.min, limits.max)}
    return {
        **{f"vllm.{name}": {} for name in extensions},
        "vllm.model_executor.layers.quantization.utils.quant_utils": quantization,
        "vllm.config.cache": {"get_kv_cache_dtype_handler": lambda name: None},
    }
