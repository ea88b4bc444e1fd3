"""Codes of quantized caches in kernels, bit for bit those of `_core/quantize.py`.

Kernels see float8 as uint8 and convert it with bit operations, because sm_80 has no instruction for it, and triton's
interpreter lacks the type. On newer devices the attention kernel uses the device's conversion.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_code(x, scale, KIND: tl.constexpr):
    """Return float32 x / scale as int8 (KIND 1) or as the uint8 code of float8 e4m3 (KIND 2), like `quantize`."""
    x = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    if KIND == 1:
        x = tl.where(x != x, 0.0, x)
        # Adding 1.5 * 2**23 rounds to an integer, ties to even.
        x = tl.minimum(tl.maximum(x, -128.0), 127.0)
        code = ((x + 12582912.0) - 12582912.0).to(tl.int8)
    else:
        bits = tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.uint32, bitcast=True)
        sign = (bits >> 24) & 0x80
        magnitude = bits & 0x7FFFFFFF
        # From 2**-6 on, round 20 mantissa bits away, then change the exponent's bias from 127 to 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        # Below, round to multiples of 2**-9 by adding 2**14, whose unit in the last place is 2**-9.
        subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        rounded = sign | tl.where(magnitude < 0x3C800000, subnormal, normal)
        code = tl.where(x != x, 0x7F, rounded).to(tl.uint8)
    return code


@triton.jit
def from_e4m3(code):
    """Return the float16 value of the uint8 code of a float8 e4m3."""
    return (small_e4m3(code, False) * 256.0).to(tl.float16)


@triton.jit
def small_e4m3(code, PACKED: tl.constexpr):
    """Return a 256th of the value of a float8 e4m3 code, exactly: its bits shifted to the places of float16.

    The exponent's bias in float16 is 8 higher, which gives the factor. PACKED: convert two codes at once in a register
    on NVIDIA devices, with three instructions for a code instead of eight.
    """
    if PACKED:
        # Move bytes into the upper halves of half words and shift them right by one behind the sign. After the sign is
        # cleared, adding 1 to a byte of 0x7F sets bit 7. prmt repeats that bit over a byte: NaN.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 nan, place, ones;
            and.b32 nan, $2, 0x7F7F7F7F;
            add.u32 nan, nan, 0x01010101;
            prmt.b32 place, $2, 0, 0x1404;
            prmt.b32 ones, nan, 0, 0x9484;
            shr.u32 $0, place, 1;
            lop3.b32 $0, $0, 0x3F803F80, ones, 0xEA;
            lop3.b32 $0, place, 0x80008000, $0, 0xEA;
            prmt.b32 place, $2, 0, 0x3424;
            prmt.b32 ones, nan, 0, 0xB4A4;
            shr.u32 $1, place, 1;
            lop3.b32 $1, $1, 0x3F803F80, ones, 0xEA;
            lop3.b32 $1, place, 0x80008000, $1, 0xEA;
            }""",
            "=&r,=&r,r", [code], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    bits = code.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float16, bitcast=True)).to(tl.float16)


@triton.jit
def packed_codes(code, HELD: tl.constexpr):
    """Return the float16 values of float8 e4m3 or int8 codes, exactly, two at once in a register on NVIDIA devices.

    HELD: convert in the threads that loaded the codes. Otherwise the compiler may convert in the registers that a
    matrix unit reads, and fill these from shared memory byte by byte.
    """
    if code.dtype == tl.int8:
        # From 1024 on, a float16's unit in the last place is 1, so its last bits can hold the code plus 128.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 more, low, high, least;
            xor.b32 more, $2, 0x80808080;
            mov.b32 least, 0x64806480;
            prmt.b32 low, more, 0x64, 0x4140;
            prmt.b32 high, more, 0x64, 0x4342;
            sub.f16x2 $0, low, least;
            sub.f16x2 $1, high, least;
            }""",
            "=&r,=&r,r", [code], dtype=tl.float16, is_pure=not HELD, pack=4,
        )  # fmt: skip
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low;
        cvt.rn.f16x2.e4m3x2 $1, high;
        }""",
        "=&r,=&r,r", [code.to(tl.uint8, bitcast=True)], dtype=tl.float16, is_pure=not HELD, pack=4,
    )  # fmt: skip
