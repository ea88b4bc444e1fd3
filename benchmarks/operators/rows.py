"""Operators that move blocks and token rows, against PyTorch's indexing and a copy per block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

import pc

from ..harness.inputs import Call, Draw, Expected, Inputs, shuffled
from ..harness.registry import Benchmark, Case, case, in_torch, ours

BLOCK_SIZE = 16


def rows_inputs(
    op: str, count: int, features: tuple[int, ...], dtype: torch.dtype, device: torch.device, rotate: int
) -> Inputs:
    """Return calls on disjoint shuffled rows of one cache of random bytes."""
    is_block, is_copy = "blocks" in op, op == "copy_blocks"
    block = (BLOCK_SIZE, *features)
    blocks = count if is_block else -(-count // BLOCK_SIZE)
    block_bytes = torch.Size(block).numel() * dtype.itemsize

    def calls(draw: Draw, copies: int) -> Iterable[Call]:
        def drawn(*shape: int) -> torch.Tensor:
            bytes_ = torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8, device=device)
            return bytes_.view(dtype)

        cache = drawn(2 * copies * blocks, *block)
        order = shuffled(2 * copies * (blocks if is_block else blocks * BLOCK_SIZE), device)
        for i in range(copies):
            index, targets = order[2 * i * count : (2 * i + 2) * count].split(count)
            names = {"index": index, "targets": targets} if is_copy else {"index": index}
            if "scatter" in op:
                names["source"] = drawn(count, *(block if is_block else features))
            yield Call(cache=cache, rows=cache if is_block else cache.flatten(0, 1), **names)

    def reference(call: Call) -> Iterable[Expected]:
        source = call.source if "scatter" in op else call.rows[call.index].clone()
        if "gather" in op:
            return [Expected(source, lambda got: got)]
        target = call.targets if is_copy else call.index
        call.rows.view(torch.uint8)[target] = 0
        after = call.cache.clone()
        (after if is_block else after.flatten(0, 1))[target] = source
        return [Expected(after, lambda got: call.cache)]

    moved = count * (2 * (block_bytes if is_block else block_bytes // BLOCK_SIZE) + 8)
    return Inputs(calls, reference, moved, 0, device, rotate, 2 * blocks * block_bytes)


SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "KV 8x128 bf16": ((8, 128), torch.bfloat16),
    "hidden 4096 bf16": ((4096,), torch.bfloat16),
    "KV 2x64 bf16": ((2, 64), torch.bfloat16),
    "KV 8x128 fp32": ((8, 128), torch.float32),
    "hidden 1024 fp32": ((1024,), torch.float32),
}
# (kind of device, what a token holds, blocks, in --quick)
MATRIX = (
    ("cpu", "KV 8x128 fp32", 64, True),
    ("cpu", "hidden 1024 fp32", 256, True),
    ("cpu", "KV 8x128 fp32", 512, False),
    ("cpu", "hidden 4096 bf16", 4, True),
    ("cpu", "hidden 4096 bf16", 64, True),
    ("cpu", "hidden 4096 bf16", 256, True),
    ("cuda", "KV 8x128 bf16", 64, False),
    ("cuda", "KV 8x128 bf16", 1024, True),
    ("cuda", "KV 8x128 bf16", 8192, False),
    ("cuda", "hidden 4096 bf16", 1024, False),
    ("cuda", "KV 2x64 bf16", 8192, False),
)


def _cases(op: str) -> Iterable[Case]:
    unit = "block" if "blocks" in op else "slot"
    for device, kind, blocks, quick in MATRIX:
        count = blocks if unit == "block" else blocks * BLOCK_SIZE
        columns = {"unit": unit, "count": count, "block_size": BLOCK_SIZE, "features": kind}
        yield case(f"{count} {unit}s, {kind}", device, quick, rows_inputs, op, count, *SHAPES[kind], **columns)


def _assign(call: Call) -> None:
    call.rows[call.index] = call.source


def _copy(call: Call) -> None:
    call.rows[call.targets] = call.rows[call.index]


def _gather_each(call: Call) -> torch.Tensor:
    out = torch.empty_like(call.cache[: len(call.index)])
    for i, block in enumerate(call.index.tolist()):
        out[i].copy_(call.cache[block])
    return out


def _scatter_each(call: Call) -> None:
    for i, block in enumerate(call.index.tolist()):
        call.cache[block].copy_(call.source[i])


GATHERS = {
    "indexing": lambda call: call.rows[call.index],
    "index_select": lambda call: call.rows.index_select(0, call.index),
}
SCATTERS = {"indexing": _assign, "index_copy_": lambda call: call.rows.index_copy_(0, call.index, call.source)}
COPIES = {
    "indexing": _copy,
    "index_copy_": lambda call: call.rows.index_copy_(0, call.targets, call.rows.index_select(0, call.index)),
}
# A copy per block is what caches do that keep a tensor per chunk.
ROWS: dict[str, tuple[Callable[[Call], Any], dict[str, Callable[[Call], Any]]]] = {
    "gather_blocks": (lambda c: pc.gather_blocks(c.cache, c.index), GATHERS | {"copy per block": _gather_each}),
    "gather_slots": (lambda c: pc.gather_slots(c.cache, c.index), GATHERS),
    "scatter_blocks": (
        lambda c: pc.scatter_blocks(c.source, c.cache, c.index),
        SCATTERS | {"copy per block": _scatter_each},
    ),
    "scatter_slots": (lambda c: pc.scatter_slots(c.source, c.cache, c.index), SCATTERS),
    "copy_blocks": (lambda c: pc.copy_blocks(c.cache, c.index, c.targets), COPIES),
}


BENCHMARKS = (
    *(
        Benchmark(
            op,
            tuple(_cases(op)),
            (ours(op, own), *(in_torch(f"torch {name}", way) for name, way in ways.items())),
        )
        for op, (own, ways) in ROWS.items()
    ),
)
