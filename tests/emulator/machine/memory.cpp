// Loads, stores, atomics and cp.async.
#include "memory.h"

void check_global(Warp& w, u64 at, u32 bytes, const char* what) {
    Cta& c = *w.cta;
    if (at % bytes) fail("misaligned %s of %u bytes at %llx", what, bytes, (unsigned long long)at);
    if (at >= c.last.begin && at + bytes <= c.last.end) return;
    s64 nearest = INT64_MAX;
    for (auto& r : c.ranges) {
        if (at >= r.begin && at + bytes <= r.end) {
            c.last = r;
            return;
        }
        s64 distance = at < r.begin ? (s64)(at - r.begin) : (s64)(at - r.end);
        if (std::llabs(distance) < std::llabs(nearest)) nearest = distance;
    }
    fail("%s of %u bytes at %llx outside of every argument (%lld bytes from the nearest)", what, bytes,
         (unsigned long long)at, (long long)nearest);
}

// Programs of a launch have no order: what one writes no other may read, nor write, unless it writes the same; and
// within a program, warps need a barrier between, and lanes another instruction.
void touch(Warp& w, u64 at, u32 bytes, const u8* data) {
    Cta& c = *w.cta;
    if (!c.watch) return;
    for (u64 word = at & ~3ull; word < at + bytes; word += 4) {
        u8 mask = 0;
        for (int k = 0; k < 4; k++)
            if (word + k >= at && word + k < at + bytes) mask |= 1 << k;
        Touch& t = c.touched[word];
        long long self = c.program - 1, other = (long long)t.writer - 1;
        if (data) {
            u8 differs = 0;
            for (int k = 0; k < 4; k++)
                if ((mask & t.wrote) >> k & 1) differs |= (*(u8*)(word + k) != data[word + k - at]) << k;
            if (differs && t.writer != c.program)
                fail("programs %lld and %lld write different values to %llx", other, self, (unsigned long long)word);
            bool now = t.writer == c.program && t.epoch == c.epoch;
            if (now && differs & t.last && t.warp != w.id && c.races)
                fail("warps %d and %d write different values to %llx with no barrier between", t.warp, w.id,
                     (unsigned long long)word);
            now &= t.warp == w.id && t.step == c.step();
            if (now && differs & t.last)
                fail("lanes of warp %d write different values to %llx at once", w.id, (unsigned long long)word);
            if (t.read & mask && t.reader != c.program)
                fail("program %lld writes %llx, which another read", self, (unsigned long long)word);
            if (t.writer != c.program) t.wrote = 0;
            t.writer = c.program;
            t.wrote |= mask;
            t.last = now ? t.last | mask : mask;
            t.warp = w.id;
            t.epoch = c.epoch;
            t.step = c.step();
        } else {
            if (t.wrote & mask) {
                if (t.writer != c.program)
                    fail("program %lld reads %llx, which program %lld wrote", self, (unsigned long long)word, other);
                if (t.warp != w.id && t.epoch == c.epoch && c.races)
                    fail("warp %d reads %llx, which warp %d wrote with no barrier between", w.id,
                         (unsigned long long)word, t.warp);
            }
            t.reader = !t.read || t.reader == c.program ? c.program : ~0ull;
            t.read |= mask;
        }
    }
}

u32 shared_at(Warp& w, u64 address, u32 bytes, const char* what) {
    u32 at = (u32)address - SHARED, size = w.cta->shared.size();
    if (at > size || at + bytes > size)
        fail("shared %s of %u bytes at %lld of %u", what, bytes, (long long)address - SHARED, size);
    if (at % bytes) fail("misaligned shared %s of %u bytes at %u", what, bytes, at);
    return at;
}

void shared_write(Warp& w, u32 at, const u8* data, u32 bytes) {
    Cta& c = *w.cta;
    for (u32 k = at; k < at + bytes; k++) {
        Cell& x = c.cells[k];
        if (x.flags & PENDING) fail("shared write at %u where an asynchronous copy is on its way", k);
        bool differs = x.wrote == c.epoch && c.shared[k] != data[k - at];
        if (differs && x.writer == w.id && x.step == c.step())
            fail("race: lanes of warp %d write different values to shared byte %u at once", w.id, k);
        if (c.races) {
            if (differs && x.writer != w.id)
                fail("race: warps %d and %d write shared byte %u with no barrier between", x.writer, w.id, k);
            if (x.read == c.epoch && x.readers & ~(1 << w.id))
                fail("race: warp %d writes shared byte %u that warps %x read with no barrier between", w.id, k,
                     x.readers);
        }
        x.wrote = c.epoch;
        x.step = c.step();
        x.writer = w.id;
        x.flags |= WRITTEN;
    }
    memcpy(&c.shared[at], data, bytes);
}

