// What lanes of a warp tell each other, and what they know of themselves.
#include "state.h"

// o = {d, p or -1, a, b, c}; a = up, down, butterfly or index
OPERATION(shfl, "shfl") {
    u32 *d = reg<u32>(w, i.o[0]), *b = reg<u32>(w, i.o[3]), *c = reg<u32>(w, i.o[4]), from[32];
    memcpy(from, reg<u32>(w, i.o[2]), sizeof from);
    u8* p = i.o[1] < 0 ? nullptr : reg<u8>(w, i.o[1]);
    each(m, [&](int l) {
        int clamp = c[l] & 31, segment = c[l] >> 8 & 31, by = b[l] & 31;
        int top = (l & segment) | (clamp & ~segment), low = l & segment;
        int source = i.a == 0 ? l - by : i.a == 1 ? l + by : i.a == 2 ? l ^ by : low | (by & ~segment);
        bool inside = i.a == 0 ? source >= top : source <= top;
        if (!inside) source = l;
        if (!(m >> source & 1)) fail("shfl from lane %d, which is not there (mask %08x)", source, m);
        d[l] = from[source];
        if (p) p[l] = inside;
    });
}

static u32 ballot(Warp& w, s32 predicate, bool negated, u32 m) {
    u8* p = reg<u8>(w, predicate);
    u32 found = 0;
    each(m, [&](int l) { found |= (u32)(p[l] != negated) << l; });
    return found;
}

OPERATION(vote_ballot, "vote.ballot") {  // a = negated
    u32 found = ballot(w, i.o[1], i.a, m), *d = reg<u32>(w, i.o[0]);
    each(m, [&](int l) { d[l] = found; });
}

OPERATION(vote, "vote") {  // a = any, all or uniform; b = negated
    u32 found = ballot(w, i.o[1], i.b, m);
    u8 result = i.a == 0 ? found != 0 : i.a == 1 ? found == m : found == m || !found;
    u8* d = reg<u8>(w, i.o[0]);
    each(m, [&](int l) { d[l] = result; });
}

template <class T>
static T reduced(int how, T a, T b) {
    switch (how) {
        case 0: return a + b;
        case 1: return std::min(a, b);
        case 2: return std::max(a, b);
        case 5: return a & b;
        case 6: return a | b;
        case 7: return a ^ b;
        default: fail("redux operation %d", how);
    }
}

template <class T>
static void redux(Warp& w, const Insn& i, u32 m) {
    need_all(m, "redux");
    T *d = reg<T>(w, i.o[0]), *a = reg<T>(w, i.o[1]), found = a[0];
    for (int l = 1; l < 32; l++) found = reduced(i.a, found, a[l]);
    each(m, [&](int l) { d[l] = found; });
}
REGISTER("redux.s32", redux<s32>)
REGISTER("redux.u32", redux<u32>)
REGISTER("redux.b32", redux<u32>)

OPERATION(elect, "elect") {
    u32 first = __builtin_ctz(m), *d = i.o[0] < 0 ? nullptr : reg<u32>(w, i.o[0]);
    u8* p = reg<u8>(w, i.o[1]);
    each(m, [&](int l) {
        if (d) d[l] = first;
        p[l] = l == (int)first;
    });
}

OPERATION(activemask, "activemask") {
    u32* d = reg<u32>(w, i.o[0]);
    each(m, [&](int l) { d[l] = m; });
}

OPERATION(nop, "nop") {}

OPERATION(trap, "trap") { fail("trap"); }

// a = place in SPECIAL (instructions.py), b = bytes
OPERATION(special, "special") {
    Cta& c = *w.cta;
    u32* d = reg<u32>(w, i.o[0]);
    each(m, [&](int l) {
        u32 value = 0;
        switch (i.a) {
            case 0: value = w.id * 32 + l; break;                           // tid.x
            case 3: value = c.warps.size() * 32; break;                     // ntid.x
            case 4: case 5: value = 1; break;                               // ntid.y, ntid.z
            case 6: case 7: case 8: value = c.ctaid[i.a - 6]; break;        // ctaid
            case 9: case 10: case 11: value = c.nctaid[i.a - 9]; break;     // nctaid
            case 12: value = l; break;                                      // laneid
            case 13: value = w.id; break;                                   // warpid
        }
        if (i.b == 8)
            ((u64*)d)[l] = value;
        else
            d[l] = value;
    });
}
