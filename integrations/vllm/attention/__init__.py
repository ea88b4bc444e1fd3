"""Attention of vLLM's layers through `pc`'s operators: what is served, what a step needs, and the layer itself."""

from .backend import PagedAttention, PagedAttentionBackend
from .builder import PagedMetadata, PagedMetadataBuilder

__all__ = ["PagedAttention", "PagedAttentionBackend", "PagedMetadata", "PagedMetadataBuilder"]
