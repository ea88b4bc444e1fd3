"""Instructions that kernels spell out for a device, on all that they may be given."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pc.triton_ops._quantize import small_e4m3


@triton.jit
def _convert_kernel(codes_ptr, out_ptr, PACKED: tl.constexpr):
    offs = tl.arange(0, 256)
    tl.store(out_ptr + offs, small_e4m3(tl.load(codes_ptr + offs), PACKED))


def test_every_code_of_e4m3():
    """Two at once as one by one: exact, with NaN, below the smallest normal number and with the sign of 0."""
    codes = torch.arange(256, dtype=torch.uint8)
    exact = codes.view(torch.float8_e4m3fn).float() / 256
    number = ~exact.isnan()
    for packed in (False, True):
        out = torch.empty(256, dtype=torch.float16)
        _convert_kernel[(1,)](codes, out, packed, num_warps=1)
        assert torch.equal(out.isnan(), exact.isnan())
        assert torch.equal(out[number].float(), exact[number])
        assert torch.equal(out[number].signbit(), exact[number].signbit())
