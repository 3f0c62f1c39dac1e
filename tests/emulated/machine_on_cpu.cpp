// The machine itself.
#pragma once
#include <sched.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "tensor_cores_on_cpu.h"

namespace emu {

struct Copy { u8* target; const u8* source; u32 bytes; u64* barrier; std::vector<u8> read; bool done = false; int add = 0; int stream = 0; };  // add: bytes of a number
using StoreGroup = std::vector<Copy>;

// A warp's part of a product of a warp group, as the tensor cores take it: operands are descriptors of tiles in shared
// memory, d is every lane's. Lanes ask for it one after the other.
struct Product {
    int columns;
    u64 a, b;
    bool add, trans_a, trans_b, fp8;
    u32 group;  // how many commits came before
    u32 asked = 0;
    std::array<float*, 32> d{};
};
struct Products {
    std::deque<Product> left;
    u32 done = 0;  // and gone
    std::array<u32, 32> asked{}, commits{};  // by each lane
    unsigned mood = 0;  // products are done once they are asked for, or when they are waited for, or now and then
    bool fenced = false;
};

// A block with what only the machine looks at.
struct Room : Block {
    std::pair<size_t, std::unique_ptr<u8[]>> storage;  // and its size before it
    Begin begin;
    void** args;
    std::vector<Rendezvous> meetings;  // of every warp
    std::vector<u32> words;            // votes, then what is exchanged
    std::vector<Products> products;    // of every warp
    std::map<uintptr_t, std::array<u8, 128>> read_only, lines;  // of L1: until the launch ends, and until an acquire
};

constexpr size_t kStack = 48 * 1024, kSpare = 4096;

struct Thread : Fiber {
    std::unique_ptr<u8[]> stack{new u8[kStack]};
    StoreGroup open;
    std::vector<StoreGroup> groups;  // few
    StoreGroup asked;                // loads of 16 bytes that are not yet a group
    std::vector<StoreGroup> loading;
};
inline Thread& own() { return static_cast<Thread&>(self()); }

struct Machine {
    void* main[5];
    std::vector<std::unique_ptr<Room>> blocks;
    size_t fibers = 0;  // begun so far
    std::vector<u64> awake;  // a bit for each fiber in order: others wait for a rendezvous
    size_t ended = 0;        // fibers that are to be removed
    std::vector<Copy> loads;
    std::mt19937 random;
    bool unrest = false;
    bool alone = false;  // no other process writes to this memory
    unsigned quiet = 0;  // rounds in which threads only polled, one of them patiently
    int freeze = -1;  // a rank that is to stop at once
    struct Trace* trace = nullptr;
};

// What happens in a range of memory, in order. Threads take turns, so there is an order.
enum What { kSet = 0, kSeen = 1, kWrite = 2, kRead = 3, kBegin = 4, kEnd = 5 };
struct Event { u64 at; u32 bytes, value; int what, stream; };  // at: from the begin of the range
struct Trace {
    u8* begin;
    size_t bytes;
    std::vector<u8> before;
    std::vector<Event> events;
    void note(What what, const void* address, u32 size, u32 value, int stream) {
        const size_t at = static_cast<const u8*>(address) - begin;
        if (at < bytes) events.push_back({at, size, value, what, stream});
    }
    // Plain stores since the last look; nobody calls us for them. Their address tells whose they are.
    void look() {
        for (size_t at = 0; at < bytes; at += 4096) {
            const size_t page = std::min<size_t>(4096, bytes - at);
            if (std::memcmp(begin + at, before.data() + at, page) == 0) continue;
            for (size_t i = at; i < at + page; i += 16)
                if (std::memcmp(begin + i, before.data() + i, 16)) events.push_back({i, 16, 0, kWrite, -1});
            std::memcpy(before.data() + at, begin + at, page);
        }
    }
};

struct Launch { int grid, block, smem; Begin begin; void** args; };
struct Stream { std::vector<Launch> launches; size_t next = 0; unsigned running = 0; u64 idle = 0; };
using Told = void (*)(int stream, int call, int ended);

inline Machine* machine = nullptr;
inline u64 leapt = 0;  // ns that the clock is ahead
constexpr u64 kLeap = 10'000'000;

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "emulated CUDA: %s (block %u, thread %u)\n", what, self().block->index, self().thread);
    std::abort();
}

