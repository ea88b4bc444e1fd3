"""Every operator in a few calls, dense where masks end: sequences of every length over two tiles, rows of every count.

A comparison in a compiled kernel is one instruction for each element that a lane holds, so a boundary is only tried
where a length ends at that very element. `make emulate` runs these, and the mutation run (mutate.py) breaks kernels
under them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import torch
from attention_cases import Case, build, check

import pc
from pc.triton_ops._attention.launch import forget_prepared

BF16, F16, E4M3, INT8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8
CASES: dict[str, Callable[[], None]] = {}
EVERY = tuple(range(1, 131))
ROWS = (1, 2, 7, 16, 33, 64, 65)
# Many short sequences of 9 queries and more (prefill), each ending elsewhere in a tile.
RAGGED = tuple((length, min(length, 9 + length % 57)) for length in range(9, 137, 2))


def case(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Adds a case."""
    return lambda run: CASES.setdefault(name, run)


def _attention(call: Case) -> None:
    batch = build(call)
    given = dict(batch.options)
    if call.window:
        out, lse = pc.sliding_window_attention_with_lse(
            *batch.tensors, batch.scale, call.window, call.num_sink_tokens, **given
        )
    else:
        out, lse = pc.paged_attention_with_lse(*batch.tensors, batch.scale, **given)
    check(batch, out, lse)


def _gap(call: Case) -> None:
    batch = build(call)
    out, lse = pc.sparse_gap_attention_with_lse(
        *batch.tensors, batch.positions, batch.scale, call.window, call.num_sink_tokens, **batch.options
    )
    check(batch, out, lse)


def _shared(call: Case, shared: int) -> None:
    batch = build(call)
    batch.block_tables[:, :shared] = batch.block_tables[:1, :shared]
    out, lse = pc.shared_prefix_attention_with_lse(*batch.tensors, shared, batch.scale, **batch.options)
    check(batch, out, lse)


def _ragged(every: int = 1, **given: object) -> Case:
    lens, queries = zip(*RAGGED[::every], strict=True)
    return Case(lens, queries, **given)


DECODE = Case(EVERY, (1,) * len(EVERY), heads=(4, 2), dtype=F16)
SPARSE = Case(EVERY[::5], (1,) * len(EVERY[::5]), heads=(4, 2), dtype=F16)
ATTENTION = {
    "decode": DECODE,
    "decode bf16, block 64": dataclasses.replace(SPARSE, dtype=BF16, block_size=64, head_dim=128),
    "decode head_dim 80, rows of 7 heads": dataclasses.replace(SPARSE, heads=(7, 1), head_dim=80, block_size=32),
    "decode of 5 queries": Case((5, 6, 40, 69, 130), (5, 3, 5, 1, 2), dtype=F16),
    "decode window": dataclasses.replace(DECODE, window=6, num_sink_tokens=3),
    "decode more sink tokens": dataclasses.replace(SPARSE, window=4, num_sink_tokens=37),
    "decode softcap, slopes, sinks": dataclasses.replace(SPARSE, softcap=4.0, alibi=True, sinks=True),
    "decode e4m3": dataclasses.replace(SPARSE, cache_dtype=E4M3, per_head_scales=True),
    "decode int8": dataclasses.replace(SPARSE, cache_dtype=INT8, dtype=BF16),
    "split decode": Case((1500, 3, 0, 700), (1, 1, 0, 2), heads=(2, 1), dtype=BF16, padding=2, sinks=True, bounds=True),
    "batch-invariant decode": dataclasses.replace(SPARSE, batch_invariant=True),
    "prefill": _ragged(dtype=F16),
    "prefill bf16, head_dim 128": _ragged(6, dtype=BF16, head_dim=128, heads=(2, 1)),
    "prefill float32": _ragged(8, heads=(2, 1)),
    "prefill not causal, window": _ragged(2, dtype=F16, causal=False, window=5, num_sink_tokens=2),
    "prefill window, sinks": _ragged(2, dtype=F16, window=6, num_sink_tokens=3, sinks=True),
    "prefill softcap, slopes": _ragged(6, dtype=F16, softcap=4.0, alibi=True),
    "prefill e4m3": _ragged(8, dtype=BF16, cache_dtype=E4M3),
    "prefill and decode, empty sequences": Case((0, 70, 1, 33, 0, 129), (0, 70, 1, 12, 0, 1), dtype=BF16, padding=3),
}
for name, given in ATTENTION.items():
    CASES[f"attention: {name}"] = functools.partial(_attention, given)
GAP = {
    "holes": dataclasses.replace(SPARSE, holes=0.5),
    "holes, scattered queries": Case((40, 77, 130), (12, 20, 33), dtype=F16, holes=0.4, scattered=True),
    "holes, window": _ragged(8, dtype=F16, holes=0.4, window=9, num_sink_tokens=4),
    "table per head": dataclasses.replace(SPARSE, holes=0.5, head_tables=True),
    "table per head, prefill": Case((130, 70, 33), (1, 70, 12), heads=(6, 3), dtype=BF16, holes=0.4, head_tables=True),
    "table per head, splits": Case(
        (900, 3, 0), (1, 1, 0), heads=(6, 3), dtype=BF16, holes=0.4, head_tables=True, padding=2, bounds=True
    ),
    "tree": Case((70, 33, 200), (40, 5, 33), dtype=BF16, tree=True, scattered=True, alibi=True, holes=0.2),
    "tree, few queries, window": Case(EVERY[6::9], (5,) * 14, dtype=F16, tree=True, scattered=True, window=6),
    "lists": Case((130, 33, 200), (40, 5, 1), dtype=BF16, top_k=5, holes=0.2, heads=(8, 2)),
    "lists, window, block 5": Case(EVERY[6::9], (5,) * 14, dtype=F16, top_k=9, block_size=5, window=20, scattered=True),
    "all holes": Case((100, 64), (1, 20), dtype=BF16, holes=1.0, sinks=True),
}
for name, given in GAP.items():
    CASES[f"gap: {name}"] = functools.partial(_gap, given)
