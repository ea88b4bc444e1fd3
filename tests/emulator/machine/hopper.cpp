// What sm_90 has more: wgmma, mbarriers and TMA.
#include "matrix.h"
#include "memory.h"

// ---- wgmma
enum Swizzle { PLAIN, SWIZZLE_128, SWIZZLE_64, SWIZZLE_32 };  // as descriptors of matrices number them

static u32 swizzled(u32 at, int mode) {
    u32 rows = mode == SWIZZLE_128 ? 7 : mode == SWIZZLE_64 ? 3 : mode == SWIZZLE_32 ? 1 : 0;
    return at ^ ((at >> 7 & rows) << 4);
}

// Where element (row, k) of an operand lies; transposed: rows are contiguous.
static u32 operand_at(u64 descriptor, int row, int k, int size, bool transposed) {
    u32 start = (descriptor & 0x3fff) << 4, lead = (descriptor >> 16 & 0x3fff) << 4;
    u32 stride = (descriptor >> 32 & 0x3fff) << 4, at;
    int mode = descriptor >> 62;
    if (descriptor >> 49 & 7) fail("wgmma base offset");
    u32 width = mode == SWIZZLE_128 ? 128 : mode == SWIZZLE_64 ? 64 : mode == SWIZZLE_32 ? 32 : 16;
    if (!transposed) {
        u32 byte = k * size;
        at = start + row / 8 * stride + row % 8 * width + (mode ? byte : byte % 16 + byte / 16 * lead);
    } else {
        u32 byte = row * size;
        at = start + (mode ? byte / width * lead + byte % width + k / 8 * stride + k % 8 * width
                           : byte / 16 * stride + byte % 16 + k % 8 * 16 + k / 8 * lead);
    }
    return swizzled(at, mode);
}

// An operand in shared memory, read in chunks of which each is kept.
class Operand {
    Warp& w;
    Flight& flight;
    std::unordered_map<u32, int> seen;

  public:
    Operand(Warp& w, Flight& flight) : w(w), flight(flight) {}
    f32 operator()(u64 descriptor, int row, int k, int type, bool transposed) {
        u32 at = operand_at(descriptor, row, k, type == TF32 ? 4 : 2, transposed), begin = at & ~15u;
        auto [found, is_new] = seen.try_emplace(begin, flight.read.size());
        if (is_new) {
            Chunk chunk;
            chunk.at = shared_at(w, begin, 16, "wgmma");
            shared_read(w, chunk.at, chunk.data, 16);
            flight.read.push_back(chunk);
        }
        const u8* data = flight.read[found->second].data + (at & 15);
        if (type == TF32) return tf32(read_as<u32>(data));
        return type == F16 ? (f32)read_as<f16>(data) : (f32)read_as<bf16>(data);
    }
};

// m64nN, of which a warp has 16 rows. o = {d..., registers or descriptor of a, descriptor of b, whether d is added};
// a = N | bytes of k << 16, b = type | a in registers << 8 | a transposed << 9 | b transposed << 10.
// The registers of d hold poison until a wait has seen the end.
OPERATION(wgmma, "wgmma") {
    need_all(m, "wgmma");
    int columns = i.a & 65535, type = i.b & 255, size = type == TF32 ? 4 : 2, depth = (i.a >> 16) / size;
    int count = columns / 2, per = 4 / size;
    bool in_registers = i.b >> 8 & 1, transposed_a = i.b >> 9 & 1, transposed_b = i.b >> 10 & 1;
    const s32 *d = i.o, *a = i.o + count, *rest = a + (in_registers ? 4 : 1);
    Flight flight;
    Operand fetch(w, flight);
    static thread_local f32 A[16][64], B[64][256];
    static thread_local f64 D[16][256];
    if (in_registers) {
        for (int r = 0; r < 4; r++)
            for (int l = 0; l < 32; l++)
                for (int j = 0; j < per; j++)
                    A[l / 4 + (r & 1) * 8][(r >> 1) * 4 * per + l % 4 * per + j] =
                        element(reg<u32>(w, a[r])[l], j, type);
    } else {
        u64 descriptor = reg<u64>(w, a[0])[0];
        for (int row = 0; row < 16; row++)
            for (int k = 0; k < depth; k++) A[row][k] = fetch(descriptor, w.id % 4 * 16 + row, k, type, transposed_a);
    }
    u64 descriptor = reg<u64>(w, rest[0])[0];
    for (int n = 0; n < columns; n++)
        for (int k = 0; k < depth; k++) B[k][n] = fetch(descriptor, n, k, type, transposed_b);
    for (int row = 0; row < 16; row++) {
        std::fill(D[row], D[row] + columns, 0);
        for (int k = 0; k < depth; k++)
            for (int n = 0; n < columns; n++) D[row][n] += (f64)A[row][k] * B[k][n];
    }
    auto& sum = w.sums[d[0]];
    if (sum.empty()) {  // else the product before is under way: this one goes on from it
        sum.resize(count * 32);
        for (int j = 0; j < count; j++) memcpy(&sum[j * 32], w.file + d[j], 128);
    }
    bool added = reg<u8>(w, rest[1])[0];
    for (int j = 0; j < count; j++)
        for (int l = 0; l < 32; l++) {
            f32& x = sum[j * 32 + l];
            x = (f32)(D[l / 4 + (j >> 1 & 1) * 8][j / 4 * 8 + l % 4 * 2 + (j & 1)] + (added ? (f64)x : 0));
            reg<u32>(w, d[j])[l] = 0x7fff7fff;
        }
    flight.registers.assign(d, d + count);
    w.flying.push_back(std::move(flight));
}

