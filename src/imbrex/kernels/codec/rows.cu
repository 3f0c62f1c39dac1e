// Rows to and from the block codecs. A piece is 32 * HELD values of a row, which a warp takes at once.
//
// Blocks have their own scale: a warp takes any piece of any row. Where the row has one, it is read twice, by
// a warp or, if it is `wide`, by all warps of a thread block: the second time it comes from the cache, and
// holding it would cost more in occupancy.
#include "codec/formats.cuh"

namespace codec {

constexpr int kThreads = 128, kValues = Format::kValues, kUnits = HELD / kValues, kPiece = 32 * kUnits;

struct Share {
    int row, first, step;  // units of the row: `first`, `first` + `step`, ... each the begin of a piece

    // By pieces, whatever row they belong to.
    __device__ static Share of_pieces(int width) {
        const u32 item = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
        const u32 pieces = static_cast<u32>((width / kValues + kPiece - 1) / kPiece);
        return {static_cast<int>(item / pieces), static_cast<int>(item % pieces) * kPiece, 1 << 30};
    }
    // By rows.
    __device__ static Share of_rows(bool wide) {
        const int warp = static_cast<int>(threadIdx.x) / 32, block = static_cast<int>(blockIdx.x),
                  warps = kThreads / 32;
        if (wide) return {block, warp * kPiece, warps * kPiece};
        return {block * warps + warp, 0, kPiece};
    }
};

// The largest of all threads that share the row.
__device__ __forceinline__ u32 row_max(u32 amax, bool wide) {
    amax = group_max<32>(amax);
    if (!wide) return amax;
    u32* of_warp = reinterpret_cast<u32*>(ptx::shared_memory());
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = amax;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kThreads / 32; ++warp) amax = max(amax, of_warp[warp]);
    return amax;
}

using Held = Unit<kValues>[kUnits];

__device__ __forceinline__ void load_piece(Held& held, const u8* row, int first, int units) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const int unit = first + u * 32 + lane;
        held[u].clear();
        if (unit < units) held[u].load(row, unit);
    }
}

__device__ __forceinline__ void encode_piece(const Held& held, float scale, u8* to, int first, int width) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const int unit = first + u * 32 + lane;
        u32 amax = 0;
        if constexpr (Format::kLanes > 0) amax = group_max<Format::kLanes>(largest(held[u]));
        if (unit >= width / kValues) continue;
        const bool leads = Format::kLanes > 0 ? unit % max(Format::kLanes, 1) == 0 : unit == 0;
        Format::encode(held[u], amax, scale, to, unit, width, leads);
    }
}

// rows: `stride` bytes apart. encoded: `pitch` bytes apart.
extern "C" __global__ void __launch_bounds__(kThreads)
    encode_rows(const u8* rows, i64 stride, u8* encoded, i64 pitch, int num_rows, int width, int wide) {
    const Share share = Format::kRowScale ? Share::of_rows(wide) : Share::of_pieces(width);
    if (share.row >= num_rows) return;
    const u8* from = rows + share.row * stride;
    u8* to = encoded + share.row * pitch;
    const int units = width / kValues;
    Held held;
    float scale = 0.0f;
    if constexpr (Format::kRowScale) {
        u32 amax = 0;
        for (int first = share.first; first < units; first += share.step) {
            load_piece(held, from, first, units);
#pragma unroll
            for (int u = 0; u < kUnits; ++u) amax = max(amax, largest(held[u]));
        }
        scale = Format::row_scale(row_max(amax, wide));
        for (int first = share.first; first < units; first += share.step) {
            load_piece(held, from, first, units);
            encode_piece(held, scale, to, first, width);
        }
    } else {
        load_piece(held, from, share.first, units);
        encode_piece(held, scale, to, share.first, width);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    decode_rows(const u8* encoded, i64 pitch, u8* rows, i64 stride, int num_rows, int width, int) {
    const Share share = Share::of_pieces(width);
    if (share.row >= num_rows) return;
    const u8* from = encoded + share.row * pitch;
    u8* to = rows + share.row * stride;
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const int unit = share.first + u * 32 + lane;
        if (unit >= width / kValues) continue;
        float v[kValues];
        Format::decode(from, unit, width, v);
        Unit<kValues> out;
        out.set(v);
        out.store(to, unit);
    }
}

}  // namespace codec
