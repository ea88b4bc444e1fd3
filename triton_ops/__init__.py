"""Operators, each in a file with its contract. Kernels are in `kernels`, shared code is in `_attention` and `_copy`."""

from __future__ import annotations

if "." not in __name__:
    raise ImportError(f"import pc.triton_ops, not {__name__}: operators are registered under the package's name")

from ._core.checks import set_debug_mode
from ._core.runtime import INTERPRET, load_kernels
from .attention_plan import attention_plan
from .copy_blocks import copy_blocks, copy_blocks_list
from .gather_blocks import gather_blocks, gather_blocks_list
from .gather_slots import gather_slots, gather_slots_list
from .join_prefix import join_prefix, join_prefix_list
from .latent_attention import latent_attention, latent_attention_with_lse
from .merge_attention import merge_attention
from .move_slots import move_slots
from .paged_attention import paged_attention, paged_attention_with_lse
from .reshape_and_cache import reshape_and_cache
from .rope_and_cache import rope_and_cache
from .rotate_keys import rotate_keys
from .scatter_blocks import scatter_blocks, scatter_blocks_list
from .scatter_slots import scatter_slots, scatter_slots_list
from .shared_prefix_attention import shared_prefix_attention, shared_prefix_attention_with_lse
from .sliding_window_attention import sliding_window_attention, sliding_window_attention_with_lse
from .sparse_gap_attention import sparse_gap_attention, sparse_gap_attention_with_lse
from .sparse_latent_attention import sparse_latent_attention, sparse_latent_attention_with_lse
from .warmup import warmup

__all__ = [
    "attention_plan",
    "copy_blocks",
    "copy_blocks_list",
    "gather_blocks",
    "gather_blocks_list",
    "gather_slots",
    "gather_slots_list",
    "join_prefix",
    "join_prefix_list",
    "latent_attention",
    "latent_attention_with_lse",
    "merge_attention",
    "move_slots",
    "paged_attention",
    "paged_attention_with_lse",
    "reshape_and_cache",
    "rope_and_cache",
    "rotate_keys",
    "scatter_blocks",
    "scatter_blocks_list",
    "scatter_slots",
    "scatter_slots_list",
    "set_debug_mode",
    "shared_prefix_attention",
    "shared_prefix_attention_with_lse",
    "sliding_window_attention",
    "sliding_window_attention_with_lse",
    "sparse_gap_attention",
    "sparse_gap_attention_with_lse",
    "sparse_latent_attention",
    "sparse_latent_attention_with_lse",
    "warmup",
]

if INTERPRET:
    load_kernels()
