// A call of a layer that may do without late peers, in three launches: packets out, rows of what has come to
// the experts, replies out and sums. Nobody waits for all ranks; claims.cuh says who waits for whom and who
// decides what counts, and the rest is `serial`'s work: rows through exchange/mover.cuh, sums through
// exchange/terms.cuh.
//
// A packet is a rank's choices, and its tokens that want an expert of that peer, each at its own place. So no
// counts of all ranks are exchanged: whoever has packets orders their rows alone, by slot, rank and token as
// `serial` does.
// A reply is the sums of a token's rows, as exchange/reduce.cuh stores them; the bits are its.
//
// Example, 2 ranks, an expert each, K = 1: rank 0's tokens want experts 0, 1, 1. Rank 1 finds tokens 1 and 2
// at places 1 and 2 of rank 0's packet and has them as its rows 0 and 1. If rank 1 is late and rank 0 may do
// without it, tokens 1 and 2 become 0 and kept is 1, 0, 0; rank 1 stores its reply, and finds its claim
// closed.
//
// The backward of a call is another one: gradients of outputs out, rows to the experts, gradients of tokens
// and of weights home, sums. Where rows are is known from its forward. Who counted on both sides stands in
// `known`, so nobody has patience: a home sends to the hosts that it heard, a host waits for the homes that
// it served. Where ranks share experts, a home may have heard one of them and not another. Then its packet
// says that nothing counts, and a step before the rows lets the host know.
#include "events/arrivals.cuh"
#include "events/packets.cuh"
#include "events/replies.cuh"

namespace claims {

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    run_events(const __grid_constant__ Group group, const __grid_constant__ Events e) {
    const Call call = name_step(group, e);
    Words& own = words_of(group, e.words_at, call.me);
    if (e.step == kSend) step_send(call, e, own);
    if (e.step == kExpand) step_expand(call, e, own);
    if (e.step == kReply || e.step == kCombine) step_reply(call, e, own);
    if (e.step == kSum || e.step == kCombine) step_sum(call, e, own);
    if (e.step == kSettle && call.block == 0 && threadIdx.x < 32) decide_packets(call, e, own);
    if (e.step == kRefuse && call.block == 0 && threadIdx.x == 0)
        give_up(call, kBadInput, static_cast<Phase>(kForTurn), call.me);
}

}  // namespace claims