OPERATION(wgmma_commit, "wgmma.commit") {
    w.flown.emplace_back(std::move(w.flying));
    w.flying.clear();
}

static void finish(Warp& w, const Flight& done) {
    for (auto& chunk : done.read)
        if (memcmp(chunk.data, &w.cta->shared[chunk.at], 16))
            fail("shared memory at %u changed under a wgmma of warp %d", chunk.at, w.id);
    s32 target = done.registers[0];
    bool goes_on = false;
    for (size_t group = 1; group < w.flown.size(); group++)
        for (auto& other : w.flown[group]) goes_on |= other.registers[0] == target;
    for (auto& other : w.flying) goes_on |= other.registers[0] == target;
    auto sum = w.sums.find(target);
    if (goes_on || sum == w.sums.end()) return;
    for (size_t j = 0; j < done.registers.size(); j++) memcpy(w.file + done.registers[j], &sum->second[j * 32], 128);
    w.sums.erase(sum);
}

OPERATION(wgmma_wait, "wgmma.wait") {
    while ((s32)w.flown.size() > i.a) {
        for (auto& flight : w.flown.front()) finish(w, flight);
        w.flown.pop_front();
    }
}

// ---- mbarriers, by their address in shared memory. Where they order warps, races between barriers are not looked for.
static MBarrier& mbarrier(Warp& w, u32 at) {
    auto found = w.cta->mbarriers.find(at);
    if (found == w.cta->mbarriers.end()) fail("no mbarrier at shared %d", (int)(at - SHARED));
    return found->second;
}

static void turn(MBarrier& b) {
    if (b.left || b.bytes) return;
    b.phase ^= 1;
    b.left = b.count;
}

static void arrive(MBarrier& b, u32 count) {
    if (b.left < count) fail("more arrivals at an mbarrier than it counts");
    b.left -= count;
    turn(b);
}

// TMA copies end when somebody waits for them: as late as they may.
static void deliver(Warp& w, u32 at) {
    Cta& c = *w.cta;
    for (size_t k = 0; k < c.bulks.size();) {
        if (c.bulks[k].barrier != at) {
            k++;
            continue;
        }
        Bulk done = std::move(c.bulks[k]);
        c.bulks.erase(c.bulks.begin() + k);
        for (auto& chunk : done.chunks) {
            for (int j = 0; j < 16; j++) c.cells[chunk.at + j].flags = WRITTEN;
            memcpy(&c.shared[chunk.at], chunk.data, 16);
        }
        MBarrier& b = mbarrier(w, at);
        b.bytes -= done.bytes;
        turn(b);
    }
}

// o = {address, count or -1}; b = offset
static u32 mbarrier_at(Warp& w, const Insn& i, int lane) { return reg<u32>(w, i.o[0])[lane] + i.b; }

OPERATION(mbarrier_init, "mbarrier.init") {
    each(m, [&](int l) {
        u32 at = mbarrier_at(w, i, l), count = reg<u32>(w, i.o[1])[l];
        shared_at(w, at, 8, "mbarrier");
        w.cta->races = false;
        w.cta->mbarriers[at] = MBarrier{count, count, 0, 0};
    });
}

OPERATION(mbarrier_inval, "mbarrier.inval") {
    each(m, [&](int l) {
        u32 at = mbarrier_at(w, i, l);
        mbarrier(w, at);
        for (auto& bulk : w.cta->bulks)
            if (bulk.barrier == at) fail("mbarrier invalidated while a copy is on its way");
        w.cta->mbarriers.erase(at);
    });
}

OPERATION(mbarrier_arrive, "mbarrier.arrive") {
    each(m, [&](int l) { arrive(mbarrier(w, mbarrier_at(w, i, l)), i.o[1] < 0 ? 1 : reg<u32>(w, i.o[1])[l]); });
}

OPERATION(mbarrier_expect, "mbarrier.expect_tx") {  // a = whether it arrives as well
    each(m, [&](int l) {
        MBarrier& b = mbarrier(w, mbarrier_at(w, i, l));
        b.bytes += reg<u32>(w, i.o[1])[l];
        if (i.a) arrive(b, 1);
    });
}

OPERATION(mbarrier_try_wait, "mbarrier.try_wait") {  // o = {predicate, address, parity}
    u8* p = reg<u8>(w, i.o[0]);
    each(m, [&](int l) {
        u32 at = reg<u32>(w, i.o[1])[l] + i.b, parity = reg<u32>(w, i.o[2])[l] & 1;
        if (mbarrier(w, at).phase == parity) deliver(w, at);
        p[l] = mbarrier(w, at).phase != parity;
        w.yield |= !p[l];
    });
}

