// Routing and the push to compact rows in one kernel: rows leave as soon as their own rank knows where to.
//
// A row's place needs only how many tokens lower ranks send to the same rank and how many of the own come
// before (routing/early.cuh): a few hundred words instead of everybody's choices. That takes some 10 us; all
// else that routing tells -- positions of choices, rows received, counts -- is found by warps of their own
// while rows cross, in windows, since shared memory belongs to the rows (routing/windows.cuh). Four H200,
// T=4096, D=7168, K=8, 8 SMs: 60 us of routing before 309 (fp8) or 483 (bf16) us of rows became 277 and 495
// in all. By one block's clock: homes 2.5 us, counted 5 (fp8 7), counts of others 6, rows written 11 to 13,
// first list 12 to 14; routing ends at 190 to 270.
//
// One launch is a call of both kinds, so it may stand between calls of either kernel. Placements with
// replicas take the two kernels: there, who gets a token depends on everybody's choices.
//
// Example: as routing/route.cu, whose integers it gives, and exchange/push.cu, whose rows.
#define ROUTE_FIRST (96 + 32 * 14 * QUANTISE)
#define ROUTE_THREADS 256
#define IN_FLIGHT (2 - QUANTISE)  // 25 warps have 72 registers a thread
#include "exchange/push.cuh"
#include "routing/early.cuh"
#include "routing/windows.cuh"

namespace exchange {

using namespace mover;
using namespace route;

static_assert(sizeof(Windows) % 16 == 0 && sizeof(Windows) <= 640, "see layout.py");

static_assert(kRouteFirst == kPushThreads, "the warps that route come last");
constexpr int kRowsBarrier = 10;  // the lister waits for the threads that route

struct Dispatch {
    Route route;
    Push push;
    i64 early_at;    // see Early
    int scratch_at;  // in shared memory
    int early_from;  // the same, of Early
    int window;      // chunks at once
};

__device__ inline void route_beside(const Call& call, const Dispatch& dispatch, const Early& early) {
    const Route& route = dispatch.route;
    Windows& windows = *reinterpret_cast<Windows*>(ptx::shared_memory() + dispatch.scratch_at);
    if (route_thread() == 0) {
        windows.whole = carve(call, route, call.block, call.blocks,
                              dispatch.scratch_at + static_cast<int>(sizeof(Windows)), dispatch.window);
        windows.part = windows.whole;
    }
    route_sync();
    find_rows(call, route, windows.whole, early, route.tokens ? route.tokens[call.local] : route.num_tokens);
    ptx::named_barrier(kRowsBarrier, kRouteThreads + 32);
    bool fine = *early.fine != 0;
    if (fine) {
        give_choices(call, route);
        tell_given(call);
        fine = take_choices(call) && route_windows(call, route, windows, dispatch.window);
    }
    if (!fine) leave_nothing(call, route);
}

extern "C" __global__ void __launch_bounds__(kRouteFirst + kRouteThreads, 1)
    dispatch_rows(const __grid_constant__ Group group, const __grid_constant__ Dispatch dispatch) {
    const Call call = begin_call(group, kPush), routing = begin_call(group, kRoute);
    const Ring ring = make_push_ring(call, dispatch.push);
    const Early early = carve_early(routing, dispatch.route, dispatch.early_at, dispatch.early_from);
    const int thread = static_cast<int>(threadIdx.x);
    bool fine = true;
    if (thread >= kRouteFirst) {
        route_beside(routing, dispatch, early);
    } else if (thread / 32 == 2) {
        if (call.block == 0) tell_started(call, static_cast<int>(ptx::lane_id()));
        ptx::named_barrier(kRowsBarrier, kRouteThreads + 32);
        fine = list_push<true>(call, ring, dispatch.push, *early.fine != 0);
    } else {
        fine = push_listed(call, ring, dispatch.push);
    }
    end_push(call, dispatch.push, fine);
    end_call(routing, 32);
}

}  // namespace exchange
