// Other tokens of a routing that was made before into the heap, for a kernel behind it that brings rows
// beside a product: exchange/stage.cu without its routing. For the gradient of a combine, whose rows go where
// the forward's went.
//
// One launch is a call of kPull, with the buffers, flags and credit of exchange/pull.cu: a rank may pull
// where its peers stage for such a kernel, and the other way round.
//
// WIRE_FP8: tokens are staged as rows of the fp8 codec, for peers that decode what they bring; then all ranks
// stage.
//
// Example, K = 2: positions [[[0, -1], [2, 1]]] of one source give token_R = [0, 1, 1].
#include "exchange/pull.cuh"
#include "exchange/quantise.cuh"

namespace exchange {

using namespace mover;

constexpr int kListers = 256;  // threads

#if WIRE_FP8
using StagedForm = Coded;
#else
using StagedForm = AsTheyAre;
#endif

// By value. The host reads it: `kernels.structs`.
struct StageAgain {
    Pull pull;
    int* token;  // [.., rows]; rank * max_tokens + token of every expert-major row
    u32* there;  // [.., counters]; set to 0
    int rows;
    int counters;
};

extern "C" __global__ void __launch_bounds__(32 * kStagers + kListers, 1)
    stage_again(const __grid_constant__ Group group, const __grid_constant__ StageAgain stage) {
    const Call call = begin_call(group, kPull);
    const PullView view = view_of(call, stage.pull);
    const int thread = static_cast<int>(threadIdx.x), lister = thread - 32 * kStagers;
    if (lister < 0) {
        if (call.block == 0 && thread < 32) tell_started(call, thread);
        stage_groups<StagedForm>(call, stage.pull, view, view.tokens[call.me], thread);
    } else {
        const int first = call.block * kListers + lister, step = call.blocks * kListers;
        u32* there = stage.there + static_cast<i64>(call.local) * stage.counters;
        for (int i = first; i < stage.counters; i += step) there[i] = 0;
        int* token_of = stage.token + static_cast<i64>(call.local) * stage.rows;
        const int choices = stage.pull.choices;
        for (int p = 0; p < group.ranks; ++p) {
            const int before = p * stage.pull.max_tokens;
            const int* position = view.position + static_cast<i64>(before) * choices;
            for (int i = first; i < view.tokens[p] * choices; i += step)
                if (position[i] >= 0) token_of[position[i]] = before + i / choices;
        }
    }
    end_call(call);
}

}  // namespace exchange
