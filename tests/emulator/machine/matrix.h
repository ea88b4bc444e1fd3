// Elements of matrix operands.
#pragma once
#include "state.h"

// Element j of a 32-bit register.
inline f32 element(u32 word, int j, int type) {
    const u8* p = (const u8*)&word;
    switch (type) {
        case F16: return read_as<f16>(p + 2 * j);
        case BF16: return read_as<bf16>(p + 2 * j);
        case S8: return read_as<s8>(p + j);
        case U8: return read_as<u8>(p + j);
        default: return tf32(word);
    }
}
