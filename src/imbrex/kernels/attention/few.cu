// Attention of one token a row over a static cache, from the product of queries, keys and values to the
// outputs of the heads in one launch: queries and keys normed by head where wanted and turned by position,
// the token's own key and value put into the cache, keys split over blocks, the parts put together by whoever
// ends last. bf16, heads of 128 values, softmax in float32 powers of 2. Defines:
//   QUERIES  heads of queries to one of keys: 1, 2, 4 or 8
//   NORMED   0 or 1
//
// What is older than the token is in the cache already, from calls that have long ended, so a block asks for
// its first two tiles of keys and values before it waits for the kernel that makes the token's own. They are
// small enough to stand beside the weights of gemm/few.cu.
//
// A block is a part of one row's keys and one head of them. Its three warps have 16 keys each of a tile of
// 48, with a maximum and sums of their own, that are put together behind the last tile, then the blocks'.
// Queries are the 16 rows of an instruction, of which QUERIES are there. Thread t of four reads eight values
// of a query and of a key alike, from 8 t on of every 32. The pieces of 16 bytes of a line are exchanged, a
// key's with the other half of four where its line is odd, a value's by line % 8, so that what is read at
// once lies in different banks.
//
// Example: 8 rows, 4 heads of keys, 8 parts: 256 blocks. At position 1024 a part has 136 keys; the last one
// from 952 to 1024, the token's own among them, in two tiles.
#include "ptx/mma.cuh"

namespace attention {

constexpr int kWarps = 3, kThreads = 32 * kWarps, kHead = 128, kShared = QUERIES, kTile = 48, kStages = 2;
constexpr bool kNormed = NORMED;
constexpr int kLine = 2 * kHead, kPieces = kHead / 8, kStage = 2 * kTile * kLine;  // keys, then values
constexpr int kQueryPitch = kLine + 64;
constexpr int kQueries = kStages * kStage;                // [kShared][kQueryPitch]
constexpr int kOwn = kQueries + kShared * kQueryPitch;    // the token's own key, then its value
constexpr int kTicket = kOwn + 2 * kLine;
// Floats of a part: sums, maxima, sums of weights.
constexpr int kPart = kShared * kHead + (2 * kShared + 3) / 4 * 4;
constexpr int kMostParts = 8;                 // of a row and group
constexpr int kJobs = (kShared + 2 + kWarps - 1) / kWarps;
constexpr float kNone = -1e30f;  // a maximum of no keys
constexpr u32 kAll = 0xffffffffu;

struct Few {
    u8* qkv;        // [T, heads + 2 groups, kHead]
    u8* q_norm;     // [kHead]
    u8* k_norm;     // [kHead]
    u8* turn;       // [T, 2 kHead]: cos, cos, -sin, sin
    u8* keys;       // [rows of all slots, groups, kHead]
    u8* values;     // the same
    i64* position;  // [T]
    i64* row;       // [T], of the token in the cache; the row's first token is `position` rows before
    float* parts;   // [T, groups, splits, kPart]
    u32* tickets;   // [T, groups], zeros before and after
    u8* y;          // [T, heads, kHead]
    int groups;
    int splits;
    float eps;
};

struct Range {
    int begin, end, own;  // keys of this block; own: the token's
    i64 first;            // row of the cache of key 0
};

// Where piece `piece` of a line is.
__device__ __forceinline__ int key_at(int line, int piece) {
    return line * kLine + 16 * (piece ^ (line % 2 * 4));
}
__device__ __forceinline__ int value_at(int line, int piece) {
    return (kTile + line) * kLine + 16 * (piece ^ (line % 8));
}

// A tile from key `key` on, but for the token's own, which is zeros.
__device__ __forceinline__ void ask(const Few& few, const Range& range, int group, u32 to, int key) {
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kPieces; i += kThreads) {
        const int line = i / kPieces, piece = i % kPieces;
        const bool wanted = key + line < min(range.end, range.own);
        const i64 row = range.first + (wanted ? key + line : 0);
        const i64 at = (row * few.groups + group) * kLine + 16 * piece;
        ptx::copy_async_or_zero(to + key_at(line, piece), few.keys + at, wanted);
        ptx::copy_async_or_zero(to + value_at(line, piece), few.values + at, wanted);
    }
}

