// Routing, and beside it all own tokens into the heap: for a kernel behind it that brings rows itself, beside
// a product (fused/rows_out.cu). It leaves what that one needs: the token of every expert-major row, and
// counters at zero.
//
// One launch is a call of both kinds, as exchange/expert.cu, and the staging is that of exchange/pull.cu: the
// same buffers, flags and credit, so calls of this kernel and of those may alternate. The tokens are read
// from the buffer by the launch behind it, whose end every next call's `tell_started` comes after.
//
// WIRE_FP8: tokens are staged as rows of the fp8 codec, for peers that decode what they bring.
//
// Example: exchange/pull.cu's leaves rank 1 with token_R = [0, 2, 4 + 0] where ranks have room for 4 tokens:
// tokens 0 and 2 of rank 0, token 0 of rank 1.
#define ROUTE_FIRST (32 * 8)
#define ROUTE_THREADS 512
#include "exchange/pull.cuh"
#include "exchange/quantise.cuh"
#include "routing/whole.cuh"

namespace exchange {

using namespace mover;
using namespace route;

static_assert(kRouteFirst == 32 * kStagers, "the warps that route come behind those that stage");

#if WIRE_FP8
using StagedForm = Coded;
#else
using StagedForm = AsTheyAre;
#endif

// By value. The host reads it: `kernels.structs`.
struct Stage {
    Route route;
    Pull pull;
    int* token;  // [.., rows]; rank * max_tokens + token of every expert-major row
    u32* there;  // [.., counters]; set to 0
    int rows;
    int counters;
};

extern "C" __global__ void __launch_bounds__(kRouteFirst + kRouteThreads, 1)
    route_and_stage(const __grid_constant__ Group group, const __grid_constant__ Stage stage) {
    const Call call = begin_call(group, kPull), routing = begin_call(group, kRoute);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread < kRouteFirst) {
        if (call.block == 0 && thread < 32) tell_started(call, thread);
        stage_groups<StagedForm>(call, stage.pull, view_of(call, stage.pull),
                     stage.route.tokens ? stage.route.tokens[call.local] : stage.route.num_tokens, thread);
    } else {
        u32* there = stage.there + static_cast<i64>(call.local) * stage.counters;
        for (int i = call.block * kRouteThreads + route_thread(); i < stage.counters;
             i += call.blocks * kRouteThreads)
            there[i] = 0;
        int* token_of = stage.token + static_cast<i64>(call.local) * stage.rows;
        const Scratch s = carve(routing, stage.route, routing.block, routing.blocks);
        route_whole(routing, stage.route, s, [&](int chunk, int token, int, int row) {
            if (row >= 0) token_of[row] = s.chunk[chunk].at + token;
        });
    }
    end_call(call);
    end_call(routing, 32);
}

}  // namespace exchange
