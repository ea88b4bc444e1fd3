// ldmatrix, stmatrix and mma.sync.
#include "matrix.h"

#include "memory.h"

// o = {registers..., address, transposed}; a = count, b = offset. Lane l holds two elements of row l / 4.
OPERATION(ldmatrix, "ldmatrix") {
    need_all(m, "ldmatrix");
    u32 count = i.a, at[32];
    memcpy(at, reg<u32>(w, i.o[count]), sizeof at);
    bool transposed = i.o[count + 1];
    for (u32 j = 0; j < count; j++) {
        u16 x[8][8];
        for (int row = 0; row < 8; row++)
            shared_read(w, shared_at(w, at[8 * j + row] + i.b, 16, "ldmatrix"), (u8*)x[row], 16);
        u32* d = reg<u32>(w, i.o[j]);
        for (int l = 0; l < 32; l++) {
            int r = l / 4, c = l % 4 * 2;
            d[l] = transposed ? x[c][r] | (u32)x[c + 1][r] << 16 : x[r][c] | (u32)x[r][c + 1] << 16;
        }
    }
}

OPERATION(stmatrix, "stmatrix") {
    need_all(m, "stmatrix");
    u32 count = i.a, at[32];
    memcpy(at, reg<u32>(w, i.o[count]), sizeof at);
    bool transposed = i.o[count + 1];
    for (u32 j = 0; j < count; j++) {
        u16 x[8][8];
        u32* d = reg<u32>(w, i.o[j]);
        for (int l = 0; l < 32; l++) {
            int r = l / 4, c = l % 4 * 2;
            (transposed ? x[c][r] : x[r][c]) = d[l];
            (transposed ? x[c + 1][r] : x[r][c + 1]) = d[l] >> 16;
        }
        for (int row = 0; row < 8; row++)
            shared_write(w, shared_at(w, at[8 * j + row] + i.b, 16, "stmatrix"), (u8*)x[row], 16);
    }
}

// m16n8k: o = {d..., a..., b..., c...}; a = k, b = type of a | type of b << 8 | type of d << 16 | saturate << 24.
// Products are summed in float64, so a result has one rounding where hardware has several.
OPERATION(mma, "mma") {
    need_all(m, "mma");
    int size = i.a, type_a = i.b & 255, type_b = i.b >> 8 & 255, type_d = i.b >> 16 & 255;
    bool saturate = i.b >> 24;
    int per = type_a == TF32 ? 1 : type_a <= S8 ? 4 : 2;  // elements of a register
    int half = 4 * per, count_a = size / half * 2, count_d = type_d == F16 ? 2 : 4;
    const s32 *a = i.o + count_d, *b = a + count_a, *c = b + count_a / 2;
    static thread_local f32 A[16][64], B[64][8];
    for (int r = 0; r < count_a; r++)
        for (int l = 0; l < 32; l++)
            for (int j = 0; j < per; j++)
                A[l / 4 + (r & 1) * 8][(r >> 1) * half + l % 4 * per + j] = element(reg<u32>(w, a[r])[l], j, type_a);
    for (int r = 0; r < count_a / 2; r++)
        for (int l = 0; l < 32; l++)
            for (int j = 0; j < per; j++)
                B[r * half + l % 4 * per + j][l / 4] = element(reg<u32>(w, b[r])[l], j, type_b);
    f64 D[16][8] = {};
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < size; k++)
            for (int column = 0; column < 8; column++) D[row][column] += (f64)A[row][k] * B[k][column];
    s32 added[4];  // offsets: d may be c
    std::copy(c, c + count_d, added);
    for (int j = 0; j < 4; j++)
        for (int l = 0; l < 32; l++) {
            f64 x = D[l / 4 + (j >> 1) * 8][l % 4 * 2 + (j & 1)];
            if (type_d == F32) {
                reg<f32>(w, i.o[j])[l] = (f32)(x + reg<f32>(w, added[j])[l]);
            } else if (type_d == S32) {
                s64 sum = (s64)x + reg<s32>(w, added[j])[l];
                if (saturate) sum = std::min<s64>(std::max<s64>(sum, INT32_MIN), INT32_MAX);
                reg<s32>(w, i.o[j])[l] = (s32)sum;
            } else {
                int at = l * 4 + j % 2 * 2;
                f16 sum((f32)(x + (f32)read_as<f16>(w.file + added[j / 2] + at)));
                memcpy(w.file + i.o[j / 2] + at, &sum, 2);
            }
        }
}
