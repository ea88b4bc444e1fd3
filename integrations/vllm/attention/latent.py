"""Multi-head latent attention of vLLM's layers: decodes through `pc.latent_attention`, prefills as vLLM has them.

vLLM's own parts do the rest: they write latent rows, absorb the projections of a decode, and expand a prefill's.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonImpl
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from ....triton_ops import latent_attention, latent_attention_with_lse
from ....triton_ops._attention.dense import arange_i32

IS_CPU = bool(current_platform.is_cpu())
Backend: type[Any] = CPUMLABackend if IS_CPU else MLACommonBackend
Impl: type[Any] = CPUMLAImpl if IS_CPU else MLACommonImpl


class LatentAttentionBackend(Backend):  # vLLM's scaffolding for this platform
    """Dense MLA: latent rows of any width and block size; e4m3 rows, and results with their lse, on a device."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"] + ["fp8", "fp8_e4m3"] * (
        not IS_CPU
    )

    @staticmethod
    def get_name() -> str:
        """A member of vLLM's enumeration; layers refuse other names."""
        return "CPU_MLA" if IS_CPU else "CUSTOM_MLA"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """The attention of one layer."""
        return LatentAttention

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Any: none is named."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any."""
        return [MultipleOf(1)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Any."""
        return True


class LatentAttention(Impl):
    """Decodes of one layer."""

    can_return_lse_for_decode = not IS_CPU

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> Any:
        """Attention of absorbed queries `[num_decodes, num_heads, head_dim]`, one a sequence, over latent rows.

        Returns:
            `[num_decodes, num_heads, kv_lora_rank]`, and the lse `[num_decodes, num_heads]` or None.
        """
        query, rows, decode = torch.cat(q, -1) if isinstance(q, tuple) else q, kv_c_and_k_pe_cache, attn_metadata.decode
        options: dict[str, Any] = {"max_query_len": 1}
        if self.kv_cache_dtype.startswith("fp8"):
            rows = rows.view(torch.float8_e4m3fn)
            options["k_scale"] = layer._k_scale.reshape(1)
        num_seqs = decode.seq_lens.shape[0]
        batch = (decode.block_table, decode.seq_lens, arange_i32(query.device, num_seqs + 1, 1))
        call = (query, rows, *batch, float(self.scale), self.kv_lora_rank)
        if self.need_to_return_lse_for_decode:
            return latent_attention_with_lse(*call, **options)
        return latent_attention(*call, **options), None
