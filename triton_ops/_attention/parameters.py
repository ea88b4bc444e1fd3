"""What attention kernels take besides tensors and options, as the host makes it: strides, traits, sizes of tiles."""

from __future__ import annotations

from typing import NamedTuple

# How a cache is stored: as the query's dtype; as codes that the compiler converts, or, on a device of Nvidia's and to
# float16, `packed_codes` (HELD_CODES: held); as uint8 codes of float8 e4m3 that are read as a 256th of what they stand
# for; E4M3_PACKED: the same, on a device of Nvidia's.
PLAIN_CACHE, NATIVE_CODES, PACKED_CODES, HELD_CODES, E4M3_BITS, E4M3_PACKED = range(6)
# Arguments of the kernels that differ from step to step: nothing is compiled for their values.
UNSPECIALIZED = [
    *("num_seqs", "num_tokens", "max_tiles", "max_items", "max_q", "num_splits", "target_items", "extra_items"),
    *("decode_queries", "by_sequence", "key_begin", "num_rows", "top_k", "max_blocks", "max_union", "tree_keys"),
    *("stride_bt", "stride_bh", "stride_tree", "stride_lq", "stride_lh", "stride_marks"),
]


class Strides(NamedTuple):
    """Elements from token, head, block and slot to the next, and keys that a row of the tree's mask has bits for."""

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
    """What kernels are compiled for of a call: which tensors are given, how the cache is stored, and sizes.

    HEAD_DIM: columns of a key, or of a part of a latent row's value, behind which are REST more; 0 where values are not
    the first columns of keys.
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
    REST: int


class TileSizes(NamedTuple):
    """Rows and keys of a tile; powers of two that hold a program's columns of a key and a value, and a group's heads.

    BLOCK_R: the REST of a latent row. PARTS: programs that have a part of its value each.
    """

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_D: int
    BLOCK_V: int
    BLOCK_R: int
    BLOCK_G: int
    PARTS: int
