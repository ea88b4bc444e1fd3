// Arithmetic, bits and comparisons, lane by lane.
#include "state.h"

template <class T, class F>
static void unary(Warp& w, const Insn& i, u32 m, F f) {
    T *d = reg<T>(w, i.o[0]), *a = reg<T>(w, i.o[1]);
    each(m, [&](int l) { d[l] = f(a[l]); });
}

template <class T, class F>
static void binary(Warp& w, const Insn& i, u32 m, F f) {
    T *d = reg<T>(w, i.o[0]), *a = reg<T>(w, i.o[1]), *b = reg<T>(w, i.o[2]);
    each(m, [&](int l) { d[l] = f(a[l], b[l]); });
}

template <class T, class F>
static void ternary(Warp& w, const Insn& i, u32 m, F f) {
    T *d = reg<T>(w, i.o[0]), *a = reg<T>(w, i.o[1]), *b = reg<T>(w, i.o[2]), *c = reg<T>(w, i.o[3]);
    each(m, [&](int l) { d[l] = f(a[l], b[l], c[l]); });
}

#define LAMBDA [](Warp & w, const Insn& i, u32 m)
#define OP1(name, T, ...) REGISTER(name, LAMBDA { unary<T>(w, i, m, [](T a) -> T { return __VA_ARGS__; }); })
#define OP2(name, T, ...) REGISTER(name, LAMBDA { binary<T>(w, i, m, [](T a, T b) -> T { return __VA_ARGS__; }); })
#define OP3(name, T, ...) \
    REGISTER(name, LAMBDA { ternary<T>(w, i, m, [](T a, T b, T c) -> T { return __VA_ARGS__; }); })

// ---- integers
template <class T>
static T shift_left(T a, u32 n) {
    return n >= sizeof(T) * 8 ? 0 : (T)((u64)a << n);
}

template <class T>
static T shift_right(T a, u32 n) {
    const u32 size = sizeof(T) * 8;
    if (n >= size && std::is_unsigned_v<T>) return 0;
    return a >> std::min(n, size - 1);
}

template <class T, T (*SHIFT)(T, u32)>
static void shift(Warp& w, const Insn& i, u32 m) {
    T *d = reg<T>(w, i.o[0]), *a = reg<T>(w, i.o[1]);
    u32* n = reg<u32>(w, i.o[2]);
    each(m, [&](int l) { d[l] = SHIFT(a[l], n[l]); });
}

template <class T, class Wide>
static T high(T a, T b) {
    return (T)((Wide)((Wide)a * (Wide)b) >> (sizeof(T) * 8));
}

template <class T, class Wide, bool ADD>
static void multiply_wide(Warp& w, const Insn& i, u32 m) {
    Wide *d = reg<Wide>(w, i.o[0]), *c = reg<Wide>(w, i.o[ADD ? 3 : 0]);
    T *a = reg<T>(w, i.o[1]), *b = reg<T>(w, i.o[2]);
    each(m, [&](int l) { d[l] = (Wide)((u64)((Wide)a[l] * (Wide)b[l]) + (ADD ? (u64)c[l] : 0)); });
}

template <class T>
static bool overflows(T a, T b) {
    return std::is_signed_v<T> && b == (T)-1 && a == std::numeric_limits<T>::min();
}

template <class T>
static T divide(T a, T b) {
    return b == 0 ? (T)-1 : overflows(a, b) ? a : a / b;
}

template <class T>
static T remainder_of(T a, T b) {
    return b == 0 ? a : overflows(a, b) ? (T)0 : a % b;
}

#define INTEGER(S, T, WIDE)                               \
    OP2("add." S, T, (T)((u64)a + (u64)b))                \
    OP2("sub." S, T, (T)((u64)a - (u64)b))                \
    OP2("mul.lo." S, T, (T)((u64)a * (u64)b))             \
    OP3("mad.lo." S, T, (T)((u64)a * (u64)b + (u64)c))    \
    OP2("mul.hi." S, T, high<T, WIDE>(a, b))              \
    OP3("mad.hi." S, T, (T)(high<T, WIDE>(a, b) + c))     \
    OP2("div." S, T, divide<T>(a, b))                     \
    OP2("rem." S, T, remainder_of<T>(a, b))               \
    OP2("min." S, T, std::min(a, b))                      \
    OP2("max." S, T, std::max(a, b))                      \
    OP1("neg." S, T, (T)(0 - (u64)a))                     \
    OP1("abs." S, T, a < 0 ? (T)(0 - (u64)a) : a)         \
    REGISTER("shr." S, shift<T, shift_right<T>>)
