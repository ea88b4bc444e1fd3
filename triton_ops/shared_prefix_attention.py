"""Attention of many sequences that begin with the same blocks: the shared prefix is read once for all of them.

The queries of all sequences attend to the prefix as if they were one sequence, each sequence attends to the rest of its
own keys, and the two results are merged by their log-sum-exp in float32. The prefix costs its keys once per tile of
query rows (128 / group queries) instead of once per sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ._attention.call import TENSORS, AttentionCall
from ._attention.checks import check_attention
from ._attention.launch import Launch, attention_operator, choose_launch, choose_operator, with_lse
from ._attention.layout import PlanShape
from ._attention.plan import cached_with, launch_plan
from ._dispatch import Memo, aligned
from ._kernel import KernelLaunch, current_stream
from ._triton import tl, triton
from .merge_attention import Pair, choose_merge
from .paged_attention import paged_attention


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


_positions_launches: Memo[KernelLaunch] = Memo()


class _Prefix:
    """The shared blocks as one sequence that all queries belong to: the same for all layers of a step, once filled."""

    is_captured = False

    def __init__(self, call: AttentionCall) -> None:
        device, self._num_blocks = call.query.device, call.num_shared_blocks
        self._end, self._block_size = call.key_begin, call.block_size
        sizes = (call.query.shape[0], 1, 2)
        self.positions, self.lens, self.bounds = (torch.empty(n, dtype=torch.int32, device=device) for n in sizes)
        size = PlanShape.of(call.block_tables[:1, : self._num_blocks], self._block_size).size
        self.plan = torch.empty(size, dtype=torch.int32, device=device)
        self._options = self.call(call).plan_options(tiled=True)

    def fill(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> None:
        """Finds each query's position, and plans."""
        num_tokens, is_aligned = self.positions.shape[0], aligned(seq_lens, query_start_loc)
        launch = _positions_launches.get((is_aligned, seq_lens.device))
        if launch is None:
            launch = KernelLaunch({"BLOCK_T": 64, "BLOCK_S": 128}, 4, None, is_aligned)
            _positions_launches.keep((is_aligned, seq_lens.device), (), launch)
        launch.launch(
            _shared_prefix_kernel,
            (-(-num_tokens // 64), 1, 1),
            (self.positions, self.lens, self.bounds, seq_lens, query_start_loc),
            (seq_lens.shape[0], num_tokens, self._end),
        )
        tables = block_tables[:1, : self._num_blocks]
        tensors = (tables, self.lens, self.bounds, self.positions)
        launch_plan(self.plan, *tensors, self._block_size, self._options, 1)

    def call(self, call: AttentionCall) -> AttentionCall:
        """Attention of all queries over the shared blocks."""
        return call.changed(
            block_tables=call.block_tables[:1, : self._num_blocks],
            seq_lens=self.lens,
            query_start_loc=self.bounds,
            query_positions=self.positions,
            num_shared_blocks=0,
            sinks=None,
            max_query_len=None,
            max_seq_len=None,
            plan=self.plan,
        )


def _prefix_of(call: AttentionCall) -> _Prefix:
    """Filled for the call; cached with the plan, where there is one."""
    batch = (call.block_tables, call.seq_lens, call.query_start_loc)
    if call.plan is None:
        prefix = _Prefix(call)
        prefix.fill(*batch)
        return prefix
    on_device = call.query.is_cuda
    stream = current_stream() if on_device else None
    derived = cached_with(call.plan).derived
    key = (stream, call.query.shape[0], call.num_shared_blocks, call.block_size)
    found = derived.get(key)
    if found is None:
        found = derived[key] = _Prefix(call)
        found.fill(*batch)
    found.is_captured = found.is_captured or (on_device and torch.cuda.is_current_stream_capturing())
    assert isinstance(found, _Prefix)
    return found


def _choose(names: tuple[str, ...], with_lse: bool, *values: Any) -> Callable[..., Any]:
    call = AttentionCall.of(names, values, {})
    check_attention(call)
    if call.num_shared_blocks <= 0 or call.seq_lens.shape[0] == 0 or call.query.shape[0] == 0:
        return choose_operator(names, with_lse, *values)
    rest = choose_launch(call, out_dtype=torch.float32)
    # Positions do not ascend over sequences, so the queries are tiled, never decoded from a work list.
    prefix = choose_launch(_Prefix(call).call(call), out_dtype=torch.float32, tiled=True)
    out = torch.empty((*call.query.shape[:2], call.value_cache.shape[3]), dtype=torch.float32, device="meta")
    merge = choose_merge(out, out[..., 0].contiguous(), out, out[..., 0].contiguous(), call.query.dtype)
    return functools.partial(_launch, names, with_lse, prefix, rest, merge)


def _launch(
    names: tuple[str, ...], with_lse: bool, prefix: Launch, rest: Launch, merge: Callable[..., Pair], *values: Any
) -> Any:
    """Attention over the rest and over the prefix, and their merge."""
    call = AttentionCall.of(names, values, {})
    own = rest(TENSORS(call))
    out, lse = merge(*prefix(TENSORS(_prefix_of(call).call(call))), *own)
    return (out, lse) if with_lse else out


@attention_operator(_choose, like=(paged_attention,))
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
        block_tables: `[num_seqs, max_blocks]` int32, whole tables; the first num_shared_blocks columns are equal in
            all rows.
        seq_lens: `[num_seqs]` int32, each at least num_shared_blocks * block_size.
        num_shared_blocks: How many first blocks all sequences share; 0 for none.
        sinks: `[num_heads]`, a learned logit per head that joins the softmax's denominator once.
        plan: From `attention_plan` with the same num_shared_blocks; the op plans by itself when None.

    Examples:
        >>> cache = torch.randn(8, 16, 2, 64)  # 8 blocks of 16 slots, 2 KV heads
        >>> one = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> query = torch.randn(2, 4, 64)  # two sequences that decode a token each over the same first block
        >>> tables = one(5, 1, 5, 0).view(2, 2)
        >>> out = pc.shared_prefix_attention(query, cache, cache, tables, one(20, 32), one(0, 1, 2), 1, 0.125)
        >>> out.shape
        torch.Size([2, 4, 64])
    """
    return query.new_empty((*query.shape[:2], value_cache.shape[3]))


shared_prefix_attention_with_lse = with_lse(shared_prefix_attention, _choose)
