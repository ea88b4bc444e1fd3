"""A pytest plugin that runs vLLM's tests of its unified attention over `pc.flash_attn`."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.ops import triton_unified_attention

from pc.flash_attn import flash_attn_varlen_func


def _unified_attention(
    q: Any, k: Any, v: Any, out: Any, cu_seqlens_q: Any, max_seqlen_q: int, seqused_k: Any, max_seqlen_k: int,
    softmax_scale: float, causal: bool, window_size: Any, block_table: Any, softcap: float, q_descale: Any,
    k_descale: Any, v_descale: Any, **_: Any,
) -> None:  # fmt: skip
    shape = (len(seqused_k), k.shape[2])
    given = (q_descale, k_descale, v_descale)
    scales = [None if scale is None else torch.as_tensor(scale).expand(shape) for scale in given]
    flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, None, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, block_table=block_table, seqused_k=seqused_k, q_descale=scales[0],
        k_descale=scales[1], v_descale=scales[2], out=out,
    )  # fmt: skip


triton_unified_attention.unified_attention = _unified_attention