// Jumps, since swapcontext asks the kernel for signal masks: a few ns there and back, not 1800. The compiler's own,
// which look for no cleanups; never in the function that has marked a place.
[[noreturn]] __attribute__((noinline)) inline void jump(void** place) { __builtin_longjmp(place, 1); }
inline void enter(Fiber& fiber) {
    current = &fiber;
    if (!__builtin_setjmp(machine->main)) jump(fiber.place);
}
__attribute__((noinline)) static void yield() {
    if (!__builtin_setjmp(self().place)) jump(machine->main);
}
inline bool is_awake(size_t at) { return machine->awake[at / 64] >> at % 64 & 1; }
inline void set_awake(size_t at, bool awake) {
    u64& word = machine->awake[at / 64];
    word = (word & ~(1ull << at % 64)) | u64(awake) << at % 64;
}
u32 draw() { return static_cast<u32>(machine->random()); }
bool unrest() { return machine->unrest; }
void nap(u32 rounds) {
    self().nap = rounds;
    yield();
}
void breathe() {
    if (!machine->unrest) return;
    if (machine->random() % 32 == 0) machine->freeze = static_cast<int>(self().block->stream);
    if (machine->random() % 4 == 0 || machine->freeze >= 0) nap(1 + machine->random() % 32);
}

bool meet(Rendezvous& r, u32 expected, bool value) {
    r.all = r.arrived == 0 ? value : r.all && value;
    if (++r.arrived == expected) {
        r.result = r.all;
        r.arrived = 0;
        for (Fiber* one = r.asleep; one; one = one->next) set_awake(one->at, true);
        r.asleep = nullptr;
        return r.result;
    }
    self().next = r.asleep;
    r.asleep = &self();
    set_awake(self().at, false);
    yield();
    const bool result = r.result;
    if (machine->unrest && machine->random() % 128 == 0) nap(1 + machine->random() % 64);  // lanes drift apart
    return result;
}

void change(u64* barrier, int arrivals, i64 bytes) {
    u64 pending = *barrier & 0xffff, expected = *barrier >> 16 & 0xffff, phase = *barrier >> 63;
    i64 owed = static_cast<i64>(*barrier >> 32 & 0x7fffffff) - static_cast<i64>(kBias) + bytes;
    if (pending < static_cast<u64>(arrivals)) fail("more arrivals than the barrier expects");
    pending -= arrivals;
    if (pending == 0 && owed == 0) {
        pending = expected;
        phase ^= 1;
    }
    *barrier = make_barrier(pending, expected, owed, phase);
}

void check_bulk(const void* global, u32 shared, u32 bytes) {
    if (reinterpret_cast<uintptr_t>(global) % 16 || shared % 16 || bytes % 16) fail("a bulk copy is not aligned to 16 bytes");
}

inline void note_read(const Copy& copy, int stream) {
    if (!machine->trace) return;
    machine->trace->look();
    machine->trace->note(kRead, copy.source, copy.bytes, 0, stream);
}
inline void read_store(Copy& copy) {
    if (!copy.read.empty()) return;
    copy.read.assign(copy.source, copy.source + copy.bytes);
    note_read(copy, self().block->stream);
}
inline void add_numbers(const Copy& copy);
inline void finish_store(Copy& copy) {
    read_store(copy);
    if (copy.add && copy.done) return;
    copy.done = true;
    if (copy.add) add_numbers(copy);
    else std::memcpy(copy.target, copy.read.data(), copy.bytes);
}