void shared_read(Warp& w, u32 at, u8* data, u32 bytes) {
    Cta& c = *w.cta;
    memcpy(data, &c.shared[at], bytes);
    for (u32 k = at; k < at + bytes; k++) {
        Cell& x = c.cells[k];
        if (x.flags & PENDING) fail("shared read at %u where an asynchronous copy is on its way", k);
        if (!(x.flags & WRITTEN)) c.stats.unwritten++;
        if (c.races && x.wrote == c.epoch && x.writer != w.id)
            fail("race: warp %d reads shared byte %u that warp %d wrote with no barrier between", w.id, k, x.writer);
        if (x.read != c.epoch) {
            x.read = c.epoch;
            x.readers = 0;
        }
        x.readers |= 1 << w.id;
    }
}

// ---- o = {registers..., address}; a = bytes | signed << 8 | count << 16 | bytes of a register << 24; b = offset
static u64 global_address(Warp& w, const Insn& i, u32 count, int lane) {
    return reg<u64>(w, i.o[count])[lane] + (s64)i.b;
}

static u32 shared_address(Warp& w, const Insn& i, u32 count, int lane) {
    return reg<u32>(w, i.o[count])[lane] + i.b;
}

static void set_registers(Warp& w, const Insn& i, int lane, const u8* data) {
    u32 size = i.a & 255, sign = i.a >> 8 & 255, count = i.a >> 16 & 255, width = i.a >> 24 & 255;
    for (u32 j = 0; j < count; j++) {
        if (i.o[j] < 0) continue;
        u64 value = 0;
        memcpy(&value, data + j * size, size);
        int unused = 64 - 8 * size;
        if (sign) value = (u64)((s64)(value << unused) >> unused);
        memcpy(w.file + i.o[j] + lane * width, &value, width);
    }
}

static void get_registers(Warp& w, const Insn& i, int lane, u8* data) {
    u32 size = i.a & 255, count = i.a >> 16 & 255, width = i.a >> 24 & 255;
    for (u32 j = 0; j < count; j++) memcpy(data + j * size, w.file + i.o[j] + lane * width, size);
}

OPERATION(load_global, "ld.global") {
    u32 count = i.a >> 16 & 255, bytes = (i.a & 255) * count;
    Sectors sectors;
    each(m, [&](int l) {
        u64 at = global_address(w, i, count, l);
        check_global(w, at, bytes, "load");
        touch(w, at, bytes, nullptr);
        sectors.add(at, bytes);
        set_registers(w, i, l, (u8*)at);
    });
    w.cta->stats.loaded += sectors.bytes();
}

OPERATION(store_global, "st.global") {
    u32 count = i.a >> 16 & 255, bytes = (i.a & 255) * count;
    Sectors sectors;
    each(m, [&](int l) {
        u8 data[32];
        get_registers(w, i, l, data);
        u64 at = global_address(w, i, count, l);
        check_global(w, at, bytes, "store");
        touch(w, at, bytes, data);
        sectors.add(at, bytes);
        memcpy((void*)at, data, bytes);
    });
    w.cta->stats.stored += sectors.bytes();
}

OPERATION(load_shared, "ld.shared") {
    u32 count = i.a >> 16 & 255, bytes = (i.a & 255) * count;
    each(m, [&](int l) {
        u8 data[32];
        shared_read(w, shared_at(w, shared_address(w, i, count, l), bytes, "load"), data, bytes);
        set_registers(w, i, l, data);
    });
}

OPERATION(store_shared, "st.shared") {
    u32 count = i.a >> 16 & 255, bytes = (i.a & 255) * count;
    each(m, [&](int l) {
        u8 data[32];
        get_registers(w, i, l, data);
        shared_write(w, shared_at(w, shared_address(w, i, count, l), bytes, "store"), data, bytes);
    });
}

OPERATION(load_parameter, "ld.param") {
    u32 bytes = (i.a & 255) * (i.a >> 16 & 255);
    if (i.b + bytes > w.cta->nparams) fail("parameter at %d of %u bytes", i.b, w.cta->nparams);
    each(m, [&](int l) { set_registers(w, i, l, w.cta->params + i.b); });
}

