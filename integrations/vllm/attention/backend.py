"""What vLLM asks of an attention backend before it makes a layer: what is served, and what is refused, by name."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf
from vllm.v1.kv_cache_layout import KVCacheLayout

from ....triton_ops._attention.checks import MAX_HEAD_DIM, QUERY_DTYPES


class PagedAttentionBackend(AttentionBackend):
    """Decoder attention through `pc`, on any platform of vLLM.

    Any block size, head sizes up to `MAX_HEAD_DIM`, any layout of the cache, windows, softcap, ALiBi, learned sinks,
    grouped queries, float8 e4m3 caches, batch-invariant mode. Refused: MLA, encoder and cross attention, R-SWA,
    bidirectional spans of multimodal prompts, context parallelism, quantized caches other than e4m3.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = list(QUERY_DTYPES)
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """A member of vLLM's enumeration; layers refuse other names."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """The attention of one layer."""
        from .layer import PagedAttention

        return PagedAttention

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """What makes the metadata of a step."""
        from .builder import PagedMetadataBuilder

        return PagedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Any."""
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Whether heads of this width are served."""
        return 1 <= head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_sink(cls) -> bool:
        """Learned logits that join the softmax."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Windows over the last tokens."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """VLLM's VLLM_BATCH_INVARIANT."""
        return True

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        """A cache that is not quantized has the model's dtype."""
        if kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) != dtype:
            return f"kv_cache_dtype {kv_cache_dtype} with a model in {dtype} not supported"
        return None

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """All; blocks whose tokens lie behind each other are written fastest."""
        return (KVCacheLayout.LBNHC, *(layout for layout in KVCacheLayout if layout is not KVCacheLayout.LBNHC))
