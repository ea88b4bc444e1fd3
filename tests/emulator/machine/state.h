// What an instruction sees: a warp of 32 lanes, its registers, and the program (CTA) it belongs to.
#pragma once
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "types.h"

struct Cta;
struct Insn;
struct Warp;
typedef void (*Operation)(Warp&, const Insn&, u32 mask);

enum Kind { NORMAL, BRANCH, RETURN, BARRIER };

// An instruction. `o` are offsets of registers or constants in the register file, -1 where an operand is left out; what
// `a` and `b` mean is said at each operation. `ties`: how often a comparison found its operands equal.
struct Insn {
    Operation run;
    const s32* o;
    s32 guard, a, b, kind, negate;
    mutable u64 ties;
};

// Lanes that are at the same instruction.
struct Group {
    s32 pc;
    u32 mask;
};

struct Chunk {
    u32 at;
    u8 data[16];
};

// A cp.async on its way.
struct Copy {
    u32 to;
    const u8* from;
    u32 bytes, given;
};

// A wgmma on its way: what it read, and the registers it will write.
struct Flight {
    std::vector<Chunk> read;
    std::vector<s32> registers;
};

struct Warp {
    u8* file;  // registers and constants: 32 lanes of each, side by side
    Cta* cta;
    int id;
    std::vector<Group> groups;
    int barrier = -1;
    bool yield = false;
    std::vector<Copy> copying;
    std::deque<std::vector<Copy>> committed;
    std::vector<Flight> flying;
    std::deque<std::vector<Flight>> flown;
    std::unordered_map<s32, std::vector<f32>> sums;  // of wgmma, by the first register
};

struct Range {
    u64 begin, end;
};

// A byte of shared memory: in which epoch and step it was written and in which epoch read last, and by which warps.
struct Cell {
    u32 wrote, read, step;
    u8 writer, flags;
    u16 readers;
};
enum { WRITTEN = 1, PENDING = 2 };

// Four bytes of global memory: the programs that touched them, plus one; a reader of ~0 stands for several. `last`: what
// the warp wrote in that step of that epoch.
struct Touch {
    u64 writer, reader;
    u32 epoch, step;
    u8 warp, wrote, read, last;  // the last three: a bit for each byte
};

struct Barrier {
    u32 arrived = 0, want = 0;
};

struct MBarrier {
    u32 count, left, phase;
    s64 bytes;  // still to come
};

// A TMA copy on its way.
struct Bulk {
    u32 barrier, bytes;
    std::vector<Chunk> chunks;
};

struct Stats {
    u64 instructions, loaded, stored, unwritten;
};

struct Cta {
    std::vector<Warp> warps;
    std::vector<u8> shared;
    std::vector<Cell> cells;
    u32 epoch = 1;  // counts barriers
    bool races = true, watch = true;
    const u8* params;
    u32 nparams;
    std::vector<Range> ranges;
    Range last{1, 0};
    u32 ctaid[3], nctaid[3];
    Barrier barriers[16];
    Stats stats = {};
    std::unordered_map<u32, MBarrier> mbarriers;
    std::vector<Bulk> bulks;
    std::unordered_map<u64, Touch> touched;
    u64 program = 0;
    // Tells instructions that were run apart: lanes of one have no order.
    u32 step() const { return stats.instructions; }
};

template <class T>
inline T* reg(Warp& w, s32 offset) {
    return (T*)(w.file + offset);
}

template <class F>
inline void each(u32 mask, F run) {
    if (mask == ~0u)
        for (int lane = 0; lane < 32; lane++) run(lane);
    else
        for (; mask; mask &= mask - 1) run(__builtin_ctz(mask));
}

inline void need_all(u32 mask, const char* what) {
    if (mask != ~0u) fail("%s with lanes missing (mask %08x)", what, mask);
}

// ---- operations by name
inline std::unordered_map<std::string, Operation>& operations() {
    static std::unordered_map<std::string, Operation> table;
    return table;
}

struct Register {
    Register(std::string name, Operation run) { operations()[name] = run; }
};

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define REGISTER(name, ...) static Register JOIN(register_, __COUNTER__)(name, __VA_ARGS__);
// An operation with a body: `w` the warp, `i` the instruction, `m` the lanes that run it.
#define OPERATION(id, name)                     \
    static void id(Warp& w, const Insn& i, u32 m); \
    REGISTER(name, id)                          \
    static void id([[maybe_unused]] Warp& w, [[maybe_unused]] const Insn& i, [[maybe_unused]] u32 m)
