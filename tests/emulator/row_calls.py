"""Calls of the operators that write, rotate, move and join rows, of every count over a tile."""

from __future__ import annotations

from collections.abc import Callable

import torch
from row_cases import OPS, check_rope, check_rotation, check_write, joined, same_bits

import pc

BF16, F16, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
ROW_CASES: dict[str, Callable[[], None]] = {}
GATHER_BLOCKS, GATHER, SCATTER_BLOCKS, SCATTER, COPY = OPS
ROWS = (1, 2, 7, 16, 33, 64, 65)


def case(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Add a case."""
    return lambda run: ROW_CASES.setdefault(name, run)


def _slots(tokens: int, slots: int) -> torch.Tensor:
    """Return a slot for each token; every third is a hole."""
    found = torch.randperm(slots)[:tokens]
    found[2::3] = -1
    return found


@case("write")
def _write() -> None:
    for tokens, head_dim, dtype, codes in (
        (1, 64, F16, None), (21, 80, BF16, None), (33, 40, torch.float32, None),
        (21, 64, BF16, INT8), (9, 80, F16, E4M3), *((tokens, 64, F16, None) for tokens in range(2, 23)),
    ):  # fmt: skip
        caches = [torch.full((6, 8, 3, head_dim), 7.0).to(codes or dtype) for _ in range(2)]
        scales = (torch.tensor([0.03]),) * 2 if codes else ()
        check_write(torch.randn(2, tokens, 3, head_dim).to(dtype), caches, _slots(tokens, 48), scales)


@case("rope")
def _rope() -> None:
    for head_dim, rotary, interleaved in ((64, 64, False), (80, 32, True), (16, 2, False)):
        for tokens in (1, 17, 33):
            query, (key, value) = torch.randn(tokens, 4, head_dim), torch.randn(2, tokens, 2, head_dim)
            angles = torch.arange(50)[:, None] / 10000 ** (torch.arange(rotary // 2) * 2 / rotary)
            positions = torch.randint(0, 50, (tokens,), dtype=torch.int32)
            caches = [torch.full((6, 8, 2, head_dim), 7.0) for _ in range(2)]
            table = torch.cat([angles.cos(), angles.sin()], 1)
            check_rope(query, key, value, positions, table, *caches, _slots(tokens, 48), interleaved)


@case("rotate")
def _rotate() -> None:
    # 2 or 510 of 512 features are rotated in place, with tiles of fewer pairs, or other features, than threads.
    turns = ((64, 64, 3, torch.float32), (80, 32, 2, BF16), (48, 32, 1, E4M3), (512, 2, 2, F16), (512, 510, 2, BF16))
    for head_dim, rotary, heads, dtype in turns:
        for is_neox in (True, False):
            keys, inv_freq = (
                torch.randn(9, 5, heads, head_dim).to(dtype),
                10000.0 ** (-torch.arange(0, rotary, 2) / rotary),
            )
            moves = torch.tensor([[6, 4, 2, -1, 3], [1, 4, -1, 7, 0], [3, -100, 5, 9, 131_000]])
            check_rotation("rotate_keys", keys, moves, inv_freq, is_neox)


@case("move")
def _move() -> None:
    turns = (
        (64, 64, 3, 0, F16),
        (80, 32, 2, 16, BF16),
        (48, 32, 1, 0, E4M3),
        (576, 64, 1, 512, BF16),
        (64, 0, 2, 0, INT8),
    )
    for head_dim, rotary, heads, first, dtype in turns:
        for is_neox in (True, False):
            keys, values = torch.randn(9, 5, heads, head_dim).to(dtype), torch.randn(9, 5, heads, 40).to(dtype)
            inv_freq = 10000.0 ** (-torch.arange(0, rotary, 2) / rotary) if rotary else None
            order = torch.randperm(45)
            sources, targets, deltas = order[:20].clone(), order[20:40].clone(), torch.randint(-5000, 131_000, (20,))
            sources[3], targets[5], targets[7] = -1, -1, sources[7]  # zeros, no target, in place
            check_rotation("move_slots", keys, (sources, targets, deltas), inv_freq, is_neox, first, values)


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@case("gather and scatter")
def _rows() -> None:
    for features in ((3, 5), (64,), (7,), (1030,), (8192,)):
        for count in ROWS:
            cache, slots = _bytes(12, 8, *features), _slots(count, 96)
            for op in (GATHER, SCATTER):
                op.check(_bytes(count, *features), cache, slots)
    for ids in (torch.tensor([3]), torch.tensor([5, -1, 0]), torch.arange(11)):
        for op in (GATHER_BLOCKS, SCATTER_BLOCKS):
            op.check(_bytes(len(ids), 8, 9), _bytes(12, 8, 9), ids)
        several = [_bytes(12, 8, features) for features in (9, 300, 5)]
        for one, found in zip(several, pc.gather_blocks_list(several, ids), strict=True):
            assert same_bits(found, GATHER_BLOCKS.expected(None, one, ids))
    for count in (1, 3, 6):
        sources, targets = torch.randperm(6)[:count], 6 + torch.randperm(6)[:count]
        sources[4:5] = targets[2:3] = -1
        COPY.check(None, _bytes(12, 8, 9), sources, targets)


@case("join")
def _join() -> None:
    for features, lens in ((7, tuple(range(40))), (64, tuple(range(40, 0, -1)))):
        new = tuple(min(n, n % 7) for n in lens)
        tables = torch.randperm(40 * 11)[: 40 * 10].view(40, 10).int()
        cache, tokens = _bytes(440, 4, features), _bytes(sum(new) + 2, features)
        starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        given = (cache, tables, torch.tensor(lens, dtype=torch.int32), tokens, starts, sum(lens) + 5)
        assert same_bits(pc.join_prefix(*given), joined(*given))
