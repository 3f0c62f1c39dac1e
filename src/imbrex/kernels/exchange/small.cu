// Dispatch of a small batch in one kernel, for decoding: exchange/small.cuh.
#include "exchange/small.cuh"

namespace exchange {

extern "C" __global__ void __launch_bounds__(kRouteThreads, 1)
    dispatch_small(const __grid_constant__ Group group, const __grid_constant__ Small small) {
    if (threadIdx.x == 0) ptx::stamp_begin();
    Call call = name_call(group, kSmall, small.pushers);
    bool fine = true;
    if (call.block >= call.blocks) {
        ptx::wait_for_launches();
        count_call(call);
        push_tokens(call, small,
                    small.route.tokens ? small.route.tokens[call.local] : small.route.num_tokens);
    } else {
        fine = route_and_place(call, small);
    }
    if (threadIdx.x == 0) ptx::stamp(ptx::kDispatched);
    end_rows(call, fine, small.out + call.local * small.out_stride, small.out_bytes);
    if (threadIdx.x == 0) ptx::stamp_end();
}

}  // namespace exchange
