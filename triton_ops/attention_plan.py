"""The plan of a step: the live tiles of every sequence and a balanced list of decode work, built on the device.

Built once a step from the block tables and lengths, then passed as `plan` to the attention op of every layer. Reads the
block tables once; writes 8 bytes per 64 tokens. A ragged batch is cut into work items of equal length, so that one
sequence of 128k tokens among 31 of 1k does not run alone at the end.
"""

from __future__ import annotations

import torch

from ._attention.constants import architecture
from ._attention.layout import PlanOptions, PlanShape
from ._attention.plan import launch_plan, plan_reference
from ._attention.prepare import plan_options, wanted_items
from ._checks import bad_argument, check_tensor
from ._debug import reads_values
from ._library import define
from ._triton import require_triton

_ARGUMENTS = (
    "(Tensor block_tables, Tensor seq_lens, Tensor query_start_loc, SymInt block_size, bool causal=True, "
    "SymInt window=0, SymInt num_sink_tokens=0, Tensor? query_positions=None, SymInt num_shared_blocks=0, "
    "SymInt num_kv_heads=8, bool batch_invariant=False"
)


def _check(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    block_size: int,
    window: int,
    num_sink_tokens: int,
    query_positions: torch.Tensor | None,
    num_shared_blocks: int,
    num_kv_heads: int,
) -> None:
    check_tensor("block_tables", block_tables, 2, "[num_seqs, max_blocks]", (torch.int32,))
    device = block_tables.device
    check_tensor("seq_lens", seq_lens, 1, "[num_seqs]", (torch.int32,), device)
    check_tensor("query_start_loc", query_start_loc, 1, "[num_seqs + 1]", (torch.int32,), device)
    num_seqs, max_blocks = block_tables.shape
    if max_blocks > 1 and block_tables.stride(1) != 1:
        raise bad_argument("block_tables", f"strides {list(block_tables.stride())}", "a contiguous last dimension")
    if seq_lens.shape[0] != num_seqs:
        raise bad_argument("seq_lens", f"{seq_lens.shape[0]} elements", f"{num_seqs}, the rows of block_tables")
    if query_start_loc.shape[0] != num_seqs + 1:
        raise bad_argument("query_start_loc", f"{query_start_loc.shape[0]} elements", f"{num_seqs + 1}")
    vectors = {"seq_lens": seq_lens, "query_start_loc": query_start_loc}
    if query_positions is not None:
        check_tensor("query_positions", query_positions, 1, "[num_tokens]", (torch.int32,), device)
        vectors["query_positions"] = query_positions
    for name, vector in vectors.items():
        if not vector.is_contiguous():
            raise bad_argument(name, f"strides {list(vector.stride())}", "a contiguous tensor")
    if block_size < 1:
        raise bad_argument("block_size", block_size, "at least 1")
    for name, value in (("window", window), ("num_sink_tokens", num_sink_tokens)):
        if value < 0:
            raise bad_argument(name, value, "0 or a positive number of tokens")
    if not 0 <= num_shared_blocks <= max_blocks:
        raise bad_argument("num_shared_blocks", num_shared_blocks, f"0 to {max_blocks}, the columns of block_tables")
    if num_kv_heads < 1:
        raise bad_argument("num_kv_heads", num_kv_heads, "a positive number")


