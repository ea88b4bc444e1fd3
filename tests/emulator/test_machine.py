"""The emulator's own kernels, so that a failure elsewhere is a fault of the package, not of the emulator."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl

from emulator import kernels
from emulator.device import ARCH
from emulator.launch import Session

NAN = float("nan")


@pytest.mark.parametrize("n", [1, 255, 256, 1000])
def test_elementwise_with_a_mask(n):
    x, y, out = torch.randn(n), torch.randn(n), torch.full((n,), NAN)
    kernels.add[(triton.cdiv(n, 256),)](x, y, out, n, 256)
    assert torch.equal(out, x + y)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float16, 5e-2), (torch.bfloat16, 0.4)])
def test_reductions_within_and_across_warps(dtype, bound):
    x = torch.randn(64, 128, dtype=dtype)
    sums, maxima = torch.empty(64), torch.empty(128, dtype=dtype)
    kernels.reduce_both[(1,)](x, sums, maxima, 64, 128)
    assert torch.allclose(sums, x.float().sum(1), atol=bound, rtol=1e-3)
    assert torch.equal(maxima, x.max(0)[0])


def test_scan_atomics_and_loops():
    x = torch.randint(-9, 9, (512,), dtype=torch.int32)
    out = torch.empty_like(x)
    kernels.scan[(1,)](x, out, 512)
    assert torch.equal(out, x.cumsum(0).int())
    x, out = torch.randint(0, 10, (1000,), dtype=torch.int32), torch.zeros(10, dtype=torch.int32)
    kernels.histogram[(8,)](x, out, 1000, 128)
    assert torch.equal(out, torch.bincount(x, minlength=10).int())
    x, out = torch.tensor([1, 2, 3, 27], dtype=torch.int32), torch.empty(4, dtype=torch.int32)
    kernels.collatz[(4,)](x, out)
    assert out.tolist() == [0, 1, 7, 111]


def test_conversions():
    x = torch.cat([torch.randn(120) * 50, torch.tensor([0.0, -0.0, 1e-7, 65504.0, 100.0, -100.0, 0.5, 1.5])])
    half, brain = torch.empty(128, dtype=torch.float16), torch.empty(128, dtype=torch.bfloat16)
    small, back = torch.empty(128, dtype=torch.int8), torch.empty(128)
    kernels.convert[(1,)](x, half, brain, small, back, 128)
    assert torch.equal(half, x.half())
    assert torch.equal(brain, x.bfloat16())
    fits = x.abs() < 127
    assert torch.equal(small[fits], x[fits].to(torch.int32).to(torch.int8))
    assert torch.equal(back, x.half().float() * 1.5 + x.bfloat16().float())


SHAPES = [(16, 16, 16, 16, 1, 1), (64, 64, 64, 64, 4, 2), (128, 64, 128, 64, 8, 3), (64, 16, 64, 32, 4, 3)]
SHAPES += [(64, 256, 128, 64, 4, 2), (16, 64, 128, 32, 4, 3), (128, 128, 128, 32, 4, 4), (32, 128, 128, 64, 2, 2)]
TYPES = [(torch.float16, "ieee"), (torch.bfloat16, "ieee"), (torch.float32, "ieee"), (torch.float32, "tf32")]


@pytest.mark.parametrize(("m", "n", "k", "block", "warps", "stages"), SHAPES)
@pytest.mark.parametrize(("dtype", "precision"), TYPES)
def test_matrix_products(m, n, k, block, warps, stages, dtype, precision):
    a, b, c = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype), torch.full((m, n), NAN)
    kernels.product[(1,)](a, b, c, m, n, k, block, precision, tl.float32, num_warps=warps, num_stages=stages)
    error = (c.double() - a.double() @ b.double()).abs().max()
    assert error <= (0.15 if precision == "tf32" else 1e-4)


@pytest.mark.skipif(ARCH == "sm_90", reason="there Triton gives int8 to wgmma, which no kernel of ours does")
def test_integer_products():
    a, b = (torch.randint(-99, 99, shape, dtype=torch.int8) for shape in ((64, 128), (128, 32)))
    c = torch.full((64, 32), -1, dtype=torch.int32)
    kernels.product[(1,)](a, b, c, 64, 32, 128, 32, "ieee", tl.int32)
    assert torch.equal(c, (a.long() @ b.long()).int())


@pytest.mark.parametrize(("m", "n", "d", "warps"), [(64, 64, 128, 4), (128, 64, 64, 8), (64, 32, 256, 8)])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 0.06), (torch.bfloat16, 0.5)])
def test_two_products(m, n, d, warps, dtype, bound):
    q, k, v = torch.randn(m, d).to(dtype), torch.randn(256, d).to(dtype), torch.randn(256, d).to(dtype)
    out = torch.full((m, d), NAN)
    kernels.two_products[(1,)](q, k, v, out, m, n, d, 256, num_warps=warps, num_stages=2)
    want = ((q.float() @ k.float().T) * 0.1).to(dtype).double() @ v.double()
    assert (out.double() - want).abs().max() < bound


@pytest.mark.skipif(ARCH != "sm_90", reason="TMA")
@pytest.mark.parametrize(
    ("m", "n", "k", "block", "rows"), [(64, 64, 256, 64, 64), (128, 128, 256, 64, 100), (64, 64, 128, 32, 64)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_descriptors(m, n, k, block, rows, dtype):
    triton.set_allocator(lambda size, align, stream: torch.empty(size, dtype=torch.int8))
    a, b, c = torch.randn(rows, k).to(dtype), torch.randn(n, k).to(dtype), torch.full((m, n), NAN)
    kernels.described_product[(1,)](a, b, c, m, n, k, block, rows, num_stages=2)
    want = torch.zeros(m, n, dtype=torch.float64)
    want[:rows] = a.double() @ b.double().T
    assert (c.double() - want).abs().max() < 1e-4


def test_work_is_counted():
    x, y, out = (torch.zeros(1024) for _ in range(3))
    kernels.add[(4,)](x, y, out, 1024, 256)
    launch = Session.launches[-1]
    assert (launch.grid, launch.loaded, launch.stored) == ((4, 1, 1), 8192, 4096)
    before = launch.program.counts()[0]
    kernels.add[(4,)](x, y, out, 1024, 256)
    again = launch.program.counts()[0] - before
    assert again.sum() == Session.launches[-1].instructions == launch.instructions
    loads = [k for k, i in enumerate(launch.program.code) if ".global" in i.statement.text]
    assert all(again[k] == 16 for k in loads)  # four programs of four warps


def test_other_orders_of_warps_and_programs_give_the_same():
    x = torch.randn(128, 64)
    found = []
    for _ in itertools.repeat(None, 5):  # each launch takes another seed
        sums, maxima = torch.empty(128), torch.empty(64)
        kernels.reduce_both[(1,)](x, sums, maxima, 128, 64)
        found.append(sums)
    assert all(torch.equal(sums, found[0]) for sums in found)
