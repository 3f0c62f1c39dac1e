// Choices that go with compact rows: packed into rows of bytes before they cross, and read where they came,
// as programs for DeepEP want them: local experts, and how many choices each has. One launch each, in place
// of some thirty operators of torch.
//
// A label is K ids, each one higher, so that a row to spare, which is zero, reads -1; then K weights.
//
// Example, K = 2, rank 1 of experts 4 to 7: ids {5, 2}, weights {.5, .25} cross as {6, 3, .5, .25} and read
// ids {1, -1}, weights {.5, 0}; its expert 1 has one choice more.
#include "ptx/exchange.cuh"

namespace rows {

struct Labels {
    i64* ids;        // [count, K]
    float* weights;  // [count, K]
    u8* rows;        // [count, pitch]
    int* counts;     // [experts], zero before; null: nobody counts
    const i64* source;  // [count]; where a row is from, -1: it is to spare, whatever it holds; null: read it
    int count, choices, pitch;
    int first, experts;  // of this rank
};

__device__ __forceinline__ u32* label_of(const Labels& labels, int i) {
    return reinterpret_cast<u32*>(labels.rows + static_cast<i64>(i / labels.choices) * labels.pitch) +
           i % labels.choices;
}

extern "C" __global__ void __launch_bounds__(256) pack_labels(const __grid_constant__ Labels labels) {
    const int all = labels.count * labels.choices;
    for (int i = static_cast<int>(blockIdx.x) * 256 + static_cast<int>(threadIdx.x); i < all;
         i += static_cast<int>(gridDim.x) * 256) {
        u32* label = label_of(labels, i);
        label[0] = static_cast<u32>(labels.ids[i] + 1);
        label[labels.choices] = __float_as_uint(labels.weights[i]);
    }
}

extern "C" __global__ void __launch_bounds__(256) read_labels(const __grid_constant__ Labels labels) {
    const int all = labels.count * labels.choices;
    for (int i = static_cast<int>(blockIdx.x) * 256 + static_cast<int>(threadIdx.x); i < all;
         i += static_cast<int>(gridDim.x) * 256) {
        const u32* label = label_of(labels, i);
        const bool spare = labels.source != nullptr && labels.source[i / labels.choices] < 0;
        const int local = spare ? -1 : static_cast<int>(label[0]) - 1 - labels.first;
        const bool here = local >= 0 && local < labels.experts;
        labels.ids[i] = here ? local : -1;
        labels.weights[i] = here ? __uint_as_float(label[labels.choices]) : 0.0f;
        if (here && labels.counts != nullptr) atomicAdd(&labels.counts[local], 1);
    }
}

}  // namespace rows