inline void land_loads(bool every) {
    auto& loads = machine->loads;
    for (size_t i = 0; i < loads.size();)
        if (every || machine->random() % 8 == 0) {
            Copy copy = loads[i];
            loads[i] = loads.back();
            loads.pop_back();
            std::memcpy(copy.target, copy.source, copy.bytes);
            note_read(copy, copy.stream);
            change(copy.barrier, 0, -static_cast<i64>(copy.bytes));
        } else {
            ++i;
        }
}

inline void start_fiber() {
    const Room& room = static_cast<Room&>(*self().block);
    room.begin(room.args);
    for (auto& group : own().groups)
        for (auto& copy : group)
            if (copy.read.empty()) fail("a thread left while its bulk stores still read shared memory");
    if (!own().open.empty()) fail("a thread left bulk stores uncommitted");
    for (auto& group : own().groups)
        for (auto& copy : group) finish_store(copy);
    self().done = true;
    ++machine->ended;
    Block& block = *self().block;
    --block.alive;
    yield();
}

inline u32 swizzled(u32 address) { return address ^ ((address >> 7 & 7) << 4); }

static std::map<std::pair<const Block*, unsigned>, std::array<u32, 32>> rows_of_warp;
static std::map<std::pair<const Block*, unsigned>, std::array<std::array<u32, 6>, 32>> fragments;  // of mma
static void forget_lanes() {
    rows_of_warp.clear();
    fragments.clear();
}

// Of launches that have ended: else every launch faults all of their pages in again.
inline std::vector<std::unique_ptr<Thread>> spare_fibers;
inline std::vector<std::pair<size_t, std::unique_ptr<u8[]>>> spare_storage;

