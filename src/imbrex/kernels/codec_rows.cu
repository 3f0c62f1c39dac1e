// Rows to and from the block codecs: a warp, or a block of kThreads, takes a row, and holds it in registers where it fits.
#include "codec_formats.cuh"

constexpr int kThreads = 256, kValues = Format::kValues, kUnits = 32 / kValues;

// `wide`: the block takes one row, else each warp takes one.
struct Team {
    int size, lane, row;

    __device__ explicit Team(int wide) {
        const int thread = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
        size = wide ? kThreads : 32;
        lane = wide ? thread : thread % 32;
        row = wide ? block : block * (kThreads / 32) + thread / 32;
    }
};

// The largest of all threads of the team.
__device__ __forceinline__ u32 team_max(u32 amax, bool wide) {
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

__device__ __forceinline__ void load_chunk(Held& held, const u8* row, int first, const Team& team, int units) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const int unit = first + u * team.size + team.lane;
        held[u].clear();
        if (unit < units) held[u].load(row, unit);
    }
}

__device__ __forceinline__ void encode_chunk(const Held& held, float scale, u8* to, int first, const Team& team, int width) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
        const int unit = first + u * team.size + team.lane;
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
    const Team team(wide);
    if (team.row >= num_rows) return;
    const u8* from = rows + team.row * stride;
    const int units = width / kValues, chunk = team.size * kUnits;
    const bool once = units <= chunk;
    Held held;
    float scale = 0.0f;
    if (Format::kRowScale) {
        u32 amax = 0;
        for (int first = 0; first < units; first += chunk) {
            load_chunk(held, from, first, team, units);
#pragma unroll
            for (int u = 0; u < kUnits; ++u) amax = max(amax, largest(held[u]));
        }
        scale = Format::row_scale(team_max(amax, wide));
    }
    for (int first = 0; first < units; first += chunk) {
        if (!Format::kRowScale || !once) load_chunk(held, from, first, team, units);
        encode_chunk(held, scale, encoded + team.row * pitch, first, team, width);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads)
    decode_rows(const u8* encoded, i64 pitch, u8* rows, i64 stride, int num_rows, int width, int wide) {
    const Team team(wide);
    if (team.row >= num_rows) return;
    const u8* from = encoded + team.row * pitch;
    u8* to = rows + team.row * stride;
    const int units = width / kValues;
    for (int first = 0; first < units; first += team.size * kUnits) {
#pragma unroll
        for (int u = 0; u < kUnits; ++u) {
            const int unit = first + u * team.size + team.lane;
            if (unit >= units) continue;
            float v[kValues];
            Format::decode(from, unit, width, v);
            Unit<kValues> out;
            out.set(v);
            out.store(to, unit);
        }
    }
}
