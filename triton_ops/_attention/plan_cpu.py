"""The plan computed in numpy, for CPU tensors, and for comparisons in debug mode."""

from __future__ import annotations

import numpy as np
import torch

from .._core.checks import bad_argument
from . import layout
from .arguments import AttentionArgs, PlanOptions
from .layout import MIN_SPLIT_TILES, TILE_KEYS, PlanShape, plan_views


def plan_cpu(
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_positions: torch.Tensor | None,
    block_size: int,
    options: PlanOptions,
    target_items: int,
) -> torch.Tensor:
    """Return the plan that the kernels build, computed in numpy; elements that they do not write are 0."""
    shape = PlanShape.of(block_tables, block_size)
    plan = np.zeros(shape.size, dtype=np.int32)
    lens = seq_lens.cpu().numpy()
    heads = shape.num_rows // max(1, len(lens))
    tables = block_tables.cpu().numpy().reshape(shape.num_rows, block_tables.shape[-1])
    starts = query_start_loc.cpu().numpy()
    positions = None if query_positions is None else query_positions.cpu().numpy()
    info, items, tiles, ranks = plan_views(torch.from_numpy(plan), shape)
    for i in range(shape.num_rows):
        seq, seq_len = i // heads, int(lens[i // heads])
        q_begin, q_end = int(starts[seq]), int(starts[seq + 1])
        q_len = q_end - q_begin
        own = np.arange(seq_len - q_len, seq_len) if positions is None else positions[q_begin:q_end].astype(np.int64)
        num_tiles = -(-seq_len // TILE_KEYS)
        present = np.repeat(tables[i, : -(-seq_len // block_size)] >= 0, block_size)[:seq_len]
        edges = np.arange(num_tiles) * TILE_KEYS
        live = np.logical_or.reduceat(present, edges) if num_tiles else present
        partial = live & ~np.logical_and.reduceat(present, edges) if num_tiles else present
        decoded = 0 < q_len <= options.decode_queries
        in_range = np.zeros_like(live)
        if decoded:
            in_range = live & options.mask.attended_tiles(own, seq_len, num_tiles, options.key_begin)
        tiles[i, : live.sum()] = torch.from_numpy(np.flatnonzero(live))
        ranks[i, : num_tiles + 1] = torch.from_numpy(np.concatenate([[0], np.cumsum(live)]))
        checksum = 0 if positions is None else int((own * (2 * np.arange(q_len) + 1)).sum())
        flags = int(layout.DEAD_TILES) * int(not live.all()) + int(layout.PARTIAL_TILES) * int(partial.any())
        row = [flags, 0, 0, int(in_range.sum()), checksum, q_len, seq_len, int(live.sum())]
        info[i] = torch.from_numpy(np.array(row, dtype=np.int64).astype(np.int32))
    attended = info[:, int(layout.INFO_ATTENDED)].numpy().astype(np.int64)
    q_lens = info[:, int(layout.INFO_QUERY_LEN)].numpy()
    is_decoded = (q_lens > 0) & (q_lens <= options.decode_queries)
    wanted = max(1, min(target_items, shape.max_items - shape.num_rows))
    target = max(-(-int(attended.sum()) // wanted), MIN_SPLIT_TILES)
    counts = np.where(is_decoded, np.maximum(-(-attended // target), 1), 0)
    first = np.cumsum(counts) - counts
    info[:, int(layout.INFO_FIRST)], info[:, int(layout.INFO_ITEMS)] = torch.from_numpy(first), torch.from_numpy(counts)
    for i, count in enumerate(counts.tolist()):
        per = -(-int(attended[i]) // max(1, count))
        for split in range(count):
            begin = min(split * per, int(attended[i]))
            items[int(first[i]) + split] = torch.tensor([i, begin, min(begin + per, int(attended[i])), count])
    header = options.header()
    plan[: 1 + len(header)] = [counts.sum(), *header.values()]
    return torch.from_numpy(plan)


def check_plan(call: AttentionArgs, options: PlanOptions) -> None:
    """Raise ValueError if the plan was made for another call. This reads values, so on a device it synchronizes."""
    block_size = call.key_cache.shape[1]
    shape = PlanShape.of(call.block_tables, block_size)
    if call.plan is None or shape.num_rows == 0:
        return
    expected = plan_cpu(*call.batch, block_size, options, 1)
    header = slice(1, 1 + len(options.header()))
    given = call.plan.cpu()
    if not torch.equal(given[header], expected[header]):
        names = ", ".join(options.header()).lower()
        raise bad_argument("plan", f"{given[header].tolist()}", f"{expected[header].tolist()} ({names} of this call)")
    found = (layout.INFO_FLAGS, layout.INFO_ATTENDED, layout.INFO_CHECKSUM)
    columns = [int(column) for column in (*found, layout.INFO_QUERY_LEN, layout.INFO_SEQ_LEN, layout.INFO_LIVE)]
    mine, theirs = (plan_views(p, shape)[0][:, columns] for p in (given, expected))
    if not torch.equal(mine, theirs):
        row = int(torch.nonzero((mine != theirs).any(dim=1))[0])
        names = "flags, live tiles that a decode attends to, checksum of positions, q_len, seq_len, live tiles"
        needs = f"{theirs[row].tolist()} ({names}): build it again for this step"
        raise bad_argument("plan", f"{mine[row].tolist()} for sequence {row}", needs)
