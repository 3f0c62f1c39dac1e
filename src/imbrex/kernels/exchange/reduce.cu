// Combine from expert-major rows, in a kernel of its own: see exchange/reduce.cuh.
//
// With `early`, the launch before is a product that has waited for all that came before it (gemm/follow.cu),
// so what routing wrote and earlier combines is there, and only rows are not: a warp draws its first piece
// and asks where its rows are while the last tiles are computed. Memory that a kernel before may still read
// (the result's may have been the rows of another product) is not touched until then.
//
// With BEHIND_DISPATCH the launch before has dispatched as well (fused/few.cu), `early` blocks of a rank, and
// tells when routing is written.
#include "exchange/reduce.cuh"
#include "exchange/told.cuh"
#include "ptx/stamps.cuh"

#ifndef BEHIND_DISPATCH
#define BEHIND_DISPATCH 0
#endif

namespace exchange {

using Whole = Form<16, 6, kColumns, 2>;

extern "C" __global__ void __launch_bounds__(32 * Whole::kWarps, 1)
    reduce_rows(const __grid_constant__ Group group, const __grid_constant__ Reduce reduce) {
    if (threadIdx.x == 0) ptx::stamp_begin();
    if (BEHIND_DISPATCH ? !is_routed(name_call(group, kCombine), reduce.early) : !reduce.early)
        ptx::wait_for_launches();
    if (threadIdx.x == 0) ptx::stamp(ptx::kKnows);
    const Call call = begin_call(group, kCombine);
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(ptx::lane_id()),
              ranks = group.ranks;
    const Own own = own_of<Whole>(reduce, warp, ptx::shared_memory());
    const bool failed_before = failed(call);  // asked here, looked at when it has come
    if (call.block == 0 && warp == 0) tell_started(call, lane);
    const int* tokens = reduce.tokens + call.local * ranks;
    int most = 0;
    for (int p = 0; p < ranks; ++p)
        if (p != call.me) most = max(most, tokens[p]);
    const u32 others = ranks - 1,
              reducing = static_cast<u32>(groups_of(reduce, most) * reduce.parts) * others;
    const u32 adding = static_cast<u32>(groups_of(reduce, tokens[call.me]) * reduce.parts);
    const u32 mine = warp * call.blocks + call.block;  // of one SM after the other
    bool fine = true;
    if (reduce.each ? mine < reducing : warp < reduce.reducers) {
        fine = wait_credit(call, lane, 2);
        if (fine)
            reduce_pieces<Whole>(call, reduce, own, tokens, reducing,
                                 reduce.each ? mine : draw_again(call, reduce, 0));
    }
    fine = fine && __ballot_sync(0xffffffffu, failed_before) == 0;
    const auto there = [&](const Piece& piece) { return wait_reduced(call, piece.flag); };
    if (fine)
        fine = add_pieces<Whole, false>(call, reduce, own, tokens, adding,
                                        reduce.each ? mine - reducing : draw_again(call, reduce, 1),
                                        there) >= adding;
    ptx::wait_for_launches();  // who had nothing to add: a kernel ends behind the one before
    if (threadIdx.x == 0) ptx::stamp(ptx::kStored);
    if (!fine) spoil(call, reduce);
    end_call(call);
    if (threadIdx.x == 0) ptx::stamp_end();
}

}  // namespace exchange
