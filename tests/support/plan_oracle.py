"""The plan of `pc.attention_plan` in numpy, from the description of its parts and key by key."""

from __future__ import annotations

import numpy as np
import torch

from pc.triton_ops._attention import build, layout
from pc.triton_ops._attention.layout import DECODE_QUERIES, MIN_SPLIT_TILES, TILE_KEYS, PlanShape, plan_views

UNBOUNDED = 1 << 30


def plan_in_numpy(
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
    """Return the plan that the kernels build; elements that they do not write are 0."""
    shape = PlanShape.of(block_tables, block_size)
    plan = torch.zeros(shape.size, dtype=torch.int32)
    info, items, tiles, ranks = (part.numpy() for part in plan_views(plan, shape))
    window = 0 if window >= UNBOUNDED else window
    tiled = batch_invariant or (query_positions is not None and window > 0)
    decode_queries, key_begin = 0 if tiled else DECODE_QUERIES, num_shared_blocks * block_size
    heads = 1 if block_tables.dim() == 2 else block_tables.shape[1]
    lens, starts = seq_lens.tolist(), query_start_loc.tolist()
    for row, table in enumerate(block_tables.cpu().numpy().reshape(shape.num_rows, block_tables.shape[-1])):
        sequence = row // heads
        length, q_len = lens[sequence], starts[sequence + 1] - starts[sequence]
        p = np.arange(length - q_len, length)
        if query_positions is not None:
            p = query_positions[starts[sequence] : starts[sequence + 1]].cpu().numpy().astype(np.int64)
        t, p = np.arange(length), p[:, None]
        attends = np.ones((q_len, length), bool)
        if causal:
            attends &= t <= p
        if window:
            attends &= (t > p - window) | (t < num_sink_tokens)
        if window and not causal:
            attends &= t < p + window
        present, in_range = table[t // block_size] >= 0, attends.any(0) & (t >= key_begin)
        tile, num_tiles = t // TILE_KEYS, -(-length // TILE_KEYS)
        live, lacking, seen = (np.zeros(num_tiles, bool) for _ in range(3))
        live[tile[present]] = lacking[tile[~present]] = seen[tile[in_range]] = True
        tiles[row, : live.sum()] = np.flatnonzero(live)
        ranks[row, : num_tiles + 1] = np.concatenate([[0], np.cumsum(live)])
        decoded = (live & seen).sum() if 0 < q_len <= decode_queries else 0
        flags = layout.DEAD_TILES * int(not live.all()) + layout.PARTIAL_TILES * int((live & lacking).any())
        checksum = 0 if query_positions is None else (p[:, 0] * (2 * np.arange(q_len) + 1)).sum()
        info[row] = np.array([flags, 0, 0, decoded, checksum, q_len, length, live.sum()], np.int64).astype(np.int32)
    items_per_head = 1 if block_tables.dim() == 3 else num_kv_heads
    wanted = build.wanted_items(build.architecture(block_tables.device), items_per_head)
    per_item = max(1, min(wanted, shape.max_items - shape.num_rows))
    target = max(-(-int(info[:, layout.INFO_ATTENDED].sum()) // per_item), MIN_SPLIT_TILES)
    number = 0
    for row in range(shape.num_rows):
        if not 0 < info[row, layout.INFO_QUERY_LEN] <= decode_queries:
            info[row, layout.INFO_FIRST] = number
            continue
        attended = int(info[row, layout.INFO_ATTENDED])
        count = max(-(-attended // target), 1)
        info[row, layout.INFO_FIRST], info[row, layout.INFO_ITEMS] = number, count
        length = -(-attended // count)
        for split in range(count):
            items[number] = row, min(split * length, attended), min((split + 1) * length, attended), count
            number += 1
    bounded = int(window > 0)
    header = [number, decode_queries, key_begin, window, num_sink_tokens if window else 0, int(causal)]
    plan[: len(header) + 2] = torch.tensor([*header, bounded, bounded])
    return plan
