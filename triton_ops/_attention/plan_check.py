"""The check of a plan: whether it was made for a call's batch and options.

A plan's header has the options. PyTorch needs no list of work, so a plan in host memory has nothing else but a checksum
of its batch. For kernels, the check builds the plan again.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from .._core.checks import bad_argument, on_host
from . import layout
from .arguments import AttentionArgs, decode_queries_of, key_begin_of, mask_of
from .layout import PlanShape, plan_views
from .plan import build_plan

# The columns of `info` that follow from the batch and the options alone.
COMPARED = [
    *(layout.INFO_FLAGS, layout.INFO_ATTENDED, layout.INFO_CHECKSUM),
    *(layout.INFO_QUERY_LEN, layout.INFO_SEQ_LEN, layout.INFO_LIVE),
]


def _header(args: Any) -> dict[str, int]:
    """Return the integers of a plan's header (see `layout`), without the first one, by name."""
    mask = {name: int(value) for name, value in mask_of(args)._asdict().items()}
    return {"decode_queries": decode_queries_of(args), "key_begin": key_begin_of(args), **mask}


def plan_on_host(args: Any) -> torch.Tensor:
    """Return a plan in host memory for the arguments of an attention operator or of `attention_plan`."""
    tables, lens, starts, positions = args.block_tables, args.seq_lens, args.query_start_loc, args.query_positions
    shape, header = PlanShape.of(tables, args.block_size), _header(args)
    plan = torch.zeros(shape.size, dtype=torch.int32)
    # A plan serves blocks of any size. Entries after a sequence's end may hold anything.
    present = (tables >= 0).repeat_interleave(args.block_size, -1)
    present = torch.nn.functional.pad(present, (0, shape.num_keys - present.shape[-1]))
    present &= torch.arange(present.shape[-1]) < lens.view(-1, *[1] * (tables.dim() - 1))
    checksum = 0
    for part in (present, lens, starts, starts if positions is None else positions[: int(starts[-1])]):
        checksum = zlib.crc32(part.numpy().tobytes(), checksum)
    plan[1 : 2 + len(header)] = torch.tensor([*header.values(), checksum >> 1])
    return plan


def check_plan(args: AttentionArgs) -> None:
    """Raise ValueError if the plan was made for another call. This reads values, so on a device it synchronizes."""
    shape = PlanShape.of(args.block_tables, args.block_size)
    if args.plan is None or shape.num_rows == 0:
        return
    is_on_host, given, names = on_host(args.block_tables), args.plan.cpu(), _header(args)
    end = 1 + len(names)
    if given[1:end].tolist() != [*names.values()]:
        options = ("causal", "window", "num_sink_tokens", "num_shared_blocks", "batch_invariant")
        needs = ", ".join([f"{name}={getattr(args, name)}" for name in options])
        raise bad_argument("plan", "a plan for other options", f"{needs} and query_positions as in this call")
    expected = plan_on_host(args) if is_on_host else build_plan(args, names["decode_queries"], 1)(args).cpu()
    mine, theirs = (p[end] if is_on_host else plan_views(p, shape)[0][:, COMPARED] for p in (given, expected))
    if not torch.equal(mine, theirs):
        needs = "a plan for these block_tables, seq_lens, query_start_loc and query_positions: build it for each step"
        raise bad_argument("plan", "a plan for another batch", needs)
