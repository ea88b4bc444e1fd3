"""Attention of vLLM's layers through `pc`'s operators: the backend, the metadata of a step, and the layer."""

from .backend import PagedAttention, PagedAttentionBackend
from .builder import PagedMetadata, PagedMetadataBuilder

__all__ = ["PagedAttention", "PagedAttentionBackend", "PagedMetadata", "PagedMetadataBuilder"]
