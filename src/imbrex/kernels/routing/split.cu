// The balanced split alone, for transports that count on the device and for tests: one block. See split.cuh.
#include "routing/split.cuh"

namespace route {

constexpr int kSplitThreads = 256;

struct Split {
    const i64* counts;  // [sources, E]
    i64* shares;        // [sources, S]
    const int* first_replica;
    const int* replica_slots;
    const int* rank_offsets;
    int experts;
    int slots;
    int ranks;
    int sources;
    int room;
};

extern "C" __global__ void __launch_bounds__(kSplitThreads, 1)
    split_counts(const __grid_constant__ Split split) {
    const Tables t{split.first_replica, split.replica_slots, split.rank_offsets,
                   split.experts,       split.ranks,         split.sources};
    int* counts = reinterpret_cast<int*>(ptx::shared_memory());
    const int all = split.sources * split.experts, thread = static_cast<int>(threadIdx.x);
    const Flow f = carve_flow(ptx::shared_memory() + 4 * all, split.ranks, split.sources, split.room);
    for (int x = thread; x < all; x += kSplitThreads) counts[x] = static_cast<int>(split.counts[x]);
    for (int x = thread; x < split.sources * split.slots; x += kSplitThreads) split.shares[x] = 0;
    __syncthreads();
    split_choices(
        t, f, thread, kSplitThreads, [&](int w, int e) { return counts[w * split.experts + e]; },
        [] { __syncthreads(); });
    for (int x = thread; x < all; x += kSplitThreads) {
        const int w = x / split.experts, e = x - w * split.experts, first = split.first_replica[e];
        if (split.first_replica[e + 1] - first == 1)
            split.shares[static_cast<i64>(w) * split.slots + split.replica_slots[first]] = counts[x];
    }
    for (int i = thread; i < *f.several; i += kSplitThreads) {
        const int e = f.expert[i], first = split.first_replica[e], slots = split.first_replica[e + 1] - first;
        for (int w = 0; w < split.sources; ++w)
            for (int p = 0; p < slots; ++p)
                split.shares[static_cast<i64>(w) * split.slots + split.replica_slots[first + p]] =
                    f.share[w * 2 * f.room + f.start[i] + p];
    }
}

}  // namespace route