CASES["shared prefix"] = functools.partial(_shared, Case((200, 150, 131, 129), (1, 9, 1, 1), dtype=BF16), 8)


@case("merge")
def _merge() -> None:
    for tokens, heads, dim in ((9, 5, 80), (1, 3, 16), (33, 4, 64)):
        parts = [(torch.randn(tokens, heads, dim).to(BF16), torch.randn(tokens, heads) * 5) for _ in range(2)]
        for number, (out, lse) in enumerate(parts):
            lse[number::3], out[number::3] = -math.inf, math.nan
        out, lse = pc.merge_attention(*parts[0], *parts[1])
        want = torch.logaddexp(parts[0][1].double(), parts[1][1].double())
        shift = want.masked_fill(want == -math.inf, 0.0)
        exact = sum(o.double().nan_to_num() * (s.double() - shift).exp()[..., None] for o, s in parts)
        assert torch.equal(lse == -math.inf, want == -math.inf)
        assert torch.allclose(lse.double(), want, atol=1e-5)
        assert (out.double() - exact).abs().max() <= 4 * torch.finfo(BF16).eps * max(1.0, exact.abs().max())


def _slots(tokens: int, slots: int) -> torch.Tensor:
    """A slot for each token; every third is a hole."""
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
            # A quotient may be rounded to the other of two neighbours where torch divides in another precision.
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
    for head_dim, rotary, heads, dtype in ((64, 64, 3, torch.float32), (80, 32, 2, BF16), (48, 32, 1, E4M3)):
        for is_neox in (True, False):
            cache = torch.randn(9, 5, heads, head_dim).to(dtype)
            before, inv_freq = cache.clone(), 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
            sources, targets = torch.tensor([0, 4, 2, -1, 3]), torch.tensor([1, 4, -1, 7, 8])
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
            assert torch.equal(cache[[0, 2, 3, 5, 6]].float(), before[[0, 2, 3, 5, 6]].float())


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
        blocks, target = _bytes(len(ids), 8, 9), cache.clone()
        pc.scatter_blocks(blocks, target, ids)
        expected = cache.clone()
        expected[ids[ids >= 0]] = blocks[ids >= 0]
        _same(target, expected)
    for count in (1, 3, 6):
        sources, targets = torch.randperm(6)[:count], 6 + torch.randperm(6)[:count]
        cache = _bytes(12, 8, 9)
        want = cache.clone()
        want[targets] = cache[sources]
        pc.copy_blocks(cache, sources, targets)
        _same(cache, want)


@case("quantized rows")
def _quantized() -> None:
    for features in (1, 7, 300, 2049):
        for codes, steps in ((INT8, 254), (E4M3, 16)):
            source, slots = torch.randn(21, features), _slots(21, 32)
            cache, scales = torch.zeros(4, 8, features).to(codes), torch.zeros(4, 8)
            pc.scatter_slots_quantized(source, cache, scales, slots)
            read = pc.gather_slots_dequantized(cache, scales, slots, torch.float32)
            live = slots >= 0
            peak = source.abs().amax(1, keepdim=True)
            bound = peak / steps if codes == INT8 else torch.maximum(source.abs() / steps, peak / 448 / 512)
            assert ((read - source)[live].abs() <= bound[live] * 1.0001).all()
            assert not read[~live].any()
            untouched = torch.ones(32, dtype=torch.bool)
            untouched[slots[live]] = False
            assert not scales.flatten()[untouched].any()


def _joined(lens: tuple[int, ...], new: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Sequence, position and number of the new token (-1: from the cache) of every row."""
    first = 0
    for sequence, (length, count) in enumerate(zip(lens, new, strict=True)):
        for position in range(length):
            fresh = position - (length - count)
            yield sequence, position, first + fresh if fresh >= 0 else -1
        first += count


@case("join")
def _join() -> None:
    for features in (7, 64):
        lens, new = tuple(range(0, 40)), tuple(min(n, n % 7) for n in range(0, 40))
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


# What compiles in a minute and still has every kernel: CI's set. The rest are options of the attention kernel.
SLOW = ("decode head_dim 80, rows of 7 heads", "decode softcap, slopes, sinks", "decode int8", "batch-invariant decode")
SLOW += ("prefill float32", "prefill not causal, window", "prefill softcap, slopes", "prefill e4m3")
SLOW += ("decode bf16, block 64", "prefill bf16, head_dim 128")
QUICK = [name for name in CASES if name.removeprefix("attention: ") not in SLOW]


def run(name: str) -> None:
    """Raises AssertionError where a result is wrong, EmulationError where a kernel did what it must not."""
    torch.manual_seed(0)
    forget_prepared()
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        CASES[name]()
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(False)
