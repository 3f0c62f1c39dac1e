// Dispatch to compact rows: every token once to every rank that needs it, pushed; rows of the own rank stay
// in place.
//
// Example, 2 ranks: tokens of rank 0 with send_row_TW [[0, -1], [-1, 0], [1, 1]] -- tokens 1 and 2 become
// rows 0 and 1 of rank 1's buffer; column 0 is the own rank and is ignored here.
//
// With QUANTISE, rows are bf16 here and cross as rows of the fp8 codec; a token is quantised once for all
// ranks.
#include "exchange/push.cuh"

namespace exchange {

using namespace mover;

extern "C" __global__ void __launch_bounds__(kPushThreads, 1)
    push_rows(const __grid_constant__ Group group, const __grid_constant__ Push push) {
    const Call call = begin_call(group, kPush);
    const Ring ring = make_push_ring(call, push);
    bool fine;
    if (threadIdx.x / 32 == 2) {
        if (call.block == 0) tell_started(call, static_cast<int>(ptx::lane_id()));
        fine = list_push<false>(call, ring, push, true);
    } else {
        fine = push_listed(call, ring, push);
    }
    end_push(call, push, fine);
}

}  // namespace exchange