__device__ __forceinline__ float4 floats(uint2 v) {
    return {ptx::bf16_low(v.x), ptx::bf16_high(v.x), ptx::bf16_low(v.y), ptx::bf16_high(v.y)};
}
__device__ __forceinline__ uint2 packed(float4 v) {
    return {ptx::pack_bf16(v.x, v.y), ptx::pack_bf16(v.z, v.w)};
}
__device__ __forceinline__ float4 other_half(float4 v) {
    return {__shfl_xor_sync(kAll, v.x, 16), __shfl_xor_sync(kAll, v.y, 16), __shfl_xor_sync(kAll, v.z, 16),
            __shfl_xor_sync(kAll, v.w, 16)};
}

// What a head is made with, four values a lane; none of it is this step's.
struct Maker {
    float4 cos, sin, q_norm, k_norm;

    __device__ __forceinline__ Maker(const Few& few, int token) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const uint2* turn = reinterpret_cast<const uint2*>(few.turn + static_cast<i64>(token) * (2 * kLine));
        cos = floats(turn[lane]), sin = floats(turn[32 + lane]);
        if constexpr (!kNormed) return;
        q_norm = floats(reinterpret_cast<const uint2*>(few.q_norm)[lane]);
        k_norm = floats(reinterpret_cast<const uint2*>(few.k_norm)[lane]);
    }
    // A head by a warp: normed and turned.
    __device__ __forceinline__ uint2 operator()(const Few& few, uint2 head, const float4& norm) const {
        float4 v = floats(head);
        if constexpr (kNormed) {
            float all = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
#pragma unroll
            for (int offset = 16; offset > 0; offset /= 2) all += __shfl_xor_sync(kAll, all, offset);
            const float by = 1.0f / sqrtf(all / kHead + few.eps);
            v = {v.x * by * norm.x, v.y * by * norm.y, v.z * by * norm.z, v.w * by * norm.w};
        }
        const float4 other = other_half(v);
        return packed({v.x * cos.x + other.x * sin.x, v.y * cos.y + other.y * sin.y,
                       v.z * cos.z + other.z * sin.z, v.w * cos.w + other.w * sin.w});
    }
};

// The block's queries, and where it has the token's own key, that and its value, into shared memory; the
// latter two into the cache. A warp asks for all its heads before it makes the first.
__device__ __forceinline__ void make(const Few& few, const Range& range, const Maker& maker, u8* memory,
                                     int token, int group) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int heads = kShared * few.groups;
    const bool has_own = range.begin <= range.own && range.own < range.end;
    const int jobs = has_own ? kShared + 2 : kShared;
    const u8* qkv = few.qkv + static_cast<i64>(token) * (heads + 2 * few.groups) * kLine;
    const i64 at = ((range.first + range.own) * few.groups + group) * kLine;
    uint2 raw[kJobs] = {};
#pragma unroll
    for (int i = 0; i < kJobs; ++i) {
        const int job = warp + kWarps * i;
        const int head = job < kShared ? group * kShared + job : heads + (job - kShared) * few.groups + group;
        if (job < jobs) raw[i] = reinterpret_cast<const uint2*>(qkv + head * kLine)[lane];
    }
#pragma unroll
    for (int i = 0; i < kJobs; ++i) {
        const int job = warp + kWarps * i;
        if (job >= jobs) break;
        if (job < kShared) {
            const uint2 query = maker(few, raw[i], maker.q_norm);
            reinterpret_cast<uint2*>(memory + kQueries + job * kQueryPitch)[lane] = query;
            continue;
        }
        const bool is_key = job == kShared;
        const uint2 own = is_key ? maker(few, raw[i], maker.k_norm) : raw[i];
        reinterpret_cast<uint2*>(memory + kOwn + (job - kShared) * kLine)[lane] = own;
        reinterpret_cast<uint2*>((is_key ? few.keys : few.values) + at)[lane] = own;
    }
}

// The token's own key and value into a tile whose keys begin at `key`.
__device__ __forceinline__ void place_own(const Range& range, u8* memory, u8* stage, int key) {
    const int line = range.own - key, piece = static_cast<int>(threadIdx.x) % kPieces;
    if (threadIdx.x >= 2 * kPieces) return;
    const uint4 own = reinterpret_cast<const uint4*>(memory + kOwn)[threadIdx.x];
    const int at = threadIdx.x < kPieces ? key_at(line, piece) : value_at(line, piece);
    *reinterpret_cast<uint4*>(stage + at) = own;
}

