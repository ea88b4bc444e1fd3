"""Attention kernels of other projects, installed or unpacked: FlashInfer, FlashAttention-3 and 4, vLLM."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Collection
from typing import Any

import torch

from ..harness.conditions import version
from ..harness.registry import UnsupportedError
from .attention import AttentionCall

Run = Callable[[], Any]
FLOAT8 = ("float8_e4m3fn",)


def refuse_beyond_dense(call: AttentionCall, name: str, codes: Collection[str] = (), sinks: bool = False) -> None:
    """Refuse what rivals without holes, sink tokens or scattered queries cannot do.

    Args:
        call: The call.
        name: The rival.
        codes: Dtypes of quantized caches that it takes.
        sinks: Whether it takes learned sink logits.
    """
    case = call.case
    refused = {
        "holes": case.live is not None,
        "blocks of each head's own": case.kept < 1,
        "queries at scattered positions": case.queries is not None,
        "sink tokens": case.num_sink_tokens > 0,
        "attention sinks": case.sinks and not sinks,
        f"cache of {case.cache_dtype} with one scale": case.cache_dtype not in (None, *codes),
    }
    for what, present in refused.items():
        if present:
            raise UnsupportedError(f"{name} has no {what}")


def _varlen(call: AttentionCall, unbounded: int | None = -1) -> dict[str, Any]:
    """Return arguments that several rivals share; `unbounded` is a side of a window without a bound."""
    case = call.case
    return {
        "cu_seqlens_q": call.query_start_loc,
        "max_seqlen_q": max(case.q_lens),
        "seqused_k": call.seq_lens,
        "max_seqlen_k": max(case.seq_lens),
        "softmax_scale": call.scale,
        "causal": True,
        "window_size": (case.window - 1, 0) if case.window else (unbounded, unbounded),
    }


def listed_blocks(call: AttentionCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks of all sequences in one list, and where those of each sequence begin, on the CPU."""
    counts = [-(-length // call.case.block_size) for length in call.case.seq_lens]
    blocks = torch.cat([row[:n] for row, n in zip(call.block_tables, counts, strict=True)])
    return blocks, torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)


def run_flashinfer(call: AttentionCall) -> Run:
    """Prepare FlashInfer; as in serving, its plan is made outside of the timing."""
    import flashinfer

    refuse_beyond_dense(call, "FlashInfer", FLOAT8)
    case, device = call.case, call.query.device
    indices, indptr = listed_blocks(call)
    last = torch.tensor([(length - 1) % case.block_size + 1 for length in case.seq_lens], dtype=torch.int32)
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=device)  # its own: the plan lies in it
    common = {
        "sm_scale": call.scale,
        "window_left": case.window - 1 if case.window else -1,
        "q_data_type": call.query.dtype,
        "kv_data_type": call.key_cache.dtype,
    }
    layout, cache = case.layout, (call.key_cache, call.value_cache)
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


def run_flash_attn_4(call: AttentionCall) -> Run:
    """Prepare flash-attn-4 over the block table."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    refuse_beyond_dense(call, "flash-attn-4", sinks=True)
    given = _varlen(call, None) | {"page_table": call.block_tables, "learnable_sink": call.sinks}
    # 0 lets it choose how to split long sequences, which it can do on these architectures only.
    given["num_splits"] = 0 if torch.cuda.get_device_capability()[0] in (10, 11) else 1
    return lambda: flash_attn_varlen_func(call.query, call.key_cache, call.value_cache, **given)


def run_flash_attn_3(call: AttentionCall) -> Run:
    """Prepare FlashAttention-3 over the block table: the build in vLLM's wheel."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    refuse_beyond_dense(call, "FlashAttention-3", sinks=True)
    given = _varlen(call) | {"block_table": call.block_tables, "fa_version": 3}
    if call.sinks is not None:
        given["s_aux"] = call.sinks.to(call.query.dtype)
    return lambda: flash_attn_varlen_func(call.query, call.key_cache, call.value_cache, **given)


def run_vllm_triton(call: AttentionCall, **more: Any) -> Run:
    """Prepare the Triton kernel of vLLM, with the scratch and thresholds of its backend, and `more` arguments."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    from vllm.v1.kv_cache_interface import KVQuantMode

    refuse_beyond_dense(call, "vLLM's unified_attention", FLOAT8, sinks=True)
    case, heads = call.case, call.case.heads
    # As vLLM's backend sets them: at most 16 segments, and none above a threshold of sequences.
    threshold, segments, rows = 128 // heads[1], 16, max(128 // heads[1], len(case.seq_lens))
    scratch = {
        name: torch.empty(rows, heads[0], segments, *last, dtype=torch.float32, device=call.query.device)
        for name, last in (("output", (1 << (case.head_dim - 1).bit_length(),)), ("max", ()), ("expsum", ()))
    }
    given = _varlen(call) | {f"softmax_segm_{name}": made for name, made in scratch.items()}
    given |= {"block_table": call.block_tables, "softcap": 0, "sinks": call.sinks, "q_descale": None}
    given |= {"seq_threshold_3D": threshold, "num_par_softmax_segments": segments}
    given |= {"k_descale": None, "v_descale": None, "kv_quant_mode": KVQuantMode.NONE}
    if call.k_scale is not None and call.v_scale is not None:
        shape = (len(case.seq_lens), heads[1])
        given |= {"k_descale": call.k_scale.expand(shape), "v_descale": call.v_scale.expand(shape)}
        given["kv_quant_mode"] = KVQuantMode.FP8_PER_TENSOR
    given |= more

    def run() -> torch.Tensor:
        out = torch.empty_like(call.query)
        unified_attention(q=call.query, k=call.key_cache, v=call.value_cache, out=out, **given)
        return out

    return run


def run_vllm_latent(
    query: torch.Tensor, cache: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor, value_dim: int, scale: float
) -> Run:
    """Prepare vLLM's Triton kernel for decodes over latent rows `[blocks, block_size, 1, head_dim]`."""
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    batch, heads, splits = *query.shape[:2], 4  # as vLLM's backend has it
    out = query.new_empty(batch, heads, value_dim)
    lse, parts = out.new_empty(batch, heads), out.new_empty(batch, heads, splits, value_dim + 1, dtype=torch.float32)

    def run() -> torch.Tensor:
        values = cache[..., :value_dim]
        decode_attention_fwd(query, cache, values, out, lse, tables, lens, parts, splits, scale, cache.shape[1])
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
    """Return modules that vLLM's Triton kernels import but hardly need, and that may not load."""
    extensions = ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch", "_rocm_C")
    limits = torch.finfo(torch.float8_e4m3fn)
    quantization = {"FP8_DTYPE": torch.float8_e4m3fn, "get_fp8_min_max": lambda: (limits.min, limits.max)}
    return {
        **{f"vllm.{name}": {} for name in extensions},
        "vllm.model_executor.layers.quantization.utils.quant_utils": quantization,
        "vllm.config.cache": {"get_kv_cache_dtype_handler": lambda name: None},
    }
