"""Parameters of attention kernels that the host makes from a call: strides, traits, and sizes of tiles."""

from __future__ import annotations

from typing import NamedTuple

# How a cache is stored. PLAIN_CACHE: in the query's dtype. NATIVE_CODES: as codes that the compiler converts.
# PACKED_CODES, LOCAL_CODES: as codes that `kernels.codes.packed_codes` converts to float16 on NVIDIA devices; with
# LOCAL_CODES, in the threads that loaded them.
# E4M3_BITS: as uint8 codes of float8 e4m3, read as a 256th of their values. E4M3_PACKED: the same on NVIDIA devices.
PLAIN_CACHE, NATIVE_CODES, PACKED_CODES, LOCAL_CODES, E4M3_BITS, E4M3_PACKED = range(6)
# Arguments of kernels that differ from step to step. Kernels are not specialized for their values.
UNSPECIALIZED = [
    *("num_seqs", "num_tokens", "max_tiles", "max_items", "max_q", "num_splits", "target_items", "extra_items"),
    *("decode_queries", "by_sequence", "key_begin", "num_rows", "top_k", "max_blocks", "max_union", "tree_keys"),
    *("stride_bt", "stride_bh", "stride_tree", "stride_lq", "stride_lh", "stride_marks"),
]


class Strides(NamedTuple):
    """Elements between tokens, heads, blocks and slots, and the number of keys in a row of the tree's mask."""

    stride_qt: int
    stride_qh: int
    stride_kb: int
    stride_kt: int
    stride_kh: int
    stride_vb: int
    stride_vt: int
    stride_vh: int
    stride_bt: int
    stride_bh: int
    tree_keys: int
    stride_tree: int


class Traits(NamedTuple):
    """The properties of a call for which kernels are compiled: present tensors, cache storage, and sizes.

    HEAD_DIM is the number of columns of a key. In a latent row, the value comes first, and ROPE_COLUMNS columns of the
    rotated key follow. HEAD_DIM is then the number of columns of one split of the value. ROPE_COLUMNS is 0 for other
    caches.
    """

    POSITIONS: bool
    SINKS: bool
    SCALES: int
    CODES: int
    UPCAST: bool
    TABLE_HEADS: int
    TREE: bool
    WITH_LSE: bool
    NUM_HEADS: int
    GROUP: int
    BLOCK_SIZE: int
    HEAD_DIM: int
    VALUE_DIM: int
    ROPE_COLUMNS: int


class TileSizes(NamedTuple):
    """Sizes of a program's tile: BLOCK_M rows and BLOCK_N keys.

    The next four are counts rounded up to powers of two. BLOCK_D and BLOCK_V count columns of keys and of values.
    BLOCK_R counts the rope columns of a latent row, and BLOCK_G heads of a group. VALUE_SPLITS is `Tiles.value_splits`.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_V: int
    BLOCK_R: int
    BLOCK_G: int
    VALUE_SPLITS: int
