"""Attention of vLLM's layers through `pc`'s operators: what is served, what a step needs, and the layer itself."""

from .backend import PagedAttentionBackend
from .builder import PagedMetadata, PagedMetadataBuilder
from .layer import PagedAttention

__all__ = ["PagedAttention", "PagedAttentionBackend", "PagedMetadata", "PagedMetadataBuilder"]
