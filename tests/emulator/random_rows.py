"""Calls of the operators that write, rotate, move and join rows drawn at random, against indexing and float64."""

from __future__ import annotations

import itertools
import random

import torch
from row_cases import OPS, check_rope, check_rotation, check_write, joined, same_bits

import pc

from .random_memory import loose

BF16, F16, F32, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8
TOKENS = (0, 1, 2, 7, 16, 33, 65)
MOVED = (BF16, F16, F32, E4M3, INT8, torch.int64, torch.bool)


def _shape(rand: random.Random) -> tuple[int, int, int, int]:
    """Return tokens, heads, block size, and blocks of a cache with room for the tokens."""
    tokens, size = rand.choice(TOKENS), rand.choice((1, 5, 8, 16, 32, 128))
    return tokens, rand.choice((1, 2, 3, 8)), size, -(-tokens // size) + rand.randint(1, 4)


def _filled(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random numbers, as bytes for a dtype without arithmetic."""
    if dtype.is_floating_point:
        return torch.randn(shape).mul_(3).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 99, shape).to(dtype)


def _slots(rand: random.Random, tokens: int, slots: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return a slot for each token, some of them holes, sometimes every other number of a longer vector."""
    found = torch.randperm(slots)[:tokens]
    found[torch.rand(tokens) < rand.choice([0, 0.2, 1])] = -1
    found = found.to(dtype)
    return torch.stack([found, found + 1], 1)[:, 0] if rand.random() < 0.3 else found


def _scale(rand: random.Random, heads: int) -> torch.Tensor:
    return torch.rand(rand.choice([(), (1,), (heads,)])) * 0.1 + 0.01


def write(rand: random.Random) -> str:
    """Call reshape_and_cache."""
    tokens, heads, size, blocks = _shape(rand)
    dims, dtype = [rand.choice((1, 8, 33, 64, 80, 128, 256, 512)) for _ in range(2)], rand.choice([F32, F16, BF16])
    if rand.random() < 0.6:
        dims[1] = dims[0]
    codes = rand.choice([None, None, E4M3, INT8])
    slots = _slots(rand, tokens, blocks * size)
    rows = [loose((torch.randn(tokens, heads, dim) * rand.choice([1, 40])).to(dtype), rand) for dim in dims]
    caches = [loose(_filled(codes or dtype, blocks, size, heads, dim), rand) for dim in dims]
    check_write(rows, caches, slots, [_scale(rand, heads) for _ in dims] if codes else ())
    return f"write {tokens} {heads} {dims} {dtype} {codes} {size}"


def rope(rand: random.Random) -> str:
    """Call rope_and_cache."""
    tokens, heads, size, blocks = _shape(rand)
    dim, dtype, interleaved = (
        rand.choice((16, 64, 80, 96, 128, 256)),
        rand.choice([F32, F16, BF16]),
        rand.random() < 0.5,
    )
    rotary = min(dim, rand.choice((2, 32, 48, 64, 128, 256)))
    codes = rand.choice([None, None, E4M3, INT8])
    sources = [loose(torch.randn(tokens, n, dim).to(dtype), rand) for n in (heads * rand.randint(1, 5), heads, heads)]
    angles = torch.arange(50)[:, None] / 10000 ** (torch.arange(rotary // 2) * 2 / rotary)
    positions = torch.randint(0, 50, (tokens,), dtype=rand.choice([torch.int32, torch.int64]))
    slots, scales = _slots(rand, tokens, blocks * size), [_scale(rand, heads) for _ in range(2)]
    caches = [loose(_filled(codes or dtype, blocks, size, heads, dim), rand) for _ in range(2)]
    table = torch.cat([angles.cos(), angles.sin()], 1)
    check_rope(*sources, positions, table, *caches, slots, interleaved, scales if codes else ())
    return f"rope {tokens} {heads} {dim} {rotary} {interleaved} {dtype} {codes} {size}"


def rotate(rand: random.Random) -> str:
    """Call rotate_keys."""
    _, heads, size, _ = _shape(rand)
    dim, dtype, is_neox = (
        rand.choice((16, 64, 80, 128, 256, 512)),
        rand.choice([F32, F16, BF16, E4M3, INT8]),
        rand.random() < 0.5,
    )
    rotary, blocks, count = min(dim, rand.choice((2, 32, 64, 128))), 12, rand.choice((0, 1, 3, 6))
    keys = torch.randn(blocks, size, heads, dim) * (20 if dtype == INT8 else 1)
    cache = loose((keys.round() if dtype == INT8 else keys).to(dtype), rand)
    index = rand.choice([torch.int32, torch.int64])
    moves = (*_disjoint(count, index), torch.randint(-5000, 5000, (count,), dtype=index))
    check_rotation("rotate_keys", cache, moves, 10000.0 ** (-torch.arange(0, rotary, 2) / rotary), is_neox)
    return f"rotate {heads} {dim} {rotary} {is_neox} {dtype} {size} {count}"


def _disjoint(count: int, index: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks to read and blocks to write, of 12; some are holes, and one is both."""
    order = torch.randperm(12)
    sources, targets = order[:count].clone(), order[6 : 6 + count].clone()
    if count > 2:
        sources[0], targets[1], targets[2] = -1, -1, sources[2]
    return sources.to(index), targets.to(index)


def _features(rand: random.Random) -> tuple[int, ...]:
    return rand.choice([(), (1,), (7,), (64,), (3, 5), (2, 128), (4, 2, 16), (1030,), (8192,)])


def move(rand: random.Random) -> str:
    """Call gather and scatter, of slots and of blocks."""
    tokens, _, size, blocks = _shape(rand)
    features, dtype, index = _features(rand), rand.choice(MOVED), rand.choice([torch.int32, torch.int64])
    by_block = rand.random() < 0.5
    count = min(tokens, blocks) if by_block else tokens
    ids = _slots(rand, count, blocks if by_block else blocks * size, index)
    cache = loose(_filled(dtype, blocks, size, *features), rand, last=False)
    inner = (size, *features) if by_block else features
    for op in OPS[:4]:
        if op.leading == 2 - by_block:
            op.check(loose(_filled(dtype, count, *inner), rand, last=False), cache, ids)
    return f"move {count} {by_block} {features} {dtype} {size}"


def copy(rand: random.Random) -> str:
    """Call copy_blocks."""
    _, _, size, _ = _shape(rand)
    features, dtype, count = _features(rand), rand.choice(MOVED), rand.choice((0, 1, 3, 6))
    cache = loose(_filled(dtype, 12, size, *features), rand, last=False)
    sources, targets = _disjoint(count, rand.choice([torch.int32, torch.int64]))
    targets[2:3] = -1  # no block is read and written
    OPS[4].check(None, cache, sources, targets)
    return f"copy {count} {features} {dtype} {size}"


def join(rand: random.Random) -> str:
    """Call join_prefix."""
    size, features = rand.choice((1, 4, 16, 128)), _features(rand)
    dtype, index, scattered = rand.choice(MOVED), rand.choice([torch.int32, torch.int64]), rand.random() < 0.4
    lens = [rand.choice((0, 1, 17, rand.randint(1, 200))) for _ in range(rand.choice((0, 1, 3, 20)))]
    if features and features[-1] > 1000:
        lens = [length % 23 for length in lens]
    new = [rand.randint(0, length) for length in lens]
    width = -(-max(lens, default=0) // size) + rand.randint(0, 2)
    tables = torch.randperm(max(1, len(lens) * width) + 2)[: len(lens) * width].view(len(lens), width)
    tables[torch.rand(tables.shape) < rand.choice([0, 0.3])] = -1
    cache = loose(_filled(dtype, max(1, len(lens) * width) + 2, size, *features), rand, last=False)
    tokens = loose(_filled(dtype, sum(new) + rand.randint(0, 2), *features), rand, last=False)
    picked = [
        sorted(rand.sample(range(n), q)) if scattered else list(range(n - q, n)) for n, q in zip(lens, new, strict=True)
    ]
    positions = torch.tensor([*itertools.chain(*picked), *[0] * (len(tokens) - sum(new))]).to(index)
    starts = torch.tensor([0, *itertools.accumulate(new)]).to(index)
    num_rows, own = sum(lens) + rand.choice([0, 3]), positions if scattered else None
    given = (cache, tables.to(index), torch.tensor(lens).to(index), tokens, starts, num_rows, own)
    assert same_bits(pc.join_prefix(*given), joined(*given))
    return f"join {lens} {features} {dtype} {size} {scattered}"