def _check_values(block_tables: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> None:
    capacity = block_tables.shape[1] * block_size
    if seq_lens.numel():
        low, high = (int(bound) for bound in torch.aminmax(seq_lens))
        if low < 0 or high > capacity:
            raise bad_argument("seq_lens", f"values from {low} to {high}", f"0 to {capacity} (block_tables)")


def _build(
    use_kernel: bool,
    out: torch.Tensor | None,
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
) -> torch.Tensor:
    _check(
        block_tables,
        seq_lens,
        query_start_loc,
        block_size,
        window,
        num_sink_tokens,
        query_positions,
        num_shared_blocks,
        num_kv_heads,
    )
    if reads_values(block_tables):
        _check_values(block_tables, seq_lens, block_size)
    size = PlanShape.of(block_tables, block_size).size
    if out is None:
        out = torch.empty(size, dtype=torch.int32, device=block_tables.device)
    check_tensor("out", out, 1, "[n] from attention_plan", (torch.int32,), block_tables.device)
    if out.shape[0] != size or not out.is_contiguous():
        raise bad_argument("out", f"{out.shape[0]} elements", f"{size}, a plan for tables of this shape")
    options: PlanOptions = plan_options(
        causal,
        window,
        num_sink_tokens,
        query_positions is not None,
        batch_invariant,
        num_shared_blocks * block_size,
    )
    target_items = wanted_items(architecture(block_tables.device), num_kv_heads)
    arguments = (block_tables, seq_lens, query_start_loc, query_positions, block_size, options, target_items)
    if use_kernel:
        require_triton("attention_plan")
        launch_plan(out, *arguments)
    else:
        out.copy_(plan_reference(*arguments))
    return out


def attention_plan_reference(*args: object, **kwargs: object) -> torch.Tensor:
    """The plan that `pc.attention_plan` builds, in numpy on CPU tensors; elements the kernels leave unwritten are 0."""
    return _build(False, None, *args, **kwargs)  # type: ignore[arg-type]


def _launch(*args: object, **kwargs: object) -> torch.Tensor:
    return _build(True, None, *args, **kwargs)  # type: ignore[arg-type]


def _refresh_reference(*args: object, out: torch.Tensor, **kwargs: object) -> None:
    _build(False, out, *args, **kwargs)  # type: ignore[arg-type]


def _refresh(*args: object, out: torch.Tensor, **kwargs: object) -> None:
    _build(True, out, *args, **kwargs)  # type: ignore[arg-type]


def _fake(
    block_tables: torch.Tensor, seq_lens: torch.Tensor, query_start_loc: torch.Tensor, block_size: int, *args: object
) -> torch.Tensor:
    return block_tables.new_empty(PlanShape.of(block_tables, block_size).size)


def _fake_refresh(*args: object, **kwargs: object) -> None:
    return None


define(
    "attention_plan",
    _ARGUMENTS + ") -> Tensor",
    reference=attention_plan_reference,
    launcher=_launch,
    fake=_fake,
)
define(
    "attention_plan.out",
    _ARGUMENTS + ", *, Tensor(a!) out) -> ()",
    reference=_refresh_reference,
    launcher=_refresh,
    fake=_fake_refresh,
)


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
    """Builds the plan that the attention ops of a step share; no synchronization, safe in a captured graph.

    causal, window, num_sink_tokens, query_positions and batch_invariant are those of the attention calls: layers with
    another window need another plan. A plan made for other values gives wrong results; debug mode refuses it.

    Args:
        block_tables: `[num_seqs, max_blocks]` int32, as for the attention op.
        seq_lens: `[num_seqs]` int32.
        query_start_loc: `[num_seqs + 1]` int32.
        block_size: Token slots of a block.
        causal: As for the attention op.
        window: As for the attention op; 0 for none.
        num_sink_tokens: As for the attention op.
        query_positions: As for `sparse_gap_attention`.
        num_shared_blocks: As for `shared_prefix_attention`.
        num_kv_heads: KV heads of the attention calls; decides how finely work is cut, and nothing else.
        batch_invariant: As for the attention op.
        out: A plan for tables of the same shape, refreshed in place; a new tensor when None.

    Returns:
        One int32 vector whose size follows from the shape of block_tables and from block_size.

    Raises:
        TypeError: An argument of a wrong type or dtype.
        ValueError: A wrong shape, device or option; on CPU tensors and in debug mode also lengths out of range.
    """
    arguments = (
        block_tables,
        seq_lens,
        query_start_loc,
        block_size,
        causal,
        window,
        num_sink_tokens,
        query_positions,
        num_shared_blocks,
        num_kv_heads,
        batch_invariant,
    )
    if out is None:
        plan: torch.Tensor = torch.ops.pc.attention_plan(*arguments)
        return plan
    torch.ops.pc.attention_plan(*arguments, out=out)
    return out
