// cvt: between integers and floating point, with rounding and saturation.
#include "state.h"

enum Rounding { NONE, NEAREST, TO_ZERO, DOWN, UP };

static f32 toward_zero(f64 x) {
    f32 y = (f32)x;
    return std::fabs((f64)y) > std::fabs(x) ? std::nextafterf(y, 0) : y;
}

// The value as an integer where it is one, else as a real number.
struct Source {
    __int128 integer = 0;
    f64 real = 0;
};

static Source source(const u8* p, int type) {
    switch (type) {
        case U8: return {read_as<u8>(p)};
        case S8: return {read_as<s8>(p)};
        case U16: return {read_as<u16>(p)};
        case S16: return {read_as<s16>(p)};
        case U32: return {read_as<u32>(p)};
        case S32: return {read_as<s32>(p)};
        case U64: return {read_as<u64>(p)};
        case S64: return {read_as<s64>(p)};
        case F16: return {0, read_as<f16>(p)};
        case BF16: return {0, read_as<bf16>(p)};
        case F32: return {0, read_as<f32>(p)};
        case F64: return {0, read_as<f64>(p)};
        default: fail("cvt from type %d", type);
    }
}

static f64 rounded(f64 x, int how) {
    return how == NEAREST ? std::nearbyint(x) : how == DOWN ? std::floor(x) : how == UP ? std::ceil(x) : std::trunc(x);
}

static u64 to_integer(Source from, bool is_integer, int to, int rounding, bool saturate) {
    int size = 8 << to / 2;
    bool sign = to & 1;
    __int128 low = sign ? -((__int128)1 << (size - 1)) : 0, high = ((__int128)1 << (size - sign)) - 1;
    __int128 n = from.integer;
    if (!is_integer) {
        f64 r = rounded(from.real, rounding);
        n = r != r ? 0 : r < -1e30 ? low : r > 1e30 ? high : (__int128)r;
    }
    if (saturate || !is_integer) n = std::min(std::max(n, low), high);
    int unused = 64 - size;
    return sign ? (u64)((s64)((u64)n << unused) >> unused) : (u64)n << unused >> unused;
}

static u64 convert(const u8* p, int from, int to, int rounding, bool saturate) {
    bool is_integer = from <= S64;
    Source value = source(p, from);
    if (to <= S64) return to_integer(value, is_integer, to, rounding, saturate);
    f64 x = is_integer ? (f64)value.integer : value.real;
    if (saturate) x = x != x ? 0 : std::min(std::max(x, 0.0), 1.0);
    if (to == F64) return bits<u64>(x);
    f32 y = rounding == TO_ZERO && !is_integer ? toward_zero(x) : (f32)x;
    if (is_integer) y = from == U64 ? (f32)(u64)value.integer : (f32)(s64)value.integer;
    if (!is_integer && rounding > NEAREST && to == F32 && from == F32) y = (f32)rounded(y, rounding);
    switch (to) {
        case F32: return bits<u32>(y);
        case F16: return rounding == TO_ZERO ? (u16)_cvtss_sh(y, 3) : f16(y).code;
        case BF16: return rounding == TO_ZERO ? bits<u32>(y) >> 16 : bf16(y).code;
        case TF32: return (bits<u32>(y) + 0x1000) & ~0x1fffu;
        default: fail("cvt to type %d", to);
    }
}

// a = to | from << 8 | rounding << 16 | saturate << 24, b = bytes of the target register; o[2] = those of the source
OPERATION(cvt, "cvt") {
    int to = i.a & 255, from = i.a >> 8 & 255, rounding = i.a >> 16 & 255, size = i.b, stride = i.o[2];
    bool saturate = i.a >> 24;
    u8 *d = reg<u8>(w, i.o[0]), *s = reg<u8>(w, i.o[1]);
    if (from == F32 && to == BF16 && rounding == NEAREST) {  // the most frequent one
        each(m, [&](int l) { ((bf16*)d)[l] = bf16(((f32*)s)[l]); });
        return;
    }
    each(m, [&](int l) {
        u64 value = convert(s + l * stride, from, to, rounding, saturate);
        memcpy(d + l * size, &value, size);
    });
}

// Two float32 into one register; a: negative values become 0.
template <class T>
static void pair(Warp& w, const Insn& i, u32 m) {
    x2<T>* d = reg<x2<T>>(w, i.o[0]);
    f32 *high = reg<f32>(w, i.o[1]), *low = reg<f32>(w, i.o[2]);
    auto clipped = [&](f32 x) { return i.a && !(x > 0) ? 0 : x; };
    each(m, [&](int l) { d[l] = x2<T>{T(clipped(low[l])), T(clipped(high[l]))}; });
}
REGISTER("cvt.f16x2.f32", pair<f16>)
REGISTER("cvt.bf16x2.f32", pair<bf16>)

static f32 e4m3(u8 code) {
    int exponent = code >> 3 & 15, fraction = code & 7;
    f32 x = exponent == 15 && fraction == 7 ? NAN
            : exponent                      ? std::ldexp(1 + fraction / 8.0f, exponent - 7)
                                            : std::ldexp(fraction / 8.0f, -6);
    return code & 128 ? -x : x;
}

OPERATION(from_e4m3, "cvt.f16x2.e4m3x2") {
    u16* a = reg<u16>(w, i.o[1]);
    x2<f16>* d = reg<x2<f16>>(w, i.o[0]);
    each(m, [&](int l) { d[l] = x2<f16>{f16(e4m3(a[l] & 255)), f16(e4m3(a[l] >> 8))}; });
}