// ---- TMA. Tensor maps have a layout of the emulator's own, of which these are the places (instructions.py, FIELDS).
enum { ADDRESS = 0, RANK = 8, BOX = 12, DIMENSION = 32, STRIDE = 56, ELEMENT = 108, SWIZZLE = 116 };

OPERATION(tensormap_replace, "tensormap.replace") {  // o = {address, value}; a = place | bytes << 16
    each(m, [&](int l) {
        u32 at = shared_at(w, (u32)reg<u64>(w, i.o[0])[l] + i.b, 8, "tensormap"), bytes = i.a >> 16;
        shared_write(w, at + (i.a & 65535), w.file + i.o[1] + l * bytes, bytes);
    });
}

OPERATION(tensormap_copy, "tensormap.copy") {
    u64 to = reg<u64>(w, i.o[0])[0] + (s64)i.b;
    u32 from = shared_at(w, (u32)reg<u64>(w, i.o[1])[0] + i.a, 128, "tensormap");
    check_global(w, to, 128, "tensormap");
    shared_read(w, from, (u8*)to, 128);
}

struct TensorMap {
    u64 base, stride;
    u32 rank, box[2], dimension[2], type, swizzle, element;  // swizzle: 3 for 128 bytes, 2 for 64, 1 for 32

    explicit TensorMap(const u8* from)
        : base(read_as<u64>(from + ADDRESS)),
          stride(read_as<u64>(from + STRIDE)),
          rank(read_as<u32>(from + RANK)),
          box{read_as<u32>(from + BOX), read_as<u32>(from + BOX + 4)},
          dimension{read_as<u32>(from + DIMENSION), read_as<u32>(from + DIMENSION + 4)},
          type(read_as<u32>(from + ELEMENT)),
          swizzle(read_as<u32>(from + SWIZZLE)) {
        static const u32 sizes[] = {1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4, 4};
        if (rank != 1 || type > 12 || swizzle > 3)
            fail("tensor map: rank %u, type %u, swizzle %u", rank + 1, type, swizzle);
        element = sizes[type];
        if (base % 16 || stride % 16 || row() % 16 || box[0] > 256 || box[1] > 256 ||
            (swizzle && row() > (16u << swizzle)))
            fail("tensor map: base %llx, stride %llu, box %u x %u", (unsigned long long)base,
                 (unsigned long long)stride, box[0], box[1]);
    }
    u32 row() const { return box[0] * element; }
    u32 alignment() const { return swizzle ? 128u << swizzle : 128; }
    int mode() const { return swizzle ? 4 - swizzle : PLAIN; }
};

// A row of a box; what lies outside of the tensor is 0.
static std::vector<u8> box_row(Warp& w, const TensorMap& map, s64 x, s64 y) {
    std::vector<u8> line(map.row());
    if (y < 0 || y >= map.dimension[1]) return line;
    Sectors sectors;
    for (u32 k = 0; k < map.box[0]; k++) {
        if (x + k < 0 || x + k >= map.dimension[0]) continue;
        u64 at = map.base + y * map.stride + (x + k) * map.element;
        check_global(w, at, map.element, "TMA");
        sectors.add(at, map.element);
        memcpy(&line[k * map.element], (void*)at, map.element);
    }
    w.cta->stats.loaded += sectors.bytes();
    return line;
}

OPERATION(tma_load, "tma.load") {  // o = {shared address, map, x, y, mbarrier}
    each(m, [&](int l) {
        u32 to = shared_at(w, reg<u32>(w, i.o[0])[l], 16, "TMA");
        u64 at = reg<u64>(w, i.o[1])[l];
        check_global(w, at, 128, "tensor map");
        TensorMap map((u8*)at);
        if (to % map.alignment()) fail("TMA target at %u for swizzle %u", to, map.swizzle);
        Bulk bulk{reg<u32>(w, i.o[4])[l], map.row() * map.box[1], {}};
        mbarrier(w, bulk.barrier);
        for (u32 r = 0; r < map.box[1]; r++) {
            std::vector<u8> line = box_row(w, map, reg<s32>(w, i.o[2])[l], (s64)reg<s32>(w, i.o[3])[l] + r);
            for (u32 k = 0; k < map.row(); k += 16) {
                Chunk chunk;
                chunk.at = swizzled(to + r * map.row() + k + SHARED, map.mode()) - SHARED;
                memcpy(chunk.data, &line[k], 16);
                shared_at(w, chunk.at + SHARED, 16, "TMA");
                for (u32 j = chunk.at; j < chunk.at + 16; j++) {
                    if (w.cta->cells[j].flags & PENDING) fail("TMA into shared %u where a copy is on its way", j);
                    w.cta->cells[j].flags = WRITTEN | PENDING;
                    w.cta->shared[j] = 255;
                }
                bulk.chunks.push_back(chunk);
            }
        }
        w.cta->bulks.push_back(std::move(bulk));
    });
}
