"""The part of a plan that tells what batch and options it was made for: its header, and its facts about each table.

This part is all of a plan that CPU tensors get, because PyTorch needs no list of work. A call whose values may be read
computes this part and compares it with that of its plan.
"""

from __future__ import annotations

from typing import Any

import torch

from .._core.checks import bad_argument
from . import layout
from .arguments import AttentionArgs, decode_queries_of, key_begin_of, mask_of
from .layout import TILE_KEYS, PlanShape, plan_views

# The columns of `info` that follow from the batch and the options alone.
_COMPARED = {
    layout.INFO_FLAGS: "flags",
    layout.INFO_ATTENDED: "live tiles that a decode attends to",
    layout.INFO_CHECKSUM: "checksum of positions",
    layout.INFO_QUERY_LEN: "q_len",
    layout.INFO_SEQ_LEN: "seq_len",
    layout.INFO_LIVE: "live tiles",
}


def _header(args: Any) -> dict[str, int]:
    """Return the integers of a plan's header (see `layout`), without the first one, by name."""
    mask = {name: int(value) for name, value in mask_of(args)._asdict().items()}
    return {"decode_queries": decode_queries_of(args), "key_begin": key_begin_of(args), **mask}


def plan_without_work(args: Any) -> torch.Tensor:
    """Return a plan in host memory with its header and its facts about tables; everything else is 0.

    `args` are the arguments of an attention operator or of `attention_plan`.
    """
    block_tables, block_size = args.block_tables, args.block_size
    shape = PlanShape.of(block_tables, block_size)
    plan = torch.zeros(shape.size, dtype=torch.int32)
    header, mask = _header(args), mask_of(args)
    plan[1 : 1 + len(header)] = torch.tensor([*header.values()])
    info, lens, starts = plan_views(plan, shape)[0], args.seq_lens.tolist(), args.query_start_loc.tolist()
    heads = shape.num_rows // max(1, len(lens))
    positions = None if args.query_positions is None else args.query_positions.cpu().long()
    for row, table in enumerate(block_tables.cpu().reshape(shape.num_rows, block_tables.shape[-1])):
        length, (begin, end) = lens[row // heads], starts[row // heads : row // heads + 2]
        own = torch.arange(length - (end - begin), length) if positions is None else positions[begin:end]
        present = (table[: -(-length // block_size)] >= 0).repeat_interleave(block_size)[:length]
        live, lacking = _tiles_with(present), _tiles_with(~present)
        attended = 0
        if 0 < end - begin <= header["decode_queries"]:
            attended = int((live & mask.attended_tiles(own, length, len(live), header["key_begin"])).sum())
        flags = layout.DEAD_TILES * (not live.all()) + layout.PARTIAL_TILES * bool((live & lacking).any())
        checksum = 0 if positions is None else int((own * (2 * torch.arange(end - begin) + 1)).sum())
        facts = [flags, 0, 0, attended, checksum, end - begin, length, int(live.sum())]
        info[row] = torch.tensor(facts).int()  # a checksum keeps its last 32 bits, as in kernels
    return plan


def _tiles_with(keys: torch.Tensor) -> torch.Tensor:
    """Return for each tile whether `keys` is true for one of its keys. The last tile may be shorter than others."""
    return torch.nn.functional.pad(keys, (0, -len(keys) % TILE_KEYS)).view(-1, TILE_KEYS).any(1)


def check_plan(args: AttentionArgs) -> None:
    """Raise ValueError if the plan was made for another call. This reads values, so on a device it synchronizes."""
    shape = PlanShape.of(args.block_tables, args.block_size)
    if args.plan is None or shape.num_rows == 0:
        return
    expected, given = plan_without_work(args), args.plan.cpu()
    names = _header(args)
    header = slice(1, 1 + len(names))
    if not torch.equal(given[header], expected[header]):
        needs = f"{expected[header].tolist()} ({', '.join(names).lower()} of this call)"
        raise bad_argument("plan", f"{given[header].tolist()}", needs)
    mine, theirs = (plan_views(p, shape)[0][:, [*_COMPARED]] for p in (given, expected))
    if not torch.equal(mine, theirs):
        row = int(torch.nonzero((mine != theirs).any(dim=1))[0])
        needs = f"{theirs[row].tolist()} ({', '.join(_COMPARED.values())}): build it again for this step"
        raise bad_argument("plan", f"{mine[row].tolist()} for sequence {row}", needs)