// Of a warp, for query lane / 4: the maximum, this lane's sum of weights, sums of values 8 i + 2 (lane % 4)
// and the next.
struct Sums {
    float most = kNone, weights = 0.0f, values[kHead / 8][4] = {};
};

using Query = uint4[kHead / 32];

// The warp's 16 keys of a tile, from `key` on, of which those before `end` count: scores, weights, values.
__device__ __forceinline__ void attend(const Query& query, u32 stage, int key, int end, Sums& sums) {
    const int lane = static_cast<int>(threadIdx.x) % 32, first_line = static_cast<int>(threadIdx.x) / 32 * 16;
    float scores[2][4] = {};
#pragma unroll
    for (int step = 0; step < kHead / 32; ++step)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 k =
                ptx::load_shared(stage + key_at(first_line + 8 * half + lane / 4, 4 * step + lane % 4));
            const u32 first[4] = {query[step].x, 0, query[step].y, 0};
            const u32 second[4] = {query[step].z, 0, query[step].w, 0};
            ptx::mma_bf16(scores[half], first, k.x, k.y);
            ptx::mma_bf16(scores[half], second, k.z, k.w);
        }
    float most = sums.most;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float& score = scores[i / 2][i % 2];
        const bool there = key + i / 2 * 8 + lane % 4 * 2 + i % 2 < end;
        score = there ? score * (1.4426950408889634f * 0.08838834764831845f) : kNone;  // log2(e) / sqrt(128)
        most = fmaxf(most, score);
    }
    most = fmaxf(most, __shfl_xor_sync(kAll, most, 1));
    most = fmaxf(most, __shfl_xor_sync(kAll, most, 2));
    const float before = exp2f(sums.most - most);
    float weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) weights[i] = exp2f(scores[i / 2][i % 2] - most);
    sums.most = most;
    sums.weights = sums.weights * before + (weights[0] + weights[1]) + (weights[2] + weights[3]);
    const u32 by[4] = {ptx::pack_bf16(weights[0], weights[1]), 0, ptx::pack_bf16(weights[2], weights[3]), 0};
#pragma unroll
    for (int pair = 0; pair < kHead / 16; ++pair) {
        u32 v[4];
        ptx::load_matrix_x4_transposed(stage + value_at(first_line + lane % 16, 2 * pair + lane / 16), v);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float(&to)[4] = sums.values[2 * pair + half];
            to[0] *= before, to[1] *= before;
            ptx::mma_bf16(to, by, v[2 * half], v[2 * half + 1]);
        }
    }
}

// What a warp has, as a part: float32 [kShared][kHead], maxima, sums of weights.
__device__ __forceinline__ void leave(float* part, Sums& sums) {
    const int lane = static_cast<int>(threadIdx.x) % 32, query = lane / 4;
    sums.weights += __shfl_xor_sync(kAll, sums.weights, 1);
    sums.weights += __shfl_xor_sync(kAll, sums.weights, 2);
    if (query >= kShared) return;
#pragma unroll
    for (int i = 0; i < kHead / 8; ++i)
        *reinterpret_cast<float2*>(part + query * kHead + 8 * i + lane % 4 * 2) = {sums.values[i][0],
                                                                                  sums.values[i][1]};
    if (lane % 4 == 0) {
        part[kShared * kHead + query] = sums.most;
        part[kShared * (kHead + 1) + query] = sums.weights;
    }
}

__device__ __forceinline__ void add(float4& sum, float by, const float4& v) {
    sum = {fmaf(by, v.x, sum.x), fmaf(by, v.y, sum.y), fmaf(by, v.z, sum.z), fmaf(by, v.w, sum.w)};
}

