// Runs a grid: programs one after the other in random order, warps of a program in turns between barriers.
#include <random>

#include "memory.h"

struct Program {
    std::vector<Insn> code;
    std::vector<s32> operands;
    std::vector<u8> image;  // of the register file at the start
    std::vector<u64> counts;
};

static u32 alive(Cta& c) {
    u32 count = 0;
    for (auto& w : c.warps) count += !w.groups.empty();
    return count;
}

static bool release(Cta& c, int id) {
    Barrier& b = c.barriers[id];
    if (!b.arrived || b.arrived < b.want) return false;
    for (auto& w : c.warps)
        if (w.barrier == id) w.barrier = -1;
    b.arrived = 0;
    c.epoch++;
    return true;
}

// Lanes at the same instruction run together; those that are behind run first.
static void join_groups(std::vector<Group>& groups) {
    std::sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.pc > b.pc; });
    while (groups.size() > 1 && groups.back().pc == groups[groups.size() - 2].pc) {
        groups[groups.size() - 2].mask |= groups.back().mask;
        groups.pop_back();
    }
}

static u32 guarded(Warp& w, const Insn& i, u32 mask) {
    if (i.guard < 0) return mask;
    __m256i lanes = _mm256_loadu_si256((__m256i*)(w.file + i.guard));
    u32 unset = _mm256_movemask_epi8(_mm256_cmpeq_epi8(lanes, _mm256_setzero_si256()));
    return mask & (i.negate ? unset : ~unset);
}

// Whether the warp has to wait. o = {number, threads or -1}; a = whether it only arrives
static bool reach_barrier(Warp& w, const Insn& i) {
    Cta& c = *w.cta;
    u32 id = reg<u32>(w, i.o[0])[0];
    if (id > 15) fail("barrier %u", id);
    Barrier& b = c.barriers[id];
    b.want = i.o[1] < 0 ? alive(c) : reg<u32>(w, i.o[1])[0] / 32;
    b.arrived++;
    if (i.o[1] >= 0 && b.want < c.warps.size()) c.races = false;  // some warps only: epochs do not order them
    if (i.a) return release(c, id);
    w.barrier = id;
    release(c, id);
    return true;
}

static void leave(Warp& w) {
    if (!w.flown.empty()) fail("exit with a wgmma under way");
    for (auto& copies : w.committed) land(w, copies);
    land(w, w.copying);
}

// Until a barrier, the end, or `quantum` instructions; `at`: the instruction it has come to.
static void run_warp(Program& p, Warp& w, u64 quantum, s32& at) {
    for (u64 n = 0; n < quantum; n++) {
        if (w.groups.size() > 1) join_groups(w.groups);
        Group& now = w.groups.back();
        at = now.pc;
        const Insn& i = p.code[at];
        p.counts[at]++;
        w.cta->stats.instructions++;
        u32 m = guarded(w, i, now.mask);
        switch (i.kind) {
            case NORMAL:
                if (m) i.run(w, i, m);
                now.pc++;
                if (w.yield) {
                    w.yield = false;
                    return;
                }
                break;
            case BRANCH:
                if (m == now.mask) {
                    now.pc = i.a;
                    break;
                }
                now.pc++;
                if (m) {
                    now.mask &= ~m;
                    w.groups.push_back({i.a, m});
                }
                break;
            case RETURN:
                if (m != now.mask) {
                    now.mask &= ~m;
                    now.pc++;
                    break;
                }
                w.groups.pop_back();
                if (!w.groups.empty()) break;
                leave(w);
                return;
            case BARRIER:
                need_all(m, "bar.sync");
                now.pc++;
                if (reach_barrier(w, i)) return;
                break;
        }
    }
}

static void start(Cta& c, Program& p, u8* registers, u32 warps, u32 shared, u64 program, s32 races) {
    c.shared.resize(shared);
    for (u32 k = 0; k + 1 < shared; k += 2) c.shared[k] = 255, c.shared[k + 1] = 127;  // a NaN
    c.cells.assign(shared, Cell{});
    c.epoch = 1;
    c.races = races & 1;
    c.watch = races & 2;
    c.program = program + 1;
    c.warps.clear();
    c.warps.resize(warps);
    for (auto& b : c.barriers) b = Barrier();
    c.mbarriers.clear();
    c.bulks.clear();
    for (u32 k = 0; k < warps; k++) {
        Warp& w = c.warps[k];
        w.id = k;
        w.cta = &c;
        w.file = registers + p.image.size() * k;
        memcpy(w.file, p.image.data(), p.image.size());
        w.groups = {{0, ~0u}};
    }
}

