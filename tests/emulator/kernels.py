"""Small kernels that test the emulator, each with a few instructions of a kind."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out + offsets, tl.load(x + offsets, mask=mask) + tl.load(y + offsets, mask=mask), mask=mask)


@triton.jit
def reduce_both(x, sums, maxima, M: tl.constexpr, N: tl.constexpr):
    values = tl.load(x + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(sums + tl.arange(0, M), tl.sum(values, 1))
    tl.store(maxima + tl.arange(0, N), tl.max(values, 0))


@triton.jit
def scan(x, out, N: tl.constexpr):
    offsets = tl.arange(0, N)
    tl.store(out + offsets, tl.cumsum(tl.load(x + offsets), 0))


@triton.jit
def histogram(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.atomic_add(out + tl.load(x + offsets, mask=mask, other=0), 1, mask=mask)


@triton.jit
def collatz(x, out):
    """A loop whose end depends on data."""
    value, steps = tl.load(x + tl.program_id(0)), 0
    while value > 1:
        value = tl.where(value % 2 == 0, value // 2, 3 * value + 1)
        steps += 1
    tl.store(out + tl.program_id(0), steps)


@triton.jit
def convert(x, half, brain, small, back, N: tl.constexpr):
    offsets = tl.arange(0, N)
    values = tl.load(x + offsets)
    tl.store(half + offsets, values.to(tl.float16))
    tl.store(brain + offsets, values.to(tl.bfloat16))
    tl.store(small + offsets, values.to(tl.int8))
    tl.store(back + offsets, values.to(tl.float16).to(tl.float32) * 1.5 + values.to(tl.bfloat16).to(tl.float32))


@triton.jit
def product(
    a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
    TYPE: tl.constexpr,
):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, BLOCK_K)
    acc = tl.zeros([M, N], TYPE)
    for start in range(0, K, BLOCK_K):
        x = tl.load(a + m[:, None] * K + start + k[None, :])
        y = tl.load(b + (start + k[:, None]) * N + n[None, :])
        acc = tl.dot(x, y, acc, input_precision=PRECISION, out_dtype=TYPE)
    tl.store(c + m[:, None] * N + n[None, :], acc)


@triton.jit
def two_products(q, k, v, out, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, LENGTH: tl.constexpr):
    """Products with both orders of an operand in memory, and one from registers."""
    m, n, d = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    x = tl.load(q + m[:, None] * D + d[None, :])
    acc = tl.zeros([M, D], tl.float32)
    for start in range(0, LENGTH, N):
        y = tl.load(k + (start + n[:, None]) * D + d[None, :])
        z = tl.load(v + (start + n[:, None]) * D + d[None, :])
        scores = tl.dot(x, tl.trans(y)) * 0.1
        acc = tl.dot(scores.to(z.dtype), z, acc)
    tl.store(out + m[:, None] * D + d[None, :], acc)


@triton.jit
def described_product(
    a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr
):
    """A product with operands by TMA, whose first operand is 0 in rows past ROWS."""
    first = tl.make_tensor_descriptor(a, shape=[ROWS, K], strides=[K, 1], block_shape=[M, BLOCK_K])
    second = tl.make_tensor_descriptor(b, shape=[N, K], strides=[K, 1], block_shape=[N, BLOCK_K])
    acc = tl.zeros([M, N], tl.float32)
    for start in range(0, K, BLOCK_K):
        acc = tl.dot(first.load([0, start]), second.load([0, start]).T, acc)
    tl.store(c + tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :], acc)


@triton.jit
def clash(x, y, STEP: tl.constexpr):
    """A race. STEP 0: all programs write one place. 1: each reads what the next one writes."""
    number = tl.program_id(0)
    tl.store(x + number * STEP, number)
    if STEP:
        tl.store(y + number, tl.load(x + (number + 1) % 4))


@triton.jit
def weighted_sum(x, weights, out, M: tl.constexpr, N: tl.constexpr, FUSED: tl.constexpr):
    """FUSED: the compiler may fuse a product with the first addition of its lane, so that lanes round differently."""
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    values, factors = tl.load(x + rows[:, None] * N + columns[None, :]), tl.load(weights + rows)[:, None]
    products = values * factors if FUSED else tl.fma(values, factors, 0.0)
    tl.store(out + columns, tl.sum(products, 0))


@triton.jit
def one_place(x, out, N: tl.constexpr):
    """A fault: all lanes of all warps write one place."""
    offsets = tl.arange(0, N)
    tl.store(out + offsets * 0, tl.load(x + offsets))
