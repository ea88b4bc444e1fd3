// Numbers as PTX has them, and how an instruction says that a kernel did what it must not.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <type_traits>

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;

// Numbers of types as the translation knows them, in its order (instructions.py, TYPE_NUMBERS).
enum Type { U8, S8, U16, S16, U32, S32, U64, S64, F16, BF16, F32, F64, TF32 };

struct Fault {
    char text[400];
};

[[noreturn]] inline void fail(const char* format, ...) {
    Fault fault;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(fault.text, sizeof fault.text, format, arguments);
    va_end(arguments);
    throw fault;
}

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

template <class T>
inline T read_as(const void* from) {
    T value;
    memcpy(&value, from, sizeof value);
    return value;
}

struct f16 {
    u16 code;
    f16() {}
    f16(f32 value) : code(_cvtss_sh(value, 0)) {}
    operator f32() const { return _cvtsh_ss(code); }
};

struct bf16 {
    u16 code;
    bf16() {}
    bf16(f32 value) {
        u32 v = bits<u32>(value);
        code = value != value ? 0x7fff : (v + 0x7fff + (v >> 16 & 1)) >> 16;
    }
    operator f32() const { return bits<f32>((u32)code << 16); }
};

inline f32 tf32(u32 code) { return bits<f32>(code & ~0x1fffu); }

template <class T>
struct x2 {
    T lo, hi;
};