// Parts together, at most kMost: into a part, or with `y` divided into the outputs of the group's heads. A
// thread has four values of a query, and asks for all parts at once.
template <int kMost>
__device__ __forceinline__ void gather(const float* parts, int count, float* into, u8* y) {
#pragma unroll 2
    for (int i = static_cast<int>(threadIdx.x); i < kShared * kHead / 4; i += kThreads) {
        const int query = i / (kHead / 4);
        float most[kMost], weights[kMost], largest = kNone, all = 0.0f;
        float4 values[kMost], sum = {};
#pragma unroll
        for (int k = 0; k < kMost; ++k) {
            const float* part = parts + (k < count ? k : 0) * kPart;
            most[k] = k < count ? part[kShared * kHead + query] : kNone;
            weights[k] = part[kShared * (kHead + 1) + query];
            values[k] = reinterpret_cast<const float4*>(part)[i];
        }
#pragma unroll
        for (int k = 0; k < kMost; ++k) largest = fmaxf(largest, most[k]);
#pragma unroll
        for (int k = 0; k < kMost; ++k) {
            const float by = exp2f(most[k] - largest);
            all = fmaf(by, weights[k], all);
            add(sum, by, values[k]);
        }
        if (y != nullptr) {
            const float by = 1.0f / all;
            reinterpret_cast<uint2*>(y)[i] = packed({sum.x * by, sum.y * by, sum.z * by, sum.w * by});
            continue;
        }
        reinterpret_cast<float4*>(into)[i] = sum;
        if (i % (kHead / 4) == 0) {
            into[kShared * kHead + query] = largest;
            into[kShared * (kHead + 1) + query] = all;
        }
    }
}

// Whether this block is the last of its row and group.
__device__ __forceinline__ bool is_last(const Few& few, u8* memory, int unit) {
    u32* told = reinterpret_cast<u32*>(memory + kTicket);
    ptx::fence_gpu();
    __syncthreads();
    if (threadIdx.x == 0) *told = ptx::add_acq_rel_gpu(few.tickets + unit, 1);
    __syncthreads();
    if (*told + 1 != static_cast<u32>(few.splits)) return false;
    ptx::fence_gpu();
    if (threadIdx.x == 0) few.tickets[unit] = 0;
    return true;
}

__device__ __forceinline__ Range range_of(const Few& few, int token, int split) {
    const int own = static_cast<int>(few.position[token]), used = own + 1;
    const int keys = ((used + few.splits - 1) / few.splits + 7) / 8 * 8, begin = split * keys;
    return {begin, min(begin + keys, used), own, few.row[token] - own};
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) attend_few(const __grid_constant__ Few few) {
    u8* memory = ptx::shared_memory();
    const u32 ring = ptx::smem_u32(memory);
    const int unit = static_cast<int>(blockIdx.x) / few.splits;
    const int split = static_cast<int>(blockIdx.x) % few.splits;
    const int token = unit / few.groups, group = unit % few.groups;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    ptx::launch_dependents();
    const Range range = range_of(few, token, split);
    const int tiles = (range.end - range.begin + kTile - 1) / kTile;  // none where nothing is left
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
        if (stage < tiles) ask(few, range, group, ring + stage * kStage, range.begin + stage * kTile);
        ptx::copy_commit();
    }
    const Maker maker(few, token);
    ptx::wait_for_launches();
    make(few, range, maker, memory, token, group);
    __syncthreads();
    Query query = {};
    if (lane / 4 < kShared)
#pragma unroll
        for (int step = 0; step < kHead / 32; ++step)
            query[step] =
                ptx::load_shared(ring + kQueries + lane / 4 * kQueryPitch + 64 * step + lane % 4 * 16);
    Sums sums;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
        const int stage = tile % kStages * kStage, key = range.begin + tile * kTile;
        ptx::copy_wait<kStages - 1>();
        __syncthreads();
        if (range.own >= key && range.own < min(key + kTile, range.end)) {
            place_own(range, memory, memory + stage, key);
            __syncthreads();
        }
        if (key + 16 * warp < range.end) attend(query, ring + stage, key + 16 * warp, range.end, sums);
        __syncthreads();
        if (tile + kStages < tiles) ask(few, range, group, ring + stage, key + kStages * kTile);
        ptx::copy_commit();
    }
    ptx::copy_wait<0>();
    float* parts = reinterpret_cast<float*>(memory);
    leave(parts + warp * kPart, sums);
    __syncthreads();
    u8* y = few.y + static_cast<i64>(unit) * kShared * kLine;
    float* own = few.parts + static_cast<i64>(blockIdx.x) * kPart;
    gather<kWarps>(parts, kWarps, own, few.splits == 1 ? y : nullptr);
    if (few.splits > 1 && is_last(few, memory, unit))
        gather<kMostParts>(own - static_cast<i64>(split) * kPart, few.splits, nullptr, y);
}

}  // namespace attention
