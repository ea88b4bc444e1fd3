"""Calls of the operators that write, rotate, move and join rows, of every count over a tile."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import pc

BF16, F16, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
ROW_CASES: dict[str, Callable[[], None]] = {}
ROWS = (1, 2, 7, 16, 33, 64, 65)


def case(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Add a case."""
    return lambda run: ROW_CASES.setdefault(name, run)


def _slots(tokens: int, slots: int) -> torch.Tensor:
    """Return a slot for each token; every third is a hole."""
    found = torch.randperm(slots)[:tokens]
    found[2::3] = -1
    return found


def _same(found: torch.Tensor, want: torch.Tensor) -> None:
    found, want = (t.contiguous().flatten().view(torch.uint8) for t in (found, want))
    assert torch.equal(found, want)


@case("write")
def _write() -> None:
    for tokens, head_dim, dtype, codes in (
        (1, 64, F16, None), (21, 80, BF16, None), (33, 40, torch.float32, None),
        (21, 64, BF16, INT8), (9, 80, F16, E4M3), *((tokens, 64, F16, None) for tokens in range(2, 23)),
    ):  # fmt: skip
        slots = _slots(tokens, 48)
        key, value = (torch.randn(tokens, 3, head_dim).to(dtype) for _ in range(2))
        caches = [torch.full((6, 8, 3, head_dim), 7.0).to(codes or dtype) for _ in range(2)]
        want, scale = [cache.clone().flatten(0, 1) for cache in caches], torch.tensor([0.03])
        for source, cache in zip((key, value), want, strict=True):
            rows = source[slots >= 0]
            if codes is not None:
                scaled = rows.float() / scale
                rows = (scaled.round() if codes == INT8 else scaled).clamp(
                    *((-128, 127) if codes == INT8 else (-448, 448))
                )
            cache[slots[slots >= 0]] = rows.to(codes or dtype)
        pc.reshape_and_cache(key, value, *caches, slots, *((scale, scale) if codes else ()))
        for cache, expected in zip(caches, want, strict=True):
            off = cache.flatten(0, 1).float() - expected.float()
            # A quotient may be rounded to the other of two neighbours, if torch divides in another precision.
            assert (off.abs() <= (1 if codes == INT8 else 32 if codes else 0)).all()
            assert (off != 0).float().mean() <= (0.01 if codes else 0)


