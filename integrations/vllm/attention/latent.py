"""Multi-head latent attention for vLLM's layers. Decodes use `pc.latent_attention`, and prefills use vLLM's code.

vLLM's code also writes latent rows. It applies the projections to the queries of a decode, and to the latent rows of a
prefill.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ....triton_ops import latent_attention, latent_attention_with_lse
from ....triton_ops._attention.dense import arange_i32
from ..api import LatentBackend, LatentImpl, MultipleOf, is_cpu, key_scale

IS_CPU = is_cpu()


class LatentAttentionBackend(LatentBackend):
    """A backend for dense MLA with any row width and block size. On a GPU, it also serves e4m3 rows and returns lse."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"] + ["fp8", "fp8_e4m3"] * (
        not IS_CPU
    )

    @staticmethod
    def get_name() -> str:
        """Return a member of vLLM's enumeration; layers refuse other names."""
        return "CPU_MLA" if IS_CPU else "CUSTOM_MLA"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Return the class of a layer's attention."""
        return LatentAttention

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Return an empty list: any size is served."""
        return []

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return one entry, which accepts any block size."""
        return [MultipleOf(1)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Return True, since any size is served."""
        return True


class LatentAttention(LatentImpl):
    """Latent attention of one layer."""

    can_return_lse_for_decode = not IS_CPU

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> Any:
        """Compute attention of decodes over latent rows: `q` are absorbed queries `[num_decodes, num_heads, head_dim]`.

        Returns:
            `[num_decodes, num_heads, kv_lora_rank]`, and the lse `[num_decodes, num_heads]` or None.
        """
        query, rows, decode = torch.cat(q, -1) if isinstance(q, tuple) else q, kv_c_and_k_pe_cache, attn_metadata.decode
        options: dict[str, Any] = {"max_query_len": 1}
        if self.kv_cache_dtype.startswith("fp8"):
            rows = rows.view(torch.float8_e4m3fn)
            options["k_scale"] = key_scale(layer).reshape(1)
        num_seqs = decode.seq_lens.shape[0]
        batch = (decode.block_table, decode.seq_lens, arange_i32(query.device, num_seqs + 1, 1))
        call = (query, rows, *batch, float(self.scale), self.kv_lora_rank)
        if self.need_to_return_lse_for_decode:
            return latent_attention_with_lse(*call, **options)
        return latent_attention(*call, **options), None
