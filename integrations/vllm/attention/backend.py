"""Attention of vLLM's layers through `pc`: the backend, which names what it refuses, and one layer's attention."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ....triton_ops import paged_attention, reshape_and_cache, shared_prefix_attention, sliding_window_attention
from ....triton_ops._attention.checks import MAX_HEAD_DIM
from ....triton_ops._core.checks import FLOATS
from ..api import (
    AttentionBackend,
    AttentionImpl,
    AttentionType,
    KVCacheLayout,
    MultipleOf,
    get_current_vllm_config_or_none,
    key_scale,
    value_scale,
)
from .builder import PagedMetadata, PagedMetadataBuilder


class PagedAttentionBackend(AttentionBackend):
    """Decoder attention through `pc`, on any platform of vLLM.

    It serves any block size, head sizes up to `MAX_HEAD_DIM` and any layout of the cache. It also serves windows,
    softcap, ALiBi, learned sinks, grouped queries, float8 e4m3 caches and batch-invariant mode. It refuses MLA, encoder
    and cross attention, R-SWA, bidirectional spans of multimodal prompts, context parallelism, and quantized caches
    other than e4m3.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = list(FLOATS)
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Return a member of vLLM's enumeration; layers refuse other names."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Return the class of a layer's attention."""
        return PagedAttention

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """Return the class that builds a step's metadata."""
        return PagedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return one entry, which accepts any block size."""
        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return whether heads of this width are served."""
        return 1 <= head_size <= MAX_HEAD_DIM

    supports_sink = supports_sliding_window = supports_batch_invariance = classmethod(lambda cls: True)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *args: Any, **kwargs: Any
    ) -> str | None:
        """Return why a combination is refused, or None. A cache without quantization must have the model's dtype."""
        if kv_cache_dtype in ("float16", "bfloat16") and getattr(torch, kv_cache_dtype) != dtype:
            return f"kv_cache_dtype {kv_cache_dtype} with a model in {dtype} not supported"
        return None

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return all layouts, the one that is written fastest first."""
        return (KVCacheLayout.LBNHC, *(layout for layout in KVCacheLayout if layout is not KVCacheLayout.LBNHC))


class PagedAttention(AttentionImpl):
    """Decoder attention of one layer.

    Raises:
        ValueError: The layer needs an option that is not served. Usually the backend refuses it earlier, but vLLM's CPU
            platform does not ask the backend.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        reasons = [f"option {name}" for name in options]
        reasons += _refusals(head_size, kv_cache_dtype, attn_type, sinks is not None, bool(sliding_window))
        if reasons:
            raise ValueError(f"pc's attention backend does not support: {'; '.join(reasons)}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.window = sliding_window or 0
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or 0.0
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.compressor: Any = None
        """The `Compressor` of `..compression.worker`, which saves queries; None without PC_VLLM=compression."""

    def _caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values `[num_blocks, block_size, num_kv_heads, head_size]`, views of vLLM's packed cache."""
        if self.kv_cache_dtype.startswith("fp8"):
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values

    def scales(self, layer: Any) -> dict[str, torch.Tensor]:
        """Return the scales of a quantized cache; {} for one that is not quantized."""
        if self.kv_cache_dtype.startswith("fp8"):
            return {"k_scale": key_scale(layer), "v_scale": value_scale(layer)}
        return {}

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write the keys and values of a step, `[num_tokens, num_kv_heads, head_size]`, into their slots."""
        keys, values = self._caches(kv_cache)
        count = slot_mapping.shape[0]  # later rows are padding
        reshape_and_cache(key[:count], value[:count], keys, values, slot_mapping, **self.scales(layer))

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PagedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the attention of `query` `[num_tokens, num_heads, head_size]` over the cache into `output`."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale: quantized outputs are not supported")
        if attn_metadata is None:  # a profiling run
            return output.zero_()
        if self.compressor is not None:
            self.compressor.save(layer.layer_name, query)
        step, count = attn_metadata, attn_metadata.num_actual_tokens
        tensors = (query[:count], *self._caches(kv_cache), step.block_tables, step.seq_lens, step.query_start_loc)
        options: dict[str, Any] = {
            "causal": step.causal,
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
            "max_query_len": step.max_query_len,
            "max_seq_len": step.max_seq_len,
            "plan": step.plans.get(self.window),
            "batch_invariant": step.batch_invariant,
            **self.scales(layer),
        }
        if self.window:
            output[:count] = sliding_window_attention(*tensors, self.scale, self.window, **options)
        elif step.num_shared_blocks:
            output[:count] = shared_prefix_attention(*tensors, step.num_shared_blocks, self.scale, **options)
        else:
            output[:count] = paged_attention(*tensors, self.scale, **options)
        if self.compressor is not None and self.compressor.by_head is not None:
            self.compressor.by_head(layer, query, kv_cache, step, output)
        return output


def _refusals(head_size: int, kv_cache_dtype: str, attn_type: str, has_sink: bool, has_window: bool) -> list[str]:
    """Return the options of a layer and of vLLM's configuration that are not served."""
    config = get_current_vllm_config_or_none()
    model = getattr(config, "model_config", None)
    parallel = getattr(config, "parallel_config", None)
    reasons: list[str] = PagedAttentionBackend.validate_configuration(
        head_size=head_size,
        dtype=torch.get_default_dtype(),
        kv_cache_dtype=kv_cache_dtype,
        block_size=None,
        use_mla=False,
        has_sink=has_sink,
        use_sparse=False,
        use_mm_prefix=bool(getattr(model, "is_mm_prefix_lm", False)),
        use_per_head_quant_scales=False,
        device_capability=None,
        attn_type=attn_type,
        has_sliding_window=has_window,
        use_pcp=getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        use_dcp=getattr(parallel, "decode_context_parallel_size", 1) > 1,
        use_rswa=getattr(model, "rswa_window", None) is not None,
    )
    return reasons
