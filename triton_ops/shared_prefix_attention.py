"""Attention of many sequences that begin with the same blocks, which reads the shared prefix once for all of them.

The queries of all sequences attend to the prefix like those of one sequence. Each sequence also attends to the rest of
its own keys. The two results are merged by their log-sum-exp in float32. A tile has up to 128 rows, one for each query
and head of a KV head's group. So the prefix is read once for each tile, not once for each sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._attention.arguments import AttentionArgs
from ._attention.build import build_attention
from ._attention.operator import attention_operator, with_lse
from ._attention.plan import build_plan, cached_with
from ._core.cache import aligned, cached
from ._core.launch import Launch, current_stream
from .merge_attention import build_merge_launch
from .paged_attention import paged_attention


@cached
def _build_positions_launch(is_aligned: bool, device: torch.device) -> Launch:
    """Return the launch on a device of the kernel that computes positions."""
    from .kernels.shared_prefix import _shared_prefix_kernel

    return Launch(_shared_prefix_kernel, {"BLOCK_T": 64, "BLOCK_S": 128}, same_alignment=is_aligned)


class _Prefix:
    """The shared blocks as one sequence, to which all queries belong. All layers of a step share it."""

    is_captured = False  # see `refresh_cached`

    def __init__(self, args: AttentionArgs) -> None:
        device, self._num_blocks = args.query.device, args.num_shared_blocks
        sizes = {"query_positions": args.query.shape[0], "seq_lens": 1, "query_start_loc": 2}
        self.batch: dict[str, Any] = {
            name: torch.empty(n, dtype=torch.int32, device=device) for name, n in sizes.items()
        }
        self.plan: torch.Tensor | None = None

    def fill(self, args: Any) -> None:
        """Compute each query's position and the plan. `args` are a call's, or a refreshed `attention_plan`'s."""
        seq_lens, starts, num_tokens = args.seq_lens, args.query_start_loc, len(self.batch["query_positions"])
        launch = _build_positions_launch(aligned(seq_lens, starts), seq_lens.device)
        launch(
            (*self.batch.values(), seq_lens, starts),
            None,
            (-(-num_tokens // 64), 1, 1),
            (seq_lens.shape[0], num_tokens, self._num_blocks * args.block_size),
        )
        tables = args.block_tables[:1, : self._num_blocks]
        own = args._replace(**self.batch, block_tables=tables, num_shared_blocks=0)
        self.plan = build_plan(own, 0, 1)(own, self.plan)

    def arguments(self, args: AttentionArgs) -> AttentionArgs:
        """Return the arguments of attention of all queries over the shared blocks."""
        return args._replace(
            **self.batch,
            block_tables=args.block_tables[:1, : self._num_blocks],
            num_shared_blocks=0,
            sinks=None,
            max_query_len=None,
            max_seq_len=None,
            plan=self.plan,
        )


def _prefix_of(args: AttentionArgs) -> _Prefix:
    """Return the prefix of a call, with its positions and plan computed. Calls with one plan share one prefix."""
    on_device, cached = args.query.is_cuda, {} if args.plan is None else cached_with(args.plan)
    stream = current_stream() if on_device else None
    key = (stream, args.query.shape[0], args.num_shared_blocks, args.block_size)
    found: _Prefix | None = cached.get(key)
    if found is None:
        found = cached[key] = _Prefix(args)
        found.fill(args)
    found.is_captured = found.is_captured or (on_device and torch.cuda.is_current_stream_capturing())
    return found


def _build(args: AttentionArgs) -> Callable[[AttentionArgs], Any]:
    """Return a function that runs calls of this kind: attention over the prefix, over the rest, and their merge."""
    if args.num_shared_blocks <= 0 or args.seq_lens.shape[0] == 0 or args.query.shape[0] == 0:
        return build_attention(args)
    parts = args._replace(with_lse=True)
    rest = build_attention(parts, out_dtype=torch.float32)
    # Positions do not ascend over sequences, so the queries are tiled, never decoded from a work list.
    prefix = build_attention(_Prefix(parts).arguments(parts), out_dtype=torch.float32, tiled=True)
    out = torch.empty((*args.query.shape[:2], args.value_cache.shape[3]), dtype=torch.float32, device="meta")
    lse = out[..., 0].contiguous()
    merge = build_merge_launch((out, lse, out, lse), args.query.dtype)

    def run(args: AttentionArgs) -> Any:
        parts = args._replace(with_lse=True)
        own = rest(parts)
        out, lse = merge((*prefix(_prefix_of(parts).arguments(parts)), *own))
        return (out, lse) if args.with_lse else out

    return run


@attention_operator(_build, docs_from=(paged_attention,))
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
    """Compute `paged_attention` for sequences whose first `num_shared_blocks` blocks are the same.

    It is faster if several sequences decode after one long prefix, such as a system prompt or a prompt with several
    samples.

    Args:
        block_tables: `[num_seqs, max_blocks]` int32, the whole tables. The first num_shared_blocks columns are equal in
            all rows.
        seq_lens: `[num_seqs]` int32, each at least num_shared_blocks * block_size.
        num_shared_blocks: The number of first blocks that all sequences share. 0: none.
        sinks: `[num_heads]`, a learned logit for each head, which is added to the softmax's denominator once.
        plan: The plan of `attention_plan` with the same num_shared_blocks. None: the operator builds one.

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


shared_prefix_attention_with_lse = with_lse(shared_prefix_attention, _build)
