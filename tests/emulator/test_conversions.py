"""Instructions that kernels spell out for a device, on all that they may be given."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from pc.triton_ops.kernels import codes


@triton.jit
def _convert_kernel(codes_ptr, out_ptr, PACKED: tl.constexpr):
    offs = tl.arange(0, 256)
    tl.store(out_ptr + offs, codes.small_e4m3(tl.load(codes_ptr + offs), PACKED))


def test_every_code_of_e4m3():
    """Two at once give the same as single ones: exact, with NaN, subnormal numbers and the sign of 0."""
    codes = torch.arange(256, dtype=torch.uint8)
    exact = codes.view(torch.float8_e4m3fn).float() / 256
    number = ~exact.isnan()
    for packed in (False, True):
        out = torch.empty(256, dtype=torch.float16)
        _convert_kernel[(1,)](codes, out, packed, num_warps=1)
        assert torch.equal(out.isnan(), exact.isnan())
        assert torch.equal(out[number].float(), exact[number])
        assert torch.equal(out[number].signbit(), exact[number].signbit())


@triton.jit
def _packed_kernel(codes_ptr, out_ptr, HELD: tl.constexpr):
    offs = tl.arange(0, 256)
    tl.store(out_ptr + offs, codes.packed_codes(tl.load(codes_ptr + offs), HELD))


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_every_code_at_once(dtype, held):
    """Codes of int8, and of e4m3 if the device converts them, are all exact."""
    if dtype == torch.float8_e4m3fn and triton.runtime.driver.active.get_current_target().arch < 89:
        pytest.skip("has no instruction for e4m3")
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    out = torch.empty(256, dtype=torch.float16)
    _packed_kernel[(1,)](codes, out, held, num_warps=1)
    exact = codes.float()
    number = ~exact.isnan()
    assert torch.equal(out.isnan(), exact.isnan())
    assert torch.equal(out[number].float(), exact[number])
    assert torch.equal(out[number].signbit(), exact[number].signbit())