INTEGER("s16", s16, s32)
INTEGER("u16", u16, u32)
INTEGER("s32", s32, s64)
INTEGER("u32", u32, u64)
INTEGER("s64", s64, __int128)
INTEGER("u64", u64, unsigned __int128)
OP2("min.relu.s32", s32, std::max(std::min(a, b), 0))
OP2("max.relu.s32", s32, std::max(std::max(a, b), 0))

#define MULTIPLY_WIDE(S, T, WIDE)                              \
    REGISTER("mul.wide." S, multiply_wide<T, WIDE, false>)     \
    REGISTER("mad.wide." S, multiply_wide<T, WIDE, true>)
MULTIPLY_WIDE("s16", s16, s32)
MULTIPLY_WIDE("u16", u16, u32)
MULTIPLY_WIDE("s32", s32, s64)
MULTIPLY_WIDE("u32", u32, u64)

// ---- bits
template <class T>
static void select(Warp& w, const Insn& i, u32 m) {
    T *d = reg<T>(w, i.o[0]), *a = reg<T>(w, i.o[1]), *b = reg<T>(w, i.o[2]);
    u8* p = reg<u8>(w, i.o[3]);
    each(m, [&](int l) { d[l] = p[l] ? a[l] : b[l]; });
}

#define BITS(S, T)                                \
    OP2("and." S, T, a & b)                       \
    OP2("or." S, T, a | b)                        \
    OP2("xor." S, T, a ^ b)                       \
    OP1("not." S, T, ~a)                          \
    OP1("mov." S, T, a)                           \
    REGISTER("shl." S, shift<T, shift_left<T>>)   \
    REGISTER("shr." S, shift<T, shift_right<T>>)  \
    REGISTER("selp." S, select<T>)
BITS("b16", u16)
BITS("b32", u32)
BITS("b64", u64)
OP1("mov.b8", u8, a)
OP1("mov.pred", u8, a)
OP1("not.pred", u8, !a)
OP2("and.pred", u8, a& b)
OP2("or.pred", u8, a | b)
OP2("xor.pred", u8, a ^ b)
OP1("popc.b32", u32, (u32)__builtin_popcount(a))
OP1("clz.b32", u32, a ? (u32)__builtin_clz(a) : 32u)

static u32 reversed(u32 a) {
    u32 r = 0;
    for (int k = 0; k < 32; k++) r |= (a >> k & 1) << (31 - k);
    return r;
}
OP1("brev.b32", u32, reversed(a))

template <class T>
static T extract(T a, u32 from, u32 length) {
    typedef std::make_unsigned_t<T> U;
    const u32 size = sizeof(T) * 8;
    from &= 255, length &= 255;
    if (!length) return 0;
    bool sign = std::is_signed_v<T> && ((U)a >> std::min(from + length - 1, size - 1) & 1);
    U value = from >= size ? 0 : (U)a >> from;
    u32 got = from >= size ? 0 : std::min(length, size - from);
    U mask = got >= size ? ~(U)0 : ((U)1 << got) - 1;
    return (T)((value & mask) | (sign ? ~mask : 0));
}

template <class T>
static void bfe(Warp& w, const Insn& i, u32 m) {
    T *d = reg<T>(w, i.o[0]), *a = reg<T>(w, i.o[1]);
    u32 *from = reg<u32>(w, i.o[2]), *length = reg<u32>(w, i.o[3]);
    each(m, [&](int l) { d[l] = extract<T>(a[l], from[l], length[l]); });
}
REGISTER("bfe.u32", bfe<u32>)
REGISTER("bfe.s32", bfe<s32>)
REGISTER("bfe.u64", bfe<u64>)
REGISTER("bfe.s64", bfe<s64>)

OPERATION(bfi, "bfi.b32") {
    u32 *d = reg<u32>(w, i.o[0]), *a = reg<u32>(w, i.o[1]), *b = reg<u32>(w, i.o[2]);
    u32 *from = reg<u32>(w, i.o[3]), *length = reg<u32>(w, i.o[4]);
    each(m, [&](int l) {
        u32 n = length[l] & 255, p = from[l] & 255;
        u32 mask = p > 31 ? 0 : (n > 31 ? ~0u : (1u << n) - 1) << p;
        d[l] = (b[l] & ~mask) | (p > 31 ? 0 : (a[l] << p) & mask);
    });
}

static u32 permute(u32 a, u32 b, u32 selector) {
    u64 bytes = (u64)b << 32 | a;
    u32 result = 0;
    for (int k = 0; k < 4; k++) {
        u32 choice = selector >> 4 * k & 15, value = bytes >> 8 * (choice & 7) & 255;
        if (choice & 8) value = value & 128 ? 255 : 0;
        result |= value << 8 * k;
    }
    return result;
}
OP3("prmt.b32", u32, permute(a, b, c))

