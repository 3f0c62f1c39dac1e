// The machine that stands in for a GPU: one fiber a thread, barriers, mbarriers, and a lazy copy engine.
//
// Bulk copies are adversarial: a load lands at a random later time, a store reads its source and writes its target
// as late as the program's own waits allow (or at once, at random). Threads run in random order between their waits.
#pragma once
#undef _FORTIFY_SOURCE  // it takes a jump from one fiber to another for a mistake
#include <sched.h>
#include <setjmp.h>
#include <ucontext.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <utility>
#include <vector>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Index { unsigned x; };
using std::max;
using std::min;

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

namespace emu {

struct Copy { u8* target; const u8* source; u32 bytes; u64* barrier; std::vector<u8> read; bool done = false; int add = 0; };  // add: bytes of a number
using StoreGroup = std::vector<Copy>;

struct Rendezvous { u32 arrived = 0, generation = 0; bool all = true, result = true; };

struct Block {
    std::unique_ptr<u8[]> storage;
    u8* shared;
    unsigned index, threads, alive;
    Rendezvous whole, named[16];
    std::vector<Rendezvous> warps;
    std::vector<u32> votes;
    std::vector<u32> exchanged;
};

struct Fiber {
    // What every round looks at, in one line of the cache.
    const u32* wait_word = nullptr;  // runnable again when it differs from wait_value
    u32 wait_value = 0;
    u32 nap = 0;
    bool done = false;
    bool begun = false;
    unsigned thread;
    Block* block;
    jmp_buf place;       // where it goes on
    ucontext_t context;  // where it begins
    std::unique_ptr<u8[]> stack;
    StoreGroup open;
    std::deque<StoreGroup> groups;
    StoreGroup asked;  // loads of 16 bytes that are not yet a group
    std::deque<StoreGroup> loading;
};

struct Machine {
    jmp_buf main;
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::unique_ptr<Fiber>> fibers;
    std::vector<Copy> loads;
    std::mt19937 random;
    Fiber* current = nullptr;
    std::function<void()> body;
    std::string error;
};

inline Machine* machine = nullptr;
inline Fiber& self() { return *machine->current; }

[[noreturn]] inline void fail(const char* what) {
    std::fprintf(stderr, "emulated CUDA: %s (block %u, thread %u)\n", what, self().block->index, self().thread);
    std::abort();
}

// Jumps, since swapcontext asks the kernel for signal masks: 44 ns there and back, not 1800.
inline void enter(Fiber& fiber) {
    machine->current = &fiber;
    if (_setjmp(machine->main)) return;
    if (fiber.begun) _longjmp(fiber.place, 1);
    fiber.begun = true;
    setcontext(&fiber.context);
}
inline void yield() {
    if (!_setjmp(self().place)) _longjmp(machine->main, 1);
}
inline void wait_change(const u32* word, u32 value) {
    while (*word == value) {
        self().wait_word = word;
        self().wait_value = value;
        yield();
    }
    self().wait_word = nullptr;
}
inline void nap(u32 rounds) {
    self().nap = rounds;
    yield();
}

inline bool meet(Rendezvous& r, u32 expected, bool value) {
    r.all = r.arrived == 0 ? value : r.all && value;
    if (++r.arrived == expected) {
        r.result = r.all;
        r.arrived = 0;
        ++r.generation;
        return r.result;
    }
    wait_change(&r.generation, r.generation);
    return r.result;
}

// mbarrier: bits 0-15 pending, 16-31 arrivals of a phase, 32-62 bytes owed (biased), 63 phase
constexpr u64 kBias = 1ull << 29;
inline u64 make_barrier(u64 pending, u64 arrivals, i64 owed, u64 phase) {
    return pending | arrivals << 16 | static_cast<u64>(owed + kBias) << 32 | phase << 63;
}
inline void change(u64* barrier, int arrivals, i64 bytes) {
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

inline void check_bulk(const void* global, u32 shared, u32 bytes) {
    if (reinterpret_cast<uintptr_t>(global) % 16 || shared % 16 || bytes % 16) fail("a bulk copy is not aligned to 16 bytes");
}

inline void read_store(Copy& copy) {
    if (copy.read.empty()) copy.read.assign(copy.source, copy.source + copy.bytes);
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
            change(copy.barrier, 0, -static_cast<i64>(copy.bytes));
        } else {
            ++i;
        }
}

inline void start_fiber() {
    machine->body();
    for (auto& group : self().groups)
        for (auto& copy : group)
            if (copy.read.empty()) fail("a thread left while its bulk stores still read shared memory");
    if (!self().open.empty()) fail("a thread left bulk stores uncommitted");
    for (auto& group : self().groups)
        for (auto& copy : group) finish_store(copy);
    self().done = true;
    Block& block = *self().block;
    --block.alive;
    yield();
}

// 0, or 1 when the kernel did not end within `limit` seconds. Compiled once, not with every kernel.
int run(int grid, int block, int smem, unsigned seed, double limit, std::function<void()> body);
#ifdef EMULATED_MACHINE
int run(int grid, int block, int smem, unsigned seed, double limit, std::function<void()> body) {
    Machine now;
    machine = &now;
    now.random.seed(seed);
    now.body = std::move(body);
    constexpr size_t kStack = 48 * 1024;
    for (int b = 0; b < grid; ++b) {
        now.blocks.push_back(std::make_unique<Block>());
        Block& made = *now.blocks.back();
        made.storage.reset(new u8[smem + 2048]);
        made.shared = reinterpret_cast<u8*>((reinterpret_cast<uintptr_t>(made.storage.get()) + 1023) / 1024 * 1024);
        std::memset(made.shared, 0xcd, smem);
        made.index = b;
        made.threads = made.alive = block;
        made.warps.resize((block + 31) / 32);
        made.votes.resize((block + 31) / 32);
        made.exchanged.resize((block + 31) / 32 * 32);
        for (int t = 0; t < block; ++t) {
            now.fibers.push_back(std::make_unique<Fiber>());
            Fiber& fiber = *now.fibers.back();
            fiber.stack.reset(new u8[kStack]);
            fiber.block = &made;
            fiber.thread = t;
            getcontext(&fiber.context);
            fiber.context.uc_stack.ss_sp = fiber.stack.get();
            fiber.context.uc_stack.ss_size = kStack;
            fiber.context.uc_link = nullptr;
            makecontext(&fiber.context, reinterpret_cast<void (*)()>(start_fiber), 0);
        }
    }
    const auto start = std::chrono::steady_clock::now();
    std::vector<Fiber*> alive;
    for (auto& fiber : now.fibers) alive.push_back(fiber.get());
    while (!alive.empty()) {
        const size_t offset = now.random() % alive.size();
        bool polls = false;
        for (size_t i = 0; i < alive.size(); ++i) {
            Fiber* fiber = alive[(i + offset) % alive.size()];
            if (fiber->done || (fiber->wait_word && *fiber->wait_word == fiber->wait_value)) continue;
            if (fiber->nap && --fiber->nap) continue;
            enter(*fiber);
            polls |= fiber->nap != 0;
        }
        if (polls) sched_yield();  // a peer's process may have to write what is waited for
        land_loads(false);
        size_t kept = 0;
        for (Fiber* fiber : alive)
            if (!fiber->done) alive[kept++] = fiber;
        alive.resize(kept);
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
        if (spent.count() > limit) {
            for (Fiber* fiber : alive)
                if (fiber->thread % 32 == 0) std::fprintf(stderr, "stuck: block %u warp %u\n", fiber->block->index, fiber->thread / 32);
            return 1;
        }
    }
    machine = nullptr;
    return 0;
}
#endif

template <class... A, size_t... I>
void call_with(void (*kernel)(A...), void** args, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<A>*>(args[I])...);
}
template <class... A>
void call(void (*kernel)(A...), void** args) {
    call_with(kernel, args, std::index_sequence_for<A...>{});
}

inline Rendezvous& own_warp() { return self().block->warps[self().thread / 32]; }
inline u32 warp_size() { return min(32u, self().block->threads - self().thread / 32 * 32); }

}  // namespace emu
