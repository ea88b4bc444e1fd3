"""The plan that the attention calls of one forward pass (a step) share, built on the device.

A plan lists the live tiles of every sequence, which are the tiles of 64 keys with a present block. It also has a
balanced list of decode work. Build it once a step from the block tables and lengths, and pass it as `plan` to the
attention operator of each layer. Building it reads the block tables once and writes 8 bytes for 64 tokens. Work items
have equal lengths, so that a sequence of 128k tokens among 31 of 1k tokens does not run alone at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ._attention.arguments import decode_queries_of
from ._attention.build import wanted_items
from ._attention.checks import check_batch, check_lengths, check_plan_size, check_tables
from ._attention.constants import architecture
from ._attention.layout import PlanShape
from ._attention.plan import build_plan, refresh_cached
from ._attention.plan_check import plan_on_host
from ._core.checks import bad_argument, lowest_entry
from ._core.operator import operator


def _check(args: Any) -> None:
    if args.block_size < 1:
        raise bad_argument("block_size", args.block_size, "at least 1")
    if args.num_kv_heads < 1:
        raise bad_argument("num_kv_heads", args.num_kv_heads, "a positive number")
    check_batch(args, args.block_tables.device)
    if args.out is not None:
        check_plan_size("out", args.out, args)


def _check_values(args: Any) -> None:
    lens, starts, positions = args.seq_lens.tolist(), args.query_start_loc.tolist(), args.query_positions
    check_lengths(args, lens, starts)
    check_tables(args.block_tables, lens, args.block_size, (1 << 31) - 1)
    if positions is not None:  # they need not ascend: the positions of a tree are depths
        lowest_entry("query_positions", positions[: starts[-1]], 1 << 31, least=0)


def _run(args: Any) -> torch.Tensor | None:
    _check_values(args)
    plan = plan_on_host(args)
    if args.out is None:
        return plan
    args.out.copy_(plan)
    return None


def _build(args: Any) -> Callable[[Any], torch.Tensor | None]:
    """Return the launch of the kernels. With `out`, it also refreshes what attention calls cached with that plan."""
    tables = args.block_tables
    items = wanted_items(architecture(tables.device), 1 if tables.dim() == 3 else args.num_kv_heads)
    fill = build_plan(args, decode_queries_of(args), items, args.out)

    def run(args: Any) -> torch.Tensor | None:
        plan = fill(args, args.out)
        if args.out is None:
            return plan
        refresh_cached(plan, args)
        return None

    return run


@operator(check=_check, run=_run, build=_build, check_values=_check_values)
def attention_plan(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_size: int,
    causal: bool = True,
    window: int = 0,
    num_sink_tokens: int = 0,
    query_positions: torch.Tensor | None = None,
    num_shared_blocks: int = 0,
    num_kv_heads: int = 8,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Build the plan that all attention calls of a step share, without synchronizing; a CUDA graph may capture it.

    The options must be those of the attention calls, so layers with different windows need different plans. With a plan
    made for other options, results are wrong; debug mode raises ValueError.

    Args:
        block_tables: `[num_seqs, max_blocks]` or `[num_seqs, num_kv_heads, max_blocks]` int32, those of the attention
            calls.
        seq_lens: `[num_seqs]` int32, the tokens of each sequence.
        query_start_loc: `[num_seqs + 1]` int32, the first row of each sequence's queries.
        block_size: Token slots of a block.
        causal: The option of the attention calls.
        window: The option of the attention calls. 0: no window.
        num_sink_tokens: The option of the attention calls.
        query_positions: The positions passed to `sparse_gap_attention`.
        num_shared_blocks: The number passed to `shared_prefix_attention`.
        num_kv_heads: The KV heads of the attention calls. They decide only the size of work items. With a table for
            each KV head, the number is ignored.
        batch_invariant: The option of the attention calls.
        out: A plan for tables of the same shape, which is overwritten. None: a new tensor.

    Returns:
        One int32 vector. Its size depends only on the shape of block_tables and on block_size. For CPU tensors it
        holds only options and a checksum of the batch, since PyTorch needs no list of work.

    Raises:
        TypeError: An argument has a wrong type or dtype.
        ValueError: A shape, device or option is invalid. For CPU tensors and in debug mode also: a length, a start, a
            position or a block number is invalid.

    Examples:
        >>> one = lambda *numbers: torch.tensor(numbers, dtype=torch.int32)
        >>> cache = torch.randn(8, 16, 2, 64)  # 8 blocks of 16 slots, 2 KV heads
        >>> tables, seq_lens, starts = one(5, 1, 7, 0).view(2, 2), one(20, 32), one(0, 1, 2)
        >>> plan = pc.attention_plan(tables, seq_lens, starts, block_size=16, num_kv_heads=2)  # once a step
        >>> for layer in range(4):
        ...     query = torch.randn(2, 4, 64)
        ...     out = pc.paged_attention(query, cache, cache, tables, seq_lens, starts, 0.125, plan=plan)
        >>> out.shape
        torch.Size([2, 4, 64])
    """
    return block_tables.new_empty(PlanShape.of(block_tables, block_size).size)