OPERATION(lop3, "lop3.b32") {
    u32 *d = reg<u32>(w, i.o[0]), *a = reg<u32>(w, i.o[1]), *b = reg<u32>(w, i.o[2]), *c = reg<u32>(w, i.o[3]);
    u32* table = reg<u32>(w, i.o[4]);
    each(m, [&](int l) {
        u32 r = 0;
        for (int k = 0; k < 8; k++)
            if (table[l] >> k & 1) r |= (k & 4 ? a[l] : ~a[l]) & (k & 2 ? b[l] : ~b[l]) & (k & 1 ? c[l] : ~c[l]);
        d[l] = r;
    });
}
OP3("shf.l.wrap.b32", u32, (u32)(((u64)b << 32 | a) << (c & 31) >> 32))
OP3("shf.r.wrap.b32", u32, (u32)(((u64)b << 32 | a) >> (c & 31)))
OP3("shf.l.clamp.b32", u32, (u32)(((unsigned __int128)b << 32 | a) << std::min(c, 32u) >> 32))
OP3("shf.r.clamp.b32", u32, (u32)(((u64)b << 32 | a) >> std::min(c, 32u)))

// d = {o1, o2, ...}: a parts of b bytes.
OPERATION(pack, "pack") {
    u8* d = reg<u8>(w, i.o[0]);
    u32 parts = i.a, size = i.b;
    for (u32 j = 0; j < parts; j++) {
        u8* from = reg<u8>(w, i.o[j + 1]);
        each(m, [&](int l) { memcpy(d + (l * parts + j) * size, from + l * size, size); });
    }
}

OPERATION(unpack, "unpack") {
    u32 parts = i.a, size = i.b;
    u8 from[512];
    memcpy(from, reg<u8>(w, i.o[parts]), 32 * parts * size);
    for (u32 j = 0; j < parts; j++) {
        if (i.o[j] < 0) continue;
        u8* d = reg<u8>(w, i.o[j]);
        each(m, [&](int l) { memcpy(d + l * size, from + (l * parts + j) * size, size); });
    }
}

// ---- floating point. min and max drop a NaN, or keep it with .NaN; -0 is below +0.
template <class T>
static T least(T a, T b) {
    if (a != a) return b;
    if (b != b) return a;
    return a == b ? (std::signbit((f64)a) ? a : b) : a < b ? a : b;
}

template <class T>
static T greatest(T a, T b) {
    if (a != a) return b;
    if (b != b) return a;
    return a == b ? (std::signbit((f64)a) ? b : a) : a > b ? a : b;
}

template <class T>
static bool is_nan(T a) {
    return (f32)a != (f32)a;
}

static f32 fused(f32 a, f32 b, f32 c) { return (f32)((f64)a * (f64)b + (f64)c); }

#define HALF(S, T)                                                                           \
    OP2("add." S, T, (f32)a + (f32)b)                                                        \
    OP2("sub." S, T, (f32)a - (f32)b)                                                        \
    OP2("mul." S, T, (f32)a * (f32)b)                                                        \
    OP3("fma." S, T, fused(a, b, c))                                                         \
    OP2("min." S, T, least<f32>(a, b))                                                       \
    OP2("max." S, T, greatest<f32>(a, b))                                                    \
    OP2("min.NaN." S, T, is_nan(a) ? a : is_nan(b) ? b : T(least<f32>(a, b)))                \
    OP2("max.NaN." S, T, is_nan(a) ? a : is_nan(b) ? b : T(greatest<f32>(a, b)))             \
    OP1("neg." S, T, -(f32)a)                                                                \
    OP1("abs." S, T, std::fabs((f32)a))                                                      \
    OP1("ex2." S, T, exp2f(a))                                                               \
    OP1("tanh." S, T, tanhf(a))
HALF("f16", f16)
HALF("bf16", bf16)

template <class T>
struct Pairs {
    template <f32 (*F)(f32, f32)>
    static void binary(Warp& w, const Insn& i, u32 m) {
        x2<T>*d = reg<x2<T>>(w, i.o[0]), *a = reg<x2<T>>(w, i.o[1]), *b = reg<x2<T>>(w, i.o[2]);
        each(m, [&](int l) { d[l] = x2<T>{T(F(a[l].lo, b[l].lo)), T(F(a[l].hi, b[l].hi))}; });
    }
    static void fma(Warp& w, const Insn& i, u32 m) {
        x2<T>*d = reg<x2<T>>(w, i.o[0]), *a = reg<x2<T>>(w, i.o[1]), *b = reg<x2<T>>(w, i.o[2]);
        x2<T>* c = reg<x2<T>>(w, i.o[3]);
        each(m, [&](int l) {
            d[l] = x2<T>{T(fused(a[l].lo, b[l].lo, c[l].lo)), T(fused(a[l].hi, b[l].hi, c[l].hi))};
        });
    }
};

