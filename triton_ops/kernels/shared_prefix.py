"""The kernel that computes the absolute positions of a batch's queries, and makes its shared prefix one sequence."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "prefix_len"])
def _shared_prefix_kernel(
    positions_ptr,  # [num_tokens]
    lens_ptr, bounds_ptr,  # [1], [2]: the prefix as one sequence
    seq_lens_ptr, starts_ptr, num_seqs, num_tokens, prefix_len,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Write every query's absolute position. Grid (token tiles,)."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    seq = tl.zeros([BLOCK_T], tl.int32)
    for base in range(0, num_seqs, BLOCK_S):
        offs = base + tl.arange(0, BLOCK_S)
        end = tl.load(starts_ptr + offs + 1, mask=offs < num_seqs, other=2147483647)
        seq += tl.sum((end[None, :] <= token[:, None]).to(tl.int32), 1)
    mask = (token < num_tokens) & (seq < num_seqs)
    end = tl.load(starts_ptr + seq + 1, mask=mask, other=0)
    seq_len = tl.load(seq_lens_ptr + seq, mask=mask, other=0)
    tl.store(positions_ptr + token, seq_len - end + token, mask=token < num_tokens)
    if tl.program_id(0) == 0:
        tl.store(lens_ptr, prefix_len)
        tl.store(bounds_ptr, 0)
        tl.store(bounds_ptr + 1, tl.load(starts_ptr + num_seqs))
