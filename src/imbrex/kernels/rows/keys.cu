// The greedy token of every row with the vocabulary split over ranks, in one launch. A rank has the logits of
// its slice for the rows of all ranks, row by row, and where the largest of each stands. It packs both into a
// key of 64 bits, tells every rank the keys of that rank's rows, and takes the maximum of what it is told.
//
//     high half: the logit, as a number of the same order; NaN above all
//     low half:  the complement of the token, so that of equal logits the lowest token is the maximum
//
// A half crosses in a word with the epoch of the call in its other half, so that a word carries its own
// flag and no fence stands anywhere. There are two mailboxes by turns: who writes one again has had the keys
// of the call between from every peer, which had begun that call, and so had read the older ones.
//
// Example: 2 ranks of 4 tokens each, the largest logits of a row are 2.0 at 3 of rank 0 and 2.0 at 1 of rank
// 1, token 5: high halves are equal, ~3 > ~5, so 3 is chosen.
#include "peers/protocol.cuh"

namespace rows {

// The heap is this kernel's alone, so its calls are counted beside those of no other.
constexpr auto kChoose = static_cast<exchange::Kind>(7);
constexpr auto kKeysArrived = static_cast<exchange::Phase>(7);

struct Keys {
    u8* logits;  // [local ranks][W T][pitch] of the slice
    i64* best;   // [local ranks][W T]; in the slice, of the first among equal ones
    i64* token;  // [local ranks][T]
    i64 pitch;
    i64 mailbox;     // offset in a heap of u64 [2][W][room][2]
    i64 vocabulary;  // below 2^32
    i64 slice;       // tokens of a rank; of the last ranks fewer, or none
    int rows;        // T
    int room;        // the most rows of a call
};

__device__ __forceinline__ float logit_at(const u8* logits, i64 at) {
#if VALUE_BYTES == 2
    const u32 high = reinterpret_cast<const u16*>(logits)[at];
    return __uint_as_float(high << 16);
#else
    return reinterpret_cast<const float*>(logits)[at];
#endif
}

// 0 and -0 are equal.
__device__ __forceinline__ u32 order_of(float x) {
    if (x != x) return ~0u;
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ u64 key_of(const exchange::Call& call, const Keys& keys, int row) {
    const i64 first = call.me * keys.slice;
    if (first >= keys.vocabulary) return 0;
    const i64 at = static_cast<i64>(call.local) * call.group->ranks * keys.rows + row;
    const i64 best = keys.best[at];
    const u32 high = order_of(logit_at(keys.logits, at * keys.pitch + best));
    return static_cast<u64>(high) << 32 | static_cast<u32>(~(first + best));
}

// The two words of a row that `from` tells `at`.
__device__ __forceinline__ u64* letter(const exchange::Call& call, const Keys& keys, int at, int from,
                                       int row) {
    u64* mailbox = reinterpret_cast<u64*>(call.group->heap[at] + keys.mailbox);
    const i64 box = static_cast<i64>(call.epoch & 1) * call.group->ranks + from;
    return mailbox + (box * keys.room + row) * 2;
}

__device__ inline bool receive(const exchange::Call& call, const u64* word, int peer, u32& half) {
    const u64 start = ptx::global_timer();
    for (u32 polls = 1;; ++polls) {
        const u64 told = ptx::load_relaxed_sys(word);
        half = static_cast<u32>(told);
        if (static_cast<u32>(told >> 32) == call.epoch) return true;
        if (exchange::stop_waiting(call, kKeysArrived, peer, start, polls)) return false;
    }
}

extern "C" __global__ void __launch_bounds__(256)
    choose_tokens(const __grid_constant__ exchange::Group group, const __grid_constant__ Keys keys) {
    const exchange::Call call = exchange::begin_call(group, kChoose);
    const u64 flag = static_cast<u64>(call.epoch) << 32;
    bool fine = !exchange::leave_if_failed(call, kKeysArrived);
    for (int i = static_cast<int>(threadIdx.x); fine && i < group.ranks * keys.rows; i += 256) {
        const int owner = i / keys.rows;
        if (owner == call.me) continue;
        const u64 key = key_of(call, keys, i);
        u64* words = letter(call, keys, owner, call.me, i % keys.rows);
        ptx::store_relaxed_sys(words, flag | static_cast<u32>(key));
        ptx::store_relaxed_sys(words + 1, flag | key >> 32);
    }
    // Of a call that failed: some token that there is. The status says what happened.
    for (int row = static_cast<int>(threadIdx.x); row < keys.rows; row += 256) {
        u64 most = key_of(call, keys, call.me * keys.rows + row);
        for (int peer = 0; fine && peer < group.ranks; ++peer) {
            if (peer == call.me) continue;
            const u64* words = letter(call, keys, call.me, peer, row);
            u32 low = 0, high = 0;
            fine = receive(call, words, peer, low) && receive(call, words + 1, peer, high);
            const u64 key = static_cast<u64>(high) << 32 | low;
            if (fine && key > most) most = key;
        }
        keys.token[static_cast<i64>(call.local) * keys.rows + row] = most ? static_cast<u32>(~most) : 0;
    }
    exchange::end_call(call);
}

}  // namespace rows
