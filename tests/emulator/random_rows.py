"""Calls of the operators that write, rotate, move and join rows drawn at random, against indexing and float64."""

from __future__ import annotations

import itertools
import random

import torch

import pc
from pc.triton_ops._core.quantize import quantize

from .random_memory import equal, loose, same, twin
from .row_calls import _turned as turned

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
    rows, caches, wanted, scales = [], [], [], []
    for dim in dims:
        source = torch.randn(tokens, heads, dim) * rand.choice([1, 40])
        rows.append(loose(source.to(dtype), rand))
        caches.append(loose(_filled(codes or dtype, blocks, size, heads, dim), rand))
        scales.append(_scale(rand, heads))
        wanted.append(twin(caches[-1]))
        live = slots >= 0
        stored = rows[-1] if codes is None else quantize(rows[-1], scales[-1], codes)
        wanted[-1][slots[live] // size, slots[live] % size] = stored[live]
    pc.reshape_and_cache(*rows, *caches, slots, *(scales if codes else ()))
    for cache, want in zip(caches, wanted, strict=True):
        same(cache, want)
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
    wanted = [twin(cache) for cache in caches]
    table = torch.cat([angles.cos(), angles.sin()], 1)
    out = pc.rope_and_cache(
        *sources, positions, table, *caches, slots, interleaved, *(scales if codes else ())
    )  # fmt: skip
    turns = angles[positions.long()].double()
    eps = 2 * torch.finfo(dtype).eps
    exact = [turned(source.double(), turns, interleaved) for source in sources[:2]]
    assert out.is_contiguous()
    assert ((out.double() - exact[0]).abs() <= eps * (exact[0].abs() + 1)).all()
    live = slots >= 0
    place = slots[live] // size, slots[live] % size
    stored = sources[2] if codes is None else quantize(sources[2], scales[1], codes)
    wanted[1][place] = stored[live]
    same(caches[1], wanted[1])
    # Keys are rounded, so a quantized key may be the other of two neighbours.
    step = scales[0].double().view(-1, 1) if codes else torch.tensor(1.0)
    found, want = caches[0][place].double() * step, exact[1][live]
    limit = {None: eps * (want.abs() + 1), INT8: step * 0.51 + eps * want.abs(), E4M3: want.abs() / 15 + step * 2**-9}[
        codes
    ]
    top = {None: torch.inf, INT8: 127, E4M3: 448}[codes] * step
    assert ((found - want.clamp(-top, top) if codes else found - want).abs() <= limit).all()
    wanted[0][place] = caches[0][place]
    same(caches[0], wanted[0])
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
    want, index = twin(cache), rand.choice([torch.int32, torch.int64])
    order = torch.randperm(blocks)
    sources, targets = order[:count].clone(), order[6 : 6 + count].clone()
    if count > 2:
        sources[0], targets[1], targets[2] = -1, -1, sources[2]
    deltas = torch.randint(-5000, 5000, (count,), dtype=index)
    inverse = 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    before = cache.double() if dtype != E4M3 else cache.float().double()
    pc.rotate_keys(cache, sources.to(index), targets.to(index), deltas, inverse, is_neox)
    for source, target, delta in zip(sources.tolist(), targets.tolist(), deltas.tolist(), strict=True):
        if target < 0:
            continue
        exact = turned(before[source], (delta * inverse.double()).expand(size, -1), not is_neox) * (source >= 0)
        if dtype == INT8:
            limit, exact = 0.51, exact.clamp(-128, 127)
        else:
            limit = exact.abs() / 15 + 2**-9 if dtype == E4M3 else 2 * torch.finfo(dtype).eps * (exact.abs() + 1)
        assert ((cache[target].float().double() - exact).abs() <= limit).all(), f"block {target}"
        want[target] = cache[target]
    same(cache, want)
    return f"rotate {heads} {dim} {rotary} {is_neox} {dtype} {size} {count}"


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
    place = (ids.long(),) if by_block else (ids.long() // size, ids.long() % size)
    live = ids >= 0
    want = torch.zeros(count, *inner, dtype=dtype)
    want[live] = cache[tuple(p[live] for p in place)]
    kind = "blocks" if by_block else "slots"
    found = getattr(pc, f"gather_{kind}")(cache, ids)
    assert found.is_contiguous()
    equal(found, want)
    source, target = loose(_filled(dtype, count, *inner), rand, last=False), twin(cache)
    getattr(pc, f"scatter_{kind}")(source, cache, ids)
    target[tuple(p[live] for p in place)] = source[live]
    same(cache, target)
    return f"move {kind} {count} {features} {dtype} {size}"


def copy(rand: random.Random) -> str:
    """Call copy_blocks."""
    _, _, size, _ = _shape(rand)
    features, dtype, index = _features(rand), rand.choice(MOVED), rand.choice([torch.int32, torch.int64])
    order, count = torch.randperm(12), rand.choice((0, 1, 3, 6))
    cache = loose(_filled(dtype, 12, size, *features), rand, last=False)
    sources, targets = order[:count].clone(), order[6 : 6 + count].clone()
    if count > 2:
        sources[0], targets[1] = -1, -1
    want = twin(cache)
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        if target >= 0:
            want[target] = cache[source] if source >= 0 else 0
    pc.copy_blocks(cache, sources.to(index), targets.to(index))
    same(cache, want)
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
    want = torch.zeros(sum(lens) + rand.choice([0, 3]), *features, dtype=dtype)
    row = first = 0
    for table, length, own in zip(tables.tolist(), lens, picked, strict=True):
        for position in range(length):
            block = table[position // size]
            if position in own:
                want[row] = tokens[first + own.index(position)]
            elif block >= 0:
                want[row] = cache[block, position % size]
            row += 1
        first += len(own)
    positions = torch.tensor([*itertools.chain(*picked), *[0] * (len(tokens) - sum(new))]).to(index)
    starts = torch.tensor([0, *itertools.accumulate(new)]).to(index)
    given = (cache, tables.to(index), torch.tensor(lens).to(index), tokens, starts, len(want))
    equal(pc.join_prefix(*given, *([positions] if scattered else [])), want)
    return f"join {lens} {features} {dtype} {size} {scattered}"
