"""Constants that a sweep on a device chose, each with its reason. `python benchmarks/sweep.py --write` writes them."""

from __future__ import annotations

# (architecture, "decode" or "prefill", head_dim, heads of a group, 64 for blocks of full tiles of 64 tokens or 16) ->
# ((block_m, block_n, num_warps, num_stages, two_loops, max_registers if any), reason)
_Tiles = tuple[int, int, int, int, bool] | tuple[int, int, int, int, bool, int]
TILES: dict[tuple[str, str, int, int, int], tuple[_Tiles, str]] = {}

# architecture -> (programs of a decode per processor, reason)
PROGRAMS: dict[str, tuple[int, str]] = {}
