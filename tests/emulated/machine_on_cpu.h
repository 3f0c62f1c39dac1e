// The machine that stands in for a GPU: one fiber a thread, barriers, mbarriers, and a lazy copy engine.
//
// Bulk copies are adversarial: a load lands at a random later time, a store reads its source and writes its target
// as late as the program's own waits allow (or at once, at random). Threads run in random order between their waits.
//
// With `unrest` the order is an adversary's. Lanes, warps and blocks stop for up to 512 rounds, ranks for 4096, at the
// start of a launch and at any time; a thread also stops right after it wrote a flag or saw one. What has to wait for a barrier or
// a flag and does not is then seen. Ranks may be streams, each with launches one after the other, and so be in
// different calls.
//
// Where all ranks are `alone` in one process and no thread can do anything but look at the clock, the clock leaps: a
// wait in vain for seconds ends at once, and none ends because the processor is busy with other things.
//
// Here is what kernels are compiled with: all that needs a library stands in the files .cpp, which are compiled once.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

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
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)

namespace emu {

struct Fiber;
struct Rendezvous { u32 arrived = 0; bool all = true, result = true; Fiber* asleep = nullptr; };  // asleep: who waits here

struct Block {
    u8* shared;
    unsigned index, threads, alive;
    unsigned grid, first;  // blocks of its launch, and the place of the first in the machine
    unsigned stream;
    Rendezvous whole, named[16];
    Rendezvous* warps;
    u32 *votes, *exchanged;
};

struct alignas(64) Fiber {
    // What every round looks at, in one line of the cache.
    Fiber* next = nullptr;  // that waits for the same
    unsigned at = 0;        // its place in the machine's order
    u32 nap = 0;
    u64 until = 0;  // the round in which the adversary lets it go on
    bool done = false;
    bool patient = false;  // it polls what a peer sets, or the clock
    unsigned thread;
    Block* block;
    void* place[5];  // where it goes on
};
inline Fiber* current = nullptr;
inline Fiber& self() { return *current; }

[[noreturn]] void fail(const char* what);
u32 draw();  // the adversary's numbers
bool unrest();
void nap(u32 rounds);
void breathe();  // after a flag was written or seen
bool meet(Rendezvous& r, u32 expected, bool value);

// mbarrier: bits 0-15 pending, 16-31 arrivals of a phase, 32-62 bytes owed (biased), 63 phase
constexpr u64 kBias = 1ull << 29;
inline u64 make_barrier(u64 pending, u64 arrivals, i64 owed, u64 phase) {
    return pending | arrivals << 16 | static_cast<u64>(owed + kBias) << 32 | phase << 63;
}
void change(u64* barrier, int arrivals, i64 bytes);
// Through L1, which has what was there when the block first read one of the 128 bytes: for ever, or until `acquired`.
float load_line(const float* from, bool read_only);
void acquired();
void check_bulk(const void* global, u32 shared, u32 bytes);

// 0, or 1 when the launch did not end within `limit` seconds.
using Begin = void (*)(void** args);
int run(int grid, int block, int smem, Begin begin, void** args, unsigned seed, double limit, bool unrest, bool alone);
// Launches of `streams` streams, `calls` of each one after the other: grid, block and shared memory of each in `sizes`.
// Between two launches of a stream others go on. What happens in `bytes` from `watched` on is kept as events.
int run_streams(int streams, int calls, const int* sizes, Begin begin, void*** args, unsigned seed, double limit,
                void (*told)(int, int, int), u8* watched, i64 bytes);

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
