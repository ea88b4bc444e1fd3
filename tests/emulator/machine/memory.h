// Global and shared memory of a program, with what may go wrong in them.
#pragma once
#include "state.h"

static const u32 SHARED = 1024;  // address of global_smem (program.py)

// Fails where an access is misaligned or outside of every argument of the launch.
void check_global(Warp& w, u64 at, u32 bytes, const char* what);
// Notes an access of global memory, and fails where programs or warps touch the same with no order between them.
// `data`: what is written, null for a read.
void touch(Warp& w, u64 at, u32 bytes, const u8* data);
// Where an address lies in shared memory; fails outside of it.
u32 shared_at(Warp& w, u64 address, u32 bytes, const char* what);
void shared_read(Warp& w, u32 at, u8* data, u32 bytes);
void shared_write(Warp& w, u32 at, const u8* data, u32 bytes);
// Ends cp.async copies: their data is there.
void land(Warp& w, std::vector<Copy>& copies);

// Counts the 32-byte sectors that the lanes of one instruction touch, each once.
class Sectors {
    u64 seen[128];
    u32 count = 0;

  public:
    void add(u64 at, u32 bytes) {
        for (u64 s = at / 32; s <= (at + bytes - 1) / 32 && count < 128; s++)
            if (!count || seen[count - 1] != s) seen[count++] = s;
    }
    u64 bytes() {
        std::sort(seen, seen + count);
        return 32 * (std::unique(seen, seen + count) - seen);
    }
};
