"""Sums the splits of a row: many splits of one head at once, so that a long sequence's do not follow one another."""

from __future__ import annotations

from .._triton import tl, triton
from .kernel import _find_sequence
from .layout import INFO, INFO_FIRST, INFO_ITEMS, LENGTHS, _plan_parts
from .softmax import _finish


@triton.jit(do_not_specialize=LENGTHS)
def _merge_splits_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, VALUE_DIM]
    lse_ptr,  # [num_tokens, NUM_HEADS]
    decode_ptr, decode_lse_ptr,  # [items, max_q, NUM_HEADS // TABLE_HEADS, VALUE_DIM] and its base-2 lse
    prefill_ptr, prefill_lse_ptr,  # [num_splits, num_tokens, NUM_HEADS, VALUE_DIM] and its base-2 lse
    starts_ptr, plan_ptr, sinks_ptr,
    num_seqs, num_tokens, max_q, num_splits,
    DECODE_Q: tl.constexpr, BY_SEQUENCE: tl.constexpr, TABLE_HEADS: tl.constexpr, SINKS: tl.constexpr,
    WITH_LSE: tl.constexpr, NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid (rows, heads, parts of a head): BLOCK_S splits at once, in the order of their keys.

    BY_SEQUENCE: rows are max_q queries of each sequence, of which the decodes have splits; else they are all tokens.
    """
    head = tl.program_id(1)
    first_v = tl.program_id(2) * BLOCK_V
    if BY_SEQUENCE:
        seq = tl.program_id(0) // max_q
        q_begin = tl.load(starts_ptr + seq)
        token = q_begin + tl.program_id(0) % max_q
    else:
        token = tl.program_id(0)
        seq = _find_sequence(starts_ptr, num_seqs, token, 0, 1, 1)
        q_begin = tl.load(starts_ptr + seq)
    q_len = tl.load(starts_ptr + seq + 1) - q_begin
    exists = token < q_begin + q_len
    count = num_splits
    step = tl.cast(num_tokens, tl.int64) * NUM_HEADS
    first = tl.cast(token, tl.int64) * NUM_HEADS
    # By sequence, only decodes have splits.
    source_ptr = decode_ptr if BY_SEQUENCE else prefill_ptr
    source_lse_ptr = decode_lse_ptr if BY_SEQUENCE else prefill_lse_ptr
    source_head = head
    if exists & (q_len <= DECODE_Q):
        HEADS: tl.constexpr = NUM_HEADS // TABLE_HEADS
        plan_row = tl.cast(seq, tl.int64)
        if TABLE_HEADS > 1:
            plan_row = plan_row * TABLE_HEADS + head // HEADS
            source_head = head % HEADS
        info_ptr = _plan_parts(plan_ptr, num_seqs * TABLE_HEADS, 0, 0)[0] + plan_row * INFO
        count = tl.load(info_ptr + INFO_ITEMS)
        step = tl.cast(max_q, tl.int64) * HEADS
        first = tl.load(info_ptr + INFO_FIRST) * step + tl.cast(token - q_begin, tl.int64) * HEADS
        source_ptr = decode_ptr
        source_lse_ptr = decode_lse_ptr
    if exists & (count > 1):
        offs_s = tl.arange(0, BLOCK_S)
        offs_v = first_v + tl.arange(0, BLOCK_V)
        m = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([1, BLOCK_V], tl.float32)
        for begin in range(0, count, BLOCK_S):
            live = begin + offs_s < count
            row = first + (begin + offs_s).to(tl.int64) * step + source_head
            part_lse = tl.load(source_lse_ptr + row, mask=live, other=float("-inf"))
            part = tl.load(
                source_ptr + row[:, None] * VALUE_DIM + offs_v[None, :],
                mask=live[:, None] & (offs_v[None, :] < VALUE_DIM), other=0.0,
            )  # fmt: skip
            m_new = tl.maximum(m, tl.max(part_lse, 0))
            safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            alpha = tl.exp2(m - safe)
            weight = tl.exp2(part_lse - safe)
            # A product would be fused with the first addition of its lane alone: lanes with the same sum, which all
            # write it to one place of shared memory, would differ in its last bit.
            weighted = tl.fma(part, weight[:, None], 0.0)
            acc = acc * alpha[:, None] + tl.sum(weighted, 0)[None, :]
            total = total * alpha + tl.sum(weight, 0)
            m = m_new
        tokens = tl.zeros([1], tl.int64) + token
        _finish(
            acc, m, total, sinks_ptr, out_ptr, lse_ptr, tokens, tl.zeros([1], tl.int32) + head, tokens >= 0, first_v,
            SINKS, WITH_LSE, NUM_HEADS, VALUE_DIM, BLOCK_V,
        )  # fmt: skip
