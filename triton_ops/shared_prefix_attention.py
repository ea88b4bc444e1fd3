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
from ._attention.launch import AttentionLaunch, attention_operator, choose_launch, choose_operator, with_lse
from ._attention.layout import PlanShape
from ._attention.plan import cached_with, launch_plan
from ._dispatch import LaunchCache, aligned
from ._launch import Launch, current_stream
from .merge_attention import Pair, build_merge_launch
from .paged_attention import paged_attention

_positions_launches: LaunchCache[Launch] = LaunchCache()


def _build_positions_launch(is_aligned: bool) -> Launch:
    from .kernels.shared_prefix import _shared_prefix_kernel

    return Launch(_shared_prefix_kernel, {"BLOCK_T": 64, "BLOCK_S": 128}, reusable=is_aligned)


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
        kind = (is_aligned, seq_lens.device)
        launch = _positions_launches.get_or(kind, (), lambda: _build_positions_launch(is_aligned))
        launch(
            (self.positions, self.lens, self.bounds, seq_lens, query_start_loc),
            None,
            (-(-num_tokens // 64), 1, 1),
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
    merge = build_merge_launch(out, out[..., 0].contiguous(), out, out[..., 0].contiguous(), call.query.dtype)
    return functools.partial(_launch, names, with_lse, prefix, rest, merge)


def _launch(
    names: tuple[str, ...],
    with_lse: bool,
    prefix: AttentionLaunch,
    rest: AttentionLaunch,
    merge: Callable[..., Pair],
    *values: Any,
) -> Any:
    """Attention over the rest and over the prefix, and their merge."""
    call = AttentionCall.of(names, values, {})
    own = rest(TENSORS(call))
    out, lse = merge(*prefix(TENSORS(_prefix_of(call).call(call))), *own)
    return (out, lse) if with_lse else out


@attention_operator(_choose, docs_from=(paged_attention,))
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
