// Routing and the pull to expert-major rows in one kernel: tokens are staged while routing goes on.
//
// A row's place in expert-major rows needs everybody's choices, but a token can be brought whoever wants it.
// So the warps that stage begin at once: the first groups, as many as cross while ranks route, they store at
// every peer -- with 4 ranks and 8 choices nine of ten are wanted, and the wire is idle --, the others where
// they are pulled from. When the rank's blocks have met with all positions written, the ring begins with what
// has come. Staging alone was no gain (571 us for 574 in two kernels): the wire bounds the pull, not the
// staging.
// Routing's shared memory is the ring's: its slots are empty until then.
//
// One launch is a call of both kinds, so it may stand between calls of either kernel.
//
// Example: as routing/route.cu, whose integers it gives, and exchange/pull.cu, whose rows.
#define ROUTE_FIRST (96 + 32 * 8)
#define ROUTE_THREADS 512
#include "exchange/pull.cuh"
#include "routing/whole.cuh"

namespace exchange {

using namespace mover;
using namespace route;

static_assert(kRouteFirst == kPullThreads, "the warps that route come last");
constexpr int kScratchBytes = 320;
static_assert(sizeof(Scratch) <= kScratchBytes, "mirrored by exchange_dispatch.py");
constexpr int kPlacedBarrier = 10;  // the lister waits for the threads that route

struct Expert {
    Route route;
    Pull pull;
    int scratch_at;  // in shared memory
    int fine_at;     // the same, of a word: whether positions are there
};

__device__ inline void route_first(const Call& call, const Expert& expert, int* fine) {
    // in shared memory, since registers are short
    Scratch& scratch = *reinterpret_cast<Scratch*>(ptx::shared_memory() + expert.scratch_at);
    if (route_thread() == 0)
        scratch = carve(call, expert.route, call.block, call.blocks, expert.scratch_at + kScratchBytes);
    route_sync();
    bool placed = route_whole(call, expert.route, scratch);
    placed = placed && own_blocks(call, expert.route.replicated ? 3 : 2);
    if (route_thread() == 0) *fine = placed;
    ptx::fence_async_shared();  // rows come where the scratch was
    ptx::named_barrier(kPlacedBarrier, kRouteThreads + 32);
}

extern "C" __global__ void __launch_bounds__(kRouteFirst + kRouteThreads, 1)
    dispatch_expert(const __grid_constant__ Group group, const __grid_constant__ Expert expert) {
    const Call call = begin_call(group, kPull), routing = begin_call(group, kRoute);
    const Pull& pull = expert.pull;
    const Ring ring = make_ring(call, pull.row_bytes, pull.row_bytes, pull.stages, pull.choices);
    int* fine = reinterpret_cast<int*>(ptx::shared_memory() + expert.fine_at);
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
    if (thread >= kRouteFirst) {
        route_first(routing, expert, fine);
    } else if (warp == 0) {
        if (ptx::lane_id() == 0) load_rows(call, ring);
    } else if (warp == 1) {
        if (ptx::lane_id() == 0) store_rows(call, ring);
    } else if (warp == 2) {
        if (call.block == 0) tell_started(call, static_cast<int>(ptx::lane_id()));
        ptx::named_barrier(kPlacedBarrier, kRouteThreads + 32);
        if (!list_all(call, ring, pull, view_of(call, pull), *fine != 0)) *fine = 0;
    } else {
        stage_groups(call, pull, view_of(call, pull),
                     expert.route.tokens ? expert.route.tokens[call.local] : expert.route.num_tokens,
                     thread - kMoverThreads);
    }
    __syncthreads();
    end_pull(call, pull, *fine != 0);
    end_call(routing, 32);
}

}  // namespace exchange
