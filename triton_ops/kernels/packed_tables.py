"""The kernel that makes block tables and lengths for packed keys, where each key is a block of one token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_columns", "stride_s"])
def _packed_tables_kernel(
    tables,  # [num_seqs, num_columns], written
    lens,  # [num_seqs], written
    starts,  # [num_seqs + 1]
    num_columns, stride_s, TILE: tl.constexpr,
):  # fmt: skip
    """Write tables and lengths. Grid (sequences, tiles of columns)."""
    seq = tl.cast(tl.program_id(0), tl.int64)
    offs = tl.program_id(1) * TILE + tl.arange(0, TILE)
    begin = tl.load(starts + seq * stride_s)
    tl.store(tables + seq * num_columns + offs, begin + offs, mask=offs < num_columns)
    if tl.program_id(1) == 0:
        tl.store(lens + seq, tl.load(starts + (seq + 1) * stride_s) - begin)