// ---- cp.async: o = {shared address, global address, source bytes or -1, global offset}; a = bytes, b = shared offset
OPERATION(cp_async, "cp.async") {
    u32 bytes = i.a;
    Sectors sectors;
    each(m, [&](int l) {
        u32 to = shared_at(w, reg<u32>(w, i.o[0])[l] + i.b, bytes, "cp.async");
        u64 from = reg<u64>(w, i.o[1])[l] + i.o[3];
        u32 given = i.o[2] < 0 ? bytes : reg<u32>(w, i.o[2])[l];
        if (given > bytes) fail("cp.async source of %u bytes", given);
        if (given) {
            check_global(w, from, given, "cp.async");
            touch(w, from, given, nullptr);
            sectors.add(from, given);
            if (from % bytes) fail("misaligned cp.async");
        }
        u8 poison[16];
        memset(poison, 255, sizeof poison);
        shared_write(w, to, poison, bytes);
        for (u32 k = to; k < to + bytes; k++) w.cta->cells[k].flags |= PENDING;
        w.copying.push_back({to, (u8*)from, bytes, given});
    });
    w.cta->stats.loaded += sectors.bytes();
}

void land(Warp& w, std::vector<Copy>& copies) {
    for (auto& x : copies) {
        u8 data[16] = {};
        memcpy(data, x.from, x.given);
        for (u32 k = x.to; k < x.to + x.bytes; k++) w.cta->cells[k].flags &= ~PENDING;
        shared_write(w, x.to, data, x.bytes);
    }
    copies.clear();
}

OPERATION(commit_group, "cp.async.commit_group") {
    need_all(m, "commit_group");
    w.committed.emplace_back(std::move(w.copying));
    w.copying.clear();
}

// Until at most a groups are on their way.
OPERATION(wait_group, "cp.async.wait_group") {
    need_all(m, "wait_group");
    while ((s32)w.committed.size() > i.a) {
        land(w, w.committed.front());
        w.committed.pop_front();
    }
}

OPERATION(wait_all, "cp.async.wait_all") {
    need_all(m, "wait_all");
    for (auto& copies : w.committed) land(w, copies);
    w.committed.clear();
    land(w, w.copying);
}

// ---- atomics: o = {old value or -1, address, operand, operand}; a = operation, b = offset
enum { ADD, MIN, MAX, EXCHANGE, COMPARE_AND_SWAP, AND, OR, XOR };

template <class T>
static T combined(int how, T old, T value, T other) {
    typedef std::conditional_t<sizeof(T) == 8, u64, std::conditional_t<sizeof(T) == 4, u32, u16>> Bits;
    switch (how) {
        case ADD: return old + value;
        case MIN: return old < value ? old : value;
        case MAX: return old > value ? old : value;
        case EXCHANGE: return value;
        case COMPARE_AND_SWAP: return old == value ? other : old;
        case AND: return bits<T>((Bits)(bits<Bits>(old) & bits<Bits>(value)));
        case OR: return bits<T>((Bits)(bits<Bits>(old) | bits<Bits>(value)));
        case XOR: return bits<T>((Bits)(bits<Bits>(old) ^ bits<Bits>(value)));
        default: fail("atomic operation %d", how);
    }
}

template <class T, bool GLOBAL>
static void atomic(Warp& w, const Insn& i, u32 m) {
    each(m, [&](int l) {
        u8* at;
        if (GLOBAL) {
            at = (u8*)(reg<u64>(w, i.o[1])[l] + (s64)i.b);
            check_global(w, (u64)at, sizeof(T), "atomic");
        } else {
            at = &w.cta->shared[shared_at(w, reg<u32>(w, i.o[1])[l] + i.b, sizeof(T), "atomic")];
        }
        T old = read_as<T>(at), value = reg<T>(w, i.o[2])[l];
        T other = i.a == COMPARE_AND_SWAP ? reg<T>(w, i.o[3])[l] : value;
        T result = combined<T>(i.a, old, value, other);
        memcpy(at, &result, sizeof result);
        if (i.o[0] >= 0) reg<T>(w, i.o[0])[l] = old;
    });
}

#define ATOMIC(S, T)                              \
    REGISTER("atom.global." S, atomic<T, true>)   \
    REGISTER("atom.shared." S, atomic<T, false>)
ATOMIC("b32", u32)
ATOMIC("u32", u32)
ATOMIC("s32", s32)
ATOMIC("b64", u64)
ATOMIC("u64", u64)
ATOMIC("s64", s64)
ATOMIC("f32", f32)
ATOMIC("f64", f64)
ATOMIC("f16", f16)
