"""Codes of quantized caches: stored = x / scale in float8 e4m3 or int8, read = stored * scale.

Kernels see float8 as uint8 and convert by bit operations, since sm_80 has no instruction for it and the interpreter of
triton no type; on newer devices the attention kernel has the device convert it.
"""

from __future__ import annotations

import torch

from ._checks import bad_argument
from ._triton import tl, triton

CODES = (torch.float8_e4m3fn, torch.int8)
"""Types of quantized caches."""
PLAIN, INT8, E4M3 = 0, 1, 2


def code_kind(dtype: torch.dtype) -> int:
    """The constexpr that tells a kernel how a cache of `dtype` is stored."""
    return {torch.int8: INT8, torch.float8_e4m3fn: E4M3}.get(dtype, PLAIN)


def as_codes(cache: torch.Tensor) -> torch.Tensor:
    """The cache as a kernel takes it: float8 as uint8, without a copy."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def scale_kind(k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> int:
    """The constexpr that tells a kernel how scales come: 0 for none, 1 for one element each, 2 for one per KV head."""
    if k_scale is None or v_scale is None:
        return 0
    return 2 if max(k_scale.numel(), v_scale.numel()) > 1 else 1


def equal_scales(
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, num_kv_heads: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Both scales equally long."""
    if k_scale is not None and v_scale is not None and k_scale.numel() != v_scale.numel():
        k_scale, v_scale = (scale.expand(num_kv_heads).contiguous() for scale in (k_scale, v_scale))
    return k_scale, v_scale


def refuse_nan(name: str, values: torch.Tensor) -> None:
    """Raises ValueError for NaN on its way into int8, which has no code for it; reads values."""
    if values.isnan().any():
        raise bad_argument(name, "NaN", "numbers, since int8 has no NaN: it would be stored as 0")


def quantize(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values `[num_tokens, num_kv_heads, head_dim]` / scale, one or one per KV head, in the nearest code of `dtype`.

    Saturating, ties to even; NaN is 0x7F in e4m3 and 0 in int8.
    """
    scaled = values.float() / scale.float().view(-1, 1)
    # Spelled out: PyTorch keeps the sign of a NaN in e4m3, and what it gives in int8 is the processor's choice.
    if dtype == torch.int8:
        return scaled.round_().clamp_(-128, 127).nan_to_num_(nan=0.0).to(dtype)
    return scaled.clamp_(-448.0, 448.0).masked_fill_(scaled.isnan(), torch.nan).to(dtype)


@triton.jit
def to_code(x, scale, KIND: tl.constexpr):
    """float32 x / scale as int8 (KIND 1) or as the uint8 code of float8 e4m3 (KIND 2), as `quantize` gives it."""
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
        # From 2**-6 on: round 20 mantissa bits away, then move the exponent's bias from 127 to 7.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
        # Below: multiples of 2**-9, rounded by adding 2**14, whose unit in the last place is that.
        subnormal = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
        rounded = sign | tl.where(magnitude < 0x3C800000, subnormal, normal)
        code = tl.where(x != x, 0x7F, rounded).to(tl.uint8)
    return code


@triton.jit
def from_e4m3(code):
    """float16 value of the uint8 code of a float8 e4m3."""
    return (small_e4m3(code, False) * 256.0).to(tl.float16)


@triton.jit
def small_e4m3(code, PACKED: tl.constexpr):
    """A 256th of it, exactly: its bits in their places, whose exponent float16 counts from 8 lower.

    PACKED: two codes at once in registers of Nvidia's, three instructions for a code where one by one they take eight.
    """
    if PACKED:
        # Bytes into the upper halves of half words, moved right by one behind the sign. A byte of 0x7F without its sign
        # carries into bit 7 when 1 is added, and prmt makes a byte of ones of that: NaN.
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
    """float16 values of codes in float8 e4m3 or int8, two at once in registers of Nvidia's, exactly.

    HELD: by the threads that loaded them. Else the compiler may convert in the registers that a matrix unit reads, and
    fill these from shared memory byte by byte.
    """
    if code.dtype == tl.int8:
        # A code and 128 more are the last bits of a float16 from 1024 on, whose unit in the last place is 1.
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