static f32 plus(f32 a, f32 b) { return a + b; }
static f32 minus(f32 a, f32 b) { return a - b; }
static f32 times(f32 a, f32 b) { return a * b; }

#define PAIRS(S, T)                                       \
    REGISTER("add." S, Pairs<T>::binary<plus>)            \
    REGISTER("sub." S, Pairs<T>::binary<minus>)           \
    REGISTER("mul." S, Pairs<T>::binary<times>)           \
    REGISTER("min." S, Pairs<T>::binary<least<f32>>)      \
    REGISTER("max." S, Pairs<T>::binary<greatest<f32>>)   \
    REGISTER("fma." S, Pairs<T>::fma)                     \
    OP1("neg." S, u32, a ^ 0x80008000u)                   \
    OP1("abs." S, u32, a & 0x7fff7fffu)
PAIRS("f16x2", f16)
PAIRS("bf16x2", bf16)

#define REAL(S, T)                                                           \
    OP2("add." S, T, a + b)                                                  \
    OP2("sub." S, T, a - b)                                                  \
    OP2("mul." S, T, a * b)                                                  \
    OP2("div." S, T, a / b)                                                  \
    OP3("fma." S, T, std::fma(a, b, c))                                      \
    OP2("min." S, T, least(a, b))                                            \
    OP2("max." S, T, greatest(a, b))                                         \
    OP2("min.NaN." S, T, is_nan(a) ? a : is_nan(b) ? b : least(a, b))        \
    OP2("max.NaN." S, T, is_nan(a) ? a : is_nan(b) ? b : greatest(a, b))     \
    OP1("neg." S, T, -a)                                                     \
    OP1("abs." S, T, std::fabs(a))                                           \
    OP1("rcp." S, T, 1 / a)                                                  \
    OP1("sqrt." S, T, std::sqrt(a))                                          \
    OP1("rsqrt." S, T, 1 / std::sqrt(a))                                     \
    OP2("copysign." S, T, std::copysign(b, a))
REAL("f32", f32)
REAL("f64", f64)
OP1("ex2.f32", f32, exp2f(a))
OP1("lg2.f32", f32, log2f(a))
OP1("sin.f32", f32, sinf(a))
OP1("cos.f32", f32, cosf(a))
OP1("tanh.f32", f32, tanhf(a))

// ---- comparison: a = comparison | combination << 8 (0 none, 1 and, 2 or, 3 xor); o = {p, q or -1, a, b, c}
template <class T>
static bool compare(int how, T a, T b) {
    bool nan = a != a || b != b;
    switch (how) {
        case 0: return a == b;
        case 1: return a != b && !nan;
        case 2: return a < b;
        case 3: return a <= b;
        case 4: return a > b;
        case 5: return a >= b;
        case 6: return a == b || nan;
        case 7: return a != b || nan;
        case 8: return a < b || nan;
        case 9: return a <= b || nan;
        case 10: return a > b || nan;
        case 11: return a >= b || nan;
        case 12: return !nan;
        case 13: return nan;
        default: fail("comparison %d", how);
    }
}

template <class T>
static void setp(Warp& w, const Insn& i, u32 m) {
    typedef std::conditional_t<std::is_same_v<T, f16> || std::is_same_v<T, bf16>, f32, T> Compared;
    u8 *p = reg<u8>(w, i.o[0]), *q = i.o[1] < 0 ? nullptr : reg<u8>(w, i.o[1]);
    T *a = reg<T>(w, i.o[2]), *b = reg<T>(w, i.o[3]);
    int mix = i.a >> 8;
    u8* c = mix ? reg<u8>(w, i.o[4]) : nullptr;
    auto mixed = [&](u8 x, u8 y) -> u8 { return mix == 0 ? x : mix == 1 ? x & y : mix == 2 ? x | y : x ^ y; };
    each(m, [&](int l) {
        u8 found = compare<Compared>(i.a & 255, a[l], b[l]), with = mix ? c[l] : 0;
        i.ties += (Compared)a[l] == (Compared)b[l];
        p[l] = mixed(found, with);
        if (q) q[l] = mixed(!found, with);
    });
}
REGISTER("setp.b16", setp<u16>)
REGISTER("setp.u16", setp<u16>)
REGISTER("setp.s16", setp<s16>)
REGISTER("setp.b32", setp<u32>)
REGISTER("setp.u32", setp<u32>)
REGISTER("setp.s32", setp<s32>)
REGISTER("setp.b64", setp<u64>)
REGISTER("setp.u64", setp<u64>)
REGISTER("setp.s64", setp<s64>)
REGISTER("setp.f32", setp<f32>)
REGISTER("setp.f64", setp<f64>)
REGISTER("setp.f16", setp<f16>)
REGISTER("setp.bf16", setp<bf16>)
