"""Attention of many sequences that begin with the same blocks: the shared prefix is read once for all of them.

The queries of all sequences attend to the prefix as if they were one sequence, each sequence attends to the rest of its
own keys, and the two results are merged by their log-sum-exp in float32. The prefix costs its keys once per tile of
query rows (128 / group queries) instead of once per sequence.
"""

from __future__ import annotations

import dataclasses
import functools

import torch

from ._attention.call import AttentionCall
from ._attention.launch import launch_attention
from ._attention.operator import define_attention
from ._launcher import KernelLaunch, aligned
from ._triton import tl, triton
from .merge_attention import launch_merge


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "prefix_len"])
def _shared_prefix_kernel(
    positions_ptr,  # [num_tokens]
    lens_ptr, bounds_ptr,  # [1], [2]: the prefix as one sequence
    seq_lens_ptr, starts_ptr, num_seqs, num_tokens, prefix_len,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Grid (token tiles,): every query's absolute position."""
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


@functools.cache
def _positions_launch(is_aligned: bool, device: torch.device) -> KernelLaunch:
    return KernelLaunch({"BLOCK_T": 64, "BLOCK_S": 128}, 4, None, is_aligned)


def _launch(call: AttentionCall, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    query, seq_lens, starts = call.query, call.seq_lens, call.query_start_loc
    num_tokens, num_seqs = query.shape[0], seq_lens.shape[0]
    if call.num_shared_blocks <= 0 or num_seqs == 0 or num_tokens == 0:
        return launch_attention(call, with_lse)
    rest = launch_attention(call, out_dtype=torch.float32)
    positions, lens, bounds = (torch.empty(n, dtype=torch.int32, device=query.device) for n in (num_tokens, 1, 2))
    _positions_launch(aligned(seq_lens, starts), query.device)(
        _shared_prefix_kernel,
        (-(-num_tokens // 64), 1, 1),
        positions,
        lens,
        bounds,
        seq_lens,
        starts,
        num_seqs,
        num_tokens,
        call.key_begin,
    )
    # Positions do not ascend over sequences, so the queries are tiled, never decoded from a work list.
    prefix = launch_attention(
        dataclasses.replace(
            call,
            block_tables=call.block_tables[:1, : call.num_shared_blocks],
            seq_lens=lens,
            query_start_loc=bounds,
            query_positions=positions,
            num_shared_blocks=0,
            sinks=None,
            max_query_len=None,
            max_seq_len=None,
            plan=None,
        ),
        out_dtype=torch.float32,
        tiled=True,
    )
    return launch_merge(*prefix, *rest, query.dtype)


shared_prefix_attention_reference, shared_prefix_attention_with_lse_reference = define_attention(
    "shared_prefix_attention", "SymInt num_shared_blocks, float scale", _launch
)


def shared_prefix_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_shared_blocks: int,
    scale: float,
    causal: bool = True,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    plan: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    """Paged attention of sequences whose first `num_shared_blocks` blocks are the same; equal to `paged_attention`.

    Worth it when several sequences decode over one long prefix, as with a system prompt or several samples of one
    prompt.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, as for `paged_attention`.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, as for `paged_attention`.
        value_cache: Like key_cache.
        block_tables: `[num_seqs, max_blocks]` int32, whole tables; the first num_shared_blocks columns are equal in
            all rows.
        seq_lens: `[num_seqs]` int32, each at least num_shared_blocks * block_size.
        query_start_loc: `[num_seqs + 1]` int32, where each sequence's queries begin.
        num_shared_blocks: How many first blocks all sequences share; 0 for none.
        scale: Factor on q.k, usually head_dim ** -0.5.
        causal: As for `paged_attention`, like all that follow.
        softcap: score becomes softcap * tanh(score / softcap) when positive.
        alibi_slopes: `[num_heads]`; adds slope * (t - p) to a score.
        sinks: `[num_heads]`, a learned logit per head that joins the softmax's denominator once.
        k_scale: One float or one per KV head; a quantized key is read as stored * k_scale.
        v_scale: The same for values.
        max_query_len: Upper bound of q_len known on the host; taken from shapes when None.
        max_seq_len: Upper bound of seq_lens known on the host; taken from shapes when None.
        plan: From `attention_plan` with the same num_shared_blocks; the op plans by itself when None.
        batch_invariant: Makes each row's bits independent of the rest of the batch and of chunking.

    Returns:
        `[num_tokens, num_heads, head_dim]`, contiguous, the query's dtype. Rows with nothing to attend to are 0.

    Raises:
        TypeError: An argument of a wrong type or dtype.
        ValueError: A wrong shape, device or option; on CPU tensors and in debug mode also a wrong value, or tables that
            differ in the shared columns.
        RuntimeError: A tensor that requires grad while grad mode is on.
    """
    out: torch.Tensor = torch.ops.pc.shared_prefix_attention(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        num_shared_blocks,
        scale,
        causal,
        softcap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        max_query_len,
        max_seq_len,
        plan,
        batch_invariant,
    )
    return out


def shared_prefix_attention_with_lse(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_shared_blocks: int,
    scale: float,
    causal: bool = True,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    plan: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`shared_prefix_attention`, and the log-sum-exp of each row's scores for `merge_attention`.

    Returns:
        out as there, and lse `[num_tokens, num_heads]` float32: the natural logarithm of the softmax's denominator,
        sinks included; -inf for a row with nothing to attend to.
    """
    out, lse = torch.ops.pc.shared_prefix_attention_with_lse(
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        query_start_loc,
        num_shared_blocks,
        scale,
        causal,
        softcap,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        max_query_len,
        max_seq_len,
        plan,
        batch_invariant,
    )
    return out, lse