static void run_cta(Cta& c, Program& p, std::mt19937_64& random, u64 limit, s64* where, s32& at) {
    u64 begin = c.stats.instructions;
    std::vector<u32> order(c.warps.size());
    for (u32 k = 0; k < order.size(); k++) order[k] = k;
    while (alive(c)) {
        bool ran = false;
        std::shuffle(order.begin(), order.end(), random);
        for (u32 k : order) {
            Warp& w = c.warps[k];
            if (w.groups.empty() || w.barrier >= 0) continue;
            where[1] = k;
            run_warp(p, w, 1 << 14, at);
            ran = true;
        }
        for (int id = 0; id < 16; id++) {  // warps that have ended are not waited for
            Barrier& b = c.barriers[id];
            if (!b.arrived || b.want <= alive(c)) continue;
            b.want = alive(c);
            release(c, id);
        }
        if (!ran) fail("deadlock: every warp waits at a barrier");
        if (c.stats.instructions - begin > limit) fail("no end after %llu instructions", (unsigned long long)limit);
    }
}

extern "C" {
s64 emulator_operation(const char* name) {
    auto found = operations().find(name);
    return found == operations().end() ? 0 : (s64)found->second;
}

// Columns of `code`: operation, first operand, guard, negated, a, b, kind.
Program* emulator_program(s32 count, const s64* code, const s32* operands, s32 noperands, const u8* image, s32 nimage) {
    auto* p = new Program;
    p->operands.assign(operands, operands + noperands);
    p->image.assign(image, image + nimage);
    p->counts.assign(count, 0);
    for (const s64* c = code; c < code + 7 * count; c += 7)
        p->code.push_back({(Operation)c[0], p->operands.data() + c[1], (s32)c[2], (s32)c[4], (s32)c[5], (s32)c[6],
                           (s32)c[3], 0});
    return p;
}

// How often each instruction ran, and how often a comparison found its operands equal.
void emulator_counts(Program* p, u64* ran, u64* ties) {
    for (size_t k = 0; k < p->code.size(); k++) ran[k] = p->counts[k], ties[k] = p->code[k].ties;
}

// Makes a comparison its neighbour, or what it was: `<` and `<=`, `>` and `>=` stand next to each other.
void emulator_flip(Program* p, s32 at) { p->code[at].a ^= 1; }

// Returns -1, or the instruction at fault with what is wrong in `text`; `where`: program and warp.
// `ranges`: begin and end of the memory that may be touched; `races`: 1 in shared memory, 2 between programs.
s64 emulator_run(Program* p, const u32* grid, u32 warps, u32 shared, const u8* params, u32 nparams, const u64* ranges,
                 u32 nranges, u64 seed, u64 limit, s32 races, char* text, s64* where, Stats* stats) {
    std::mt19937_64 random(seed);
    std::vector<u64> order((u64)grid[0] * grid[1] * grid[2]);
    for (u64 k = 0; k < order.size(); k++) order[k] = k;
    std::shuffle(order.begin(), order.end(), random);
    Cta c;
    c.params = params;
    c.nparams = nparams;
    for (u32 k = 0; k < nranges; k++) c.ranges.push_back({ranges[2 * k], ranges[2 * k + 1]});
    std::copy(grid, grid + 3, c.nctaid);
    std::vector<u8> registers(p->image.size() * warps + 64);
    s32 at = -1;
    s64 fault = -1;
    for (u64 program : order) {
        where[0] = program;
        c.ctaid[0] = program % grid[0];
        c.ctaid[1] = program / grid[0] % grid[1];
        c.ctaid[2] = program / grid[0] / grid[1];
        try {
            start(c, *p, registers.data(), warps, shared, program, races);
            run_cta(c, *p, random, limit, where, at);
        } catch (Fault& found) {
            strcpy(text, found.text);
            fault = at;
            break;
        }
    }
    *stats = c.stats;
    return fault;
}
}