inline float from_e4m3(u8 bits) {
    const int exponent = bits >> 3 & 15, units = bits & 7;
    if ((bits & 0x7f) == 0x7f) return NAN;
    const float size = exponent ? std::ldexp(8.f + units, exponent - 10) : std::ldexp(float(units), -9);
    return bits & 0x80 ? -size : size;
}
inline float from_bf16(u16 bits) {
    const u32 word = static_cast<u32>(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

// Numbers k = 0 .. of a row or column `mn` of an operand, each `stride` floats behind the one before.
inline void numbers_of(const u8* shared, u64 operand, bool fp8, int mn, float* to, int stride) {
    static const std::array<float, 256> e4m3 = [] {
        std::array<float, 256> all;
        for (int bits = 0; bits < 256; ++bits) all[bits] = from_e4m3(static_cast<u8>(bits));
        return all;
    }();
    const u32 start = (operand & 0x3fff) << 4, group = (operand >> 32 & 0x3fff) << 4;
    const u32 first = start + mn / 8 * group + mn % 8 * 128;
    for (u32 half = 0; half < 2; ++half) {  // pieces of 16 bytes, which swizzling leaves whole
        const u8* piece = shared + swizzled(first + 16 * half);
        if (fp8) {
            for (int k = 0; k < 16; ++k) to[(16 * half + k) * stride] = e4m3[piece[k]];
            continue;
        }
        u16 bits[8];
        std::memcpy(bits, piece, 16);
        for (int k = 0; k < 8; ++k) to[(8 * half + k) * stride] = from_bf16(bits[k]);
    }
}
// Of an operand that lies the other way: eight neighbours mn, mn + 1, .. of number k.
inline void neighbours_of(const u8* shared, u64 operand, int mn, int k, float* to, int stride) {
    const u32 start = (operand & 0x3fff) << 4, leading = (operand >> 16 & 0x3fff) << 4, group = (operand >> 32 & 0x3fff) << 4;
    u16 bits[8];
    std::memcpy(bits, shared + swizzled(start + mn / 64 * leading + mn % 64 * 2 + k / 8 * group + k % 8 * 128), 16);
    for (int i = 0; i < 8; ++i) to[i * stride] = from_bf16(bits[i]);
}

// Sums go through k in its order, over many columns at once.
#ifdef __x86_64__
__attribute__((target_clones("avx2", "default")))
#endif
void add_up(const float (*a)[32], const float (*b)[256], int depth, int columns, float (*sums)[256]) {
    using Eight = float __attribute__((vector_size(32), aligned(4), may_alias));
    for (int row = 0; row < 16; row += 4)
        for (int n = 0; n < columns; n += 8) {
            Eight s0 = {}, s1 = {}, s2 = {}, s3 = {};
            for (int k = 0; k < depth; ++k) {
                const Eight wide = *reinterpret_cast<const Eight*>(&b[k][n]);
                s0 += a[row][k] * wide, s1 += a[row + 1][k] * wide, s2 += a[row + 2][k] * wide, s3 += a[row + 3][k] * wide;
            }
            const Eight all[4] = {s0, s1, s2, s3};
            for (int i = 0; i < 4; ++i) *reinterpret_cast<Eight*>(&sums[row + i][n]) = all[i];
        }
}

static void multiply(const Product& p) {  // of the warp that runs
    static float a[16][32], b[32][256], sums[16][256];
    const u8* shared = self().block->shared;
    const int first = self().thread / 32 % 4 * 16;
    for (int row = 0; row < 16 && !p.trans_a; ++row) numbers_of(shared, p.a, p.fp8, first + row, a[row], 1);
    for (int k = 0; k < 16 && p.trans_a; ++k)
        for (int row = 0; row < 16; row += 8) neighbours_of(shared, p.a, first + row, k, &a[row][k], 32);
    for (int n = 0; n < p.columns && !p.trans_b; ++n) numbers_of(shared, p.b, p.fp8, n, &b[0][n], 256);
    for (int k = 0; k < 16 && p.trans_b; ++k)
        for (int n = 0; n < p.columns; n += 8) neighbours_of(shared, p.b, n, k, &b[k][n], 1);
    add_up(a, b, p.fp8 ? 32 : 16, p.columns, sums);
    for (int lane = 0; lane < 32; ++lane)
        for (int n = 0; n < p.columns; n += 8)
            for (int i = 0; i < 4; ++i) {
                float& d = p.d[lane][n / 2 + i];
                const float sum = sums[lane / 4 + i / 2 * 8][n + lane % 4 * 2 + i % 2];
                d = p.add ? d + sum : sum;
            }
}

// Where a jump is to begin: frame, code and stack as the compiler's jumps find them, the stack as after a call.
inline void begin_at(Thread& fiber, u8* stack) {
    void** top = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(stack) / 16 * 16) - 2;
#ifdef __x86_64__
    *--top = nullptr;  // a call leaves where it returns to
#endif
    fiber.place[0] = nullptr;
    fiber.place[1] = reinterpret_cast<void*>(start_fiber);
    fiber.place[2] = top;
}

inline Thread* take_fiber() {
    if (spare_fibers.empty()) return new Thread();
    Thread* fiber = spare_fibers.back().release();
    spare_fibers.pop_back();
    fiber->nap = 0;
    fiber->done = fiber->patient = false;
    for (auto* left : {&fiber->groups, &fiber->loading}) left->clear();
    fiber->asked.clear();
    return fiber;
}
inline std::pair<size_t, std::unique_ptr<u8[]>> take_storage(size_t bytes) {
    for (auto& one : spare_storage)
        if (one.first >= bytes) {
            std::swap(one, spare_storage.back());
            auto taken = std::move(spare_storage.back());
            spare_storage.pop_back();
            return taken;
        }
    return {bytes, std::unique_ptr<u8[]>(new u8[bytes])};
}

inline void start_launch(const Launch& launch, unsigned stream, u64 round, std::vector<Fiber*>& alive) {
    Machine& now = *machine;
    const unsigned first = static_cast<unsigned>(now.blocks.size());
    const bool late = now.unrest && now.random() % 2, apart = now.unrest && now.random() % 4 == 0;
    for (int b = 0; b < launch.grid; ++b) {
        now.blocks.push_back(std::make_unique<Room>());
        Room& made = *now.blocks.back();
        made.storage = take_storage(launch.smem + 2048);
        made.shared = reinterpret_cast<u8*>((reinterpret_cast<uintptr_t>(made.storage.second.get()) + 1023) / 1024 * 1024);
        std::memset(made.shared, 0xcd, launch.smem);
        made.index = b, made.grid = launch.grid, made.first = first, made.stream = stream;
        made.begin = launch.begin, made.args = launch.args;
        made.threads = made.alive = launch.block;
        const int warps = (launch.block + 31) / 32;
        made.meetings.resize(warps);
        made.words.resize(33 * warps);
        made.products.resize(warps);
        made.warps = made.meetings.data();
        made.votes = made.words.data();
        made.exchanged = made.votes + warps;
        u64 until = 0;
        for (int t = 0; t < launch.block; ++t) {
            Thread& fiber = *take_fiber();
            fiber.block = &made;
            fiber.thread = t;
            if (late && t % 32 == 0) until = round + now.random() % 64;
            fiber.until = until + (apart ? now.random() % 16 : 0);
            // Not all at one place of a page: they would push each other out of the cache.
            begin_at(fiber, fiber.stack.get() + kStack - ++now.fibers * 576 % 8192);
            fiber.at = static_cast<unsigned>(alive.size());
            if (fiber.at % 64 == 0) now.awake.push_back(0);
            set_awake(fiber.at, true);
            alive.push_back(&fiber);
        }
    }
}

// A lane, a warp, a block, a rank or some neighbouring blocks stop for a while.
inline void disturb(const std::vector<Fiber*>& alive, u64 round, bool ranks) {
    auto& random = machine->random;
    const Fiber* victim = alive[random() % alive.size()];
    const Block& block = *victim->block;
    const unsigned kind = random() % 4;
    const u64 until = round + (1ull << random() % (ranks && kind == 3 ? 13 : 10));  // others get calls ahead
    const unsigned from = random() % (block.index + 1), to = block.index + random() % 4;
    for (Fiber* fiber : alive) {
        const Block& its = *fiber->block;
        const bool same = &its == &block;
        const bool hit = kind == 0   ? fiber == victim
                         : kind == 1 ? same && fiber->thread / 32 == victim->thread / 32
                         : kind == 2 ? same
                         : ranks     ? its.stream == block.stream
                                     : its.index >= from && its.index <= to;
        if (hit) fiber->until = until;
    }
}

// One round of all threads that may go on; whether one of them polls.
inline bool run_round(const std::vector<Fiber*>& alive, u64 round) {
    const size_t offset = machine->random() % alive.size();
    bool polls = false, works = false, waits = false;
    for (auto [place, end] : {std::pair(offset, alive.size()), std::pair(size_t{0}, offset)})
        for (; place < end; ++place) {
            const u64 rest = machine->awake[place / 64] >> place % 64;
            place = rest ? place + __builtin_ctzll(rest) : place | 63;
            if (!rest || place >= end) continue;
            Fiber* fiber = alive[place];
            if (fiber->until > round || (fiber->nap && --fiber->nap)) continue;
            fiber->patient = false;
            enter(*fiber);
            polls |= fiber->nap != 0;
            works |= fiber->nap == 0;
            waits |= fiber->patient;
        }
    machine->quiet = works || !machine->loads.empty() ? 0 : machine->quiet + waits;
    return polls;
}

inline void remove_done(std::vector<Fiber*>& alive, std::vector<Stream>& streams) {
    if (machine->ended == 0) return;
    size_t kept = 0;
    for (Fiber* fiber : alive)
        if (!fiber->done) {
            set_awake(kept, is_awake(fiber->at));
            fiber->at = static_cast<unsigned>(kept);
            alive[kept++] = fiber;
        } else {
            --streams[fiber->block->stream].running;
            if (spare_fibers.size() < kSpare) spare_fibers.emplace_back(static_cast<Thread*>(fiber));
            else delete static_cast<Thread*>(fiber);
        }
    alive.resize(kept);
    machine->awake.resize((kept + 63) / 64);
    if (kept % 64) machine->awake.back() &= (1ull << kept % 64) - 1;
    machine->ended = 0;
}

static int run_all(std::vector<Stream> streams, unsigned seed, bool unrest, bool alone, double limit, Told told, Trace* trace) {
    Machine now;
    machine = &now;
    now.trace = trace;
    const auto tell = [&](unsigned stream, size_t call, bool ended) {
        if (told) told(static_cast<int>(stream), static_cast<int>(call), ended);
        if (!trace) return;
        trace->look();
        trace->note(ended ? kEnd : kBegin, trace->begin, 0, static_cast<u32>(call), stream);
    };
    now.random.seed(seed);
    now.unrest = unrest;
    now.alone = alone;
    const auto start = std::chrono::steady_clock::now();
    std::vector<Fiber*> alive;
    for (u64 round = 0;; ++round) {
        bool more = false;
        for (unsigned s = 0; s < streams.size(); ++s) {
            Stream& stream = streams[s];
            if (stream.running || stream.next == stream.launches.size()) continue;
            more = true;
            if (stream.idle > round) continue;
            const Launch& launch = stream.launches[stream.next];
            tell(s, stream.next++, false);
            stream.running = launch.grid * launch.block;
            start_launch(launch, s, round, alive);
        }
        if (alive.empty() && !more) break;
        if (alive.empty()) continue;
        if (unrest && now.random() % 16 == 0) disturb(alive, round, streams.size() > 1);
        if (now.freeze >= 0 && streams.size() > 1) {
            const u64 until = round + (1ull << now.random() % 12);
            for (Fiber* fiber : alive)
                if (fiber->block->stream == static_cast<unsigned>(now.freeze)) fiber->until = until;
        }
        now.freeze = -1;
        const bool polls = run_round(alive, round);
        // Who is held by the adversary goes on by itself. A peer's process may have to write what is waited for, and wants the core.
        if (now.quiet > 16 && !unrest && alone) leapt += kLeap;
        else if (polls && !alone) now.quiet > 16 && !unrest ? usleep(50) : sched_yield();
        land_loads(false);
        remove_done(alive, streams);
        for (unsigned s = 0; s < streams.size(); ++s)
            if (streams[s].next && !streams[s].running && streams[s].idle <= round) {
                tell(s, streams[s].next - 1, true);
                streams[s].idle = round + 1 + (unrest && now.random() % 2 ? now.random() % 512 : 0);
                if (streams[s].next == streams[s].launches.size()) streams[s].idle = ~0ull;
            }
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
        if (spent.count() > limit) {
            for (Fiber* fiber : alive)
                if (fiber->thread % 32 == 0) std::fprintf(stderr, "stuck: block %u warp %u\n", fiber->block->index, fiber->thread / 32);
            return 1;
        }
    }
    for (auto& block : now.blocks)
        if (spare_storage.size() < 32) spare_storage.push_back(std::move(block->storage));
    machine = nullptr;
    return 0;
}

static Trace traced;

int run(int grid, int block, int smem, Begin begin, void** args, unsigned seed, double limit, bool unrest, bool alone) {
    forget_lanes();
    std::vector<Stream> one(1);
    one[0].launches.push_back({grid, block, smem, begin, args});
    return run_all(std::move(one), seed, unrest, alone, limit, nullptr, nullptr);
}

int run_streams(int streams, int calls, const int* sizes, Begin begin, void*** args, unsigned seed, double limit, Told told,
                u8* watched, i64 bytes) {
    std::vector<Stream> all(streams);
    for (int i = 0; i < streams * calls; ++i, sizes += 3)
        all[i / calls].launches.push_back({sizes[0], sizes[1], sizes[2], begin, args[i]});
    traced = {watched, static_cast<size_t>(bytes), std::vector<u8>(watched, watched + bytes), {}};
    return run_all(std::move(all), seed, true, true, limit, told, bytes ? &traced : nullptr);
}

}  // namespace emu