@case("rope")
def _rope() -> None:
    for head_dim, rotary, interleaved in ((64, 64, False), (80, 32, True), (16, 2, False)):
        for tokens in (1, 17, 33):
            query, key = torch.randn(tokens, 4, head_dim), torch.randn(tokens, 2, head_dim)
            value, slots = torch.randn(tokens, 2, head_dim), _slots(tokens, 48)
            angles = torch.arange(50)[:, None] / 10000 ** (torch.arange(rotary // 2) * 2 / rotary)
            positions = torch.randint(0, 50, (tokens,), dtype=torch.int32)
            caches = [torch.full((6, 8, 2, head_dim), 7.0) for _ in range(2)]
            table = torch.cat([angles.cos(), angles.sin()], 1)
            out = pc.rope_and_cache(query, key, value, positions, table, *caches, slots, interleaved)
            assert torch.allclose(out, _turned(query, angles[positions], interleaved), atol=1e-5)
            want = [torch.full((48, 2, head_dim), 7.0) for _ in range(2)]
            want[0][slots[slots >= 0]] = _turned(key, angles[positions], interleaved)[slots >= 0]
            want[1][slots[slots >= 0]] = value[slots >= 0]
            assert torch.allclose(caches[0].flatten(0, 1), want[0], atol=1e-5)
            _same(caches[1], want[1])


def _turned(x: torch.Tensor, angles: torch.Tensor, interleaved: bool) -> torch.Tensor:
    half = angles.shape[1]
    a, b = (
        (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else (x[..., :half], x[..., half : 2 * half])
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    pair = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned, x[..., 2 * half :]], -1)


@case("rotate")
def _rotate() -> None:
    # 2 or 510 of 512 features are rotated in place, with tiles of fewer pairs, or other features, than threads.
    turns = ((64, 64, 3, torch.float32), (80, 32, 2, BF16), (48, 32, 1, E4M3), (512, 2, 2, F16), (512, 510, 2, BF16))
    for head_dim, rotary, heads, dtype in turns:
        for is_neox in (True, False):
            cache = torch.randn(9, 5, heads, head_dim).to(dtype)
            before, inv_freq = cache.clone(), 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
            sources, targets = torch.tensor([6, 4, 2, -1, 3]), torch.tensor([1, 4, -1, 7, 0])
            deltas = torch.tensor([3, -100, 5, 9, 131_000], dtype=torch.int32)
            pc.rotate_keys(cache, sources, targets, deltas, inv_freq, is_neox)
            angles = deltas.double()[:, None] * inv_freq
            for move, (source, target) in enumerate(zip(sources.tolist(), targets.tolist(), strict=True)):
                if target < 0:
                    continue
                turns = angles[move].expand(5, -1)
                want = _turned(before[source].double(), turns, not is_neox) * (source >= 0)
                error = 1 / 15 if dtype == E4M3 else 2 * torch.finfo(dtype).eps
                assert ((cache[target].double() - want).abs() <= error * (want.abs() + (dtype != E4M3)) + 2**-9).all()
            assert torch.equal(cache[[2, 3, 5, 6, 8]].float(), before[[2, 3, 5, 6, 8]].float())


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
            before, old = keys.clone().flatten(0, 1), values.clone().flatten(0, 1)
            inv_freq = 10000.0 ** (-torch.arange(0, rotary, 2) / max(rotary, 1))
            order = torch.randperm(45)
            sources, targets, deltas = order[:20].clone(), order[20:40].clone(), torch.randint(-5000, 131_000, (20,))
            sources[3], targets[5], targets[7] = -1, -1, sources[7]  # zeros, no target, in place
            pc.move_slots(keys, values, sources, targets, deltas, inv_freq if rotary else None, is_neox, first)
            found, moved = keys.flatten(0, 1), values.flatten(0, 1)
            for source, target, delta in zip(sources.tolist(), targets.tolist(), deltas.tolist(), strict=True):
                if target < 0:
                    continue
                want, live = before[source].double(), float(source >= 0)
                part = want[None, :, first : first + rotary]
                want[:, first : first + rotary] = _turned(part, delta * inv_freq.double()[None], not is_neox)[0]
                error = 1 / 15 if dtype == E4M3 else 2 * torch.finfo(dtype).eps if dtype != INT8 else 0
                limit = error * (want.abs() + (dtype != E4M3)) + 2**-9
                assert ((found[target].double() - want * live).abs() <= limit).all()
                assert torch.equal(moved[target].float(), old[source].float() * live)
            rest = torch.tensor([slot for slot in range(45) if slot not in targets.tolist()])
            assert torch.equal(found[rest].float(), before[rest].float())


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@case("gather and scatter")
def _rows() -> None:
    for features in ((3, 5), (64,), (7,), (1030,), (8192,)):
        for count in ROWS:
            cache, slots = _bytes(12, 8, *features), _slots(count, 96)
            flat = cache.flatten(0, 1)
            want = torch.where((slots >= 0).view(-1, *[1] * len(features)), flat[slots.clamp(min=0)], 0)
            _same(pc.gather_slots(cache, slots), want)
            rows, target = _bytes(count, *features), cache.clone()
            pc.scatter_slots(rows, target, slots)
            expected = flat.clone()
            expected[slots[slots >= 0]] = rows[slots >= 0]
            _same(target, expected)
    for ids in (torch.tensor([3]), torch.tensor([5, -1, 0]), torch.arange(11)):
        cache = _bytes(12, 8, 9)
        want = torch.where((ids >= 0).view(-1, 1, 1), cache[ids.clamp(min=0)], 0)
        _same(pc.gather_blocks(cache, ids), want)
        several = [_bytes(12, 8, features) for features in (9, 300, 5)]
        for one, found in zip(several, pc.gather_blocks_list(several, ids), strict=True):
            _same(found, torch.where((ids >= 0).view(-1, 1, 1), one[ids.clamp(min=0)], 0))
        blocks, target = _bytes(len(ids), 8, 9), cache.clone()
        pc.scatter_blocks(blocks, target, ids)
        expected = cache.clone()
        expected[ids[ids >= 0]] = blocks[ids >= 0]
        _same(target, expected)
    for count in (1, 3, 6):
        sources, targets = torch.randperm(6)[:count], 6 + torch.randperm(6)[:count]
        cache = _bytes(12, 8, 9)
        want = cache.clone()
        sources[4:5] = targets[2:3] = -1
        want[targets[targets >= 0]] = torch.where((sources >= 0).view(-1, 1, 1), cache[sources.clamp(min=0)], 0)[
            targets >= 0
        ]
        pc.copy_blocks(cache, sources, targets)
        _same(cache, want)


def _joined(lens: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield the sequence, position and new token's number (-1: from the cache) of every row."""
    first = 0
    for sequence, (length, count) in enumerate(zip(lens, new, strict=True)):
        for position in range(length):
            fresh = position - (length - count)
            yield sequence, position, first + fresh if fresh >= 0 else -1
        first += count


@case("join")
def _join() -> None:
    for features, lens in ((7, tuple(range(40))), (64, tuple(range(40, 0, -1)))):
        new = tuple(min(n, n % 7) for n in lens)
        tables = torch.randperm(40 * 11)[: 40 * 10].view(40, 10).int()
        cache, tokens = _bytes(440, 4, features), _bytes(sum(new) + 2, features)
        starts = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
        rows = list(_joined(lens, new))
        want = torch.zeros(len(rows) + 5, features, dtype=torch.uint8)
        for row, (sequence, position, fresh) in enumerate(rows):
            block = tables[sequence, position // 4]
            want[row] = tokens[fresh] if fresh >= 0 else cache[block, position % 4]
        found = pc.join_prefix(cache, tables, torch.tensor(lens, dtype=torch.int32), tokens, starts, len(rows) + 5)
        _same(found, want)
