// Attention of one token a row over a static cache, from the product of queries, keys and values to the heads'
// outputs in one launch: queries and keys normed by head where wanted and turned by position, the token's own
// key and value put into the cache, keys split over blocks, the parts put together by whoever ends last.
// bf16, heads of 128 values, softmax in float32 powers of 2. Defines:
//   QUERIES  heads of queries to one of keys: 1, 2, 4 or 8
//   NORMED   0 or 1
//
// What is older than the token is in the cache already, so a block asks for its first two tiles of keys and
// values before it waits for the kernel that makes the token's own.
//
// A block is a part of one row's keys and one head of them. Its four warps have 16 keys each of a tile of 64,
// with a maximum and sums of their own, that are put together behind the last tile, then the blocks'. Queries
// are the 16 rows of an instruction, of which QUERIES are there. As in gemm/few.cu a thread reads eight values
// of queries and of keys alike. Rows of keys stand 64 bytes beside a multiple of 128, those of values 16: so
// neither 16 bytes of two keys nor those of eight values lie in one bank.
//
// Example: 8 rows, 4 heads of keys, 8 parts: 256 blocks. At position 1024 a part has 136 keys; the last one
// from 952 to 1024, the token's own among them, in two tiles.
#include "ptx/mma.cuh"

namespace attention {

constexpr int kWarps = 4, kThreads = 32 * kWarps, kHead = 128, kShared = QUERIES, kTile = 64, kStages = 2;
constexpr bool kNormed = NORMED;
constexpr int kKeyPitch = 2 * kHead + 64, kValuePitch = 2 * kHead + 16;
constexpr int kStage = kTile * (kKeyPitch + kValuePitch);
constexpr int kQueries = kStages * kStage;         // [kShared][kKeyPitch]
constexpr int kOwn = kQueries + kShared * kKeyPitch;  // the token's own key, then its value
constexpr int kTicket = kOwn + 4 * kHead;
constexpr int kPart = kShared * (kHead + 2);  // floats of a part: sums, maxima, sums of weights
constexpr float kNone = -1e30f;               // a maximum of no keys
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

// A tile from key `key` on, but for the token's own, which is zeros.
__device__ __forceinline__ void ask(const Few& few, const Range& range, int group, u32 to, int key) {
    constexpr int kPieces = kHead / 8;
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x); i < kTile * kPieces; i += kThreads) {
        const int line = i / kPieces, piece = i % kPieces;
        const bool wanted = key + line < min(range.end, range.own);
        const i64 row = range.first + (wanted ? key + line : 0);
        const i64 at = (row * few.groups + group) * (2 * kHead) + 16 * piece;
        ptx::copy_async_or_zero(to + line * kKeyPitch + 16 * piece, few.keys + at, wanted);
        ptx::copy_async_or_zero(to + kTile * kKeyPitch + line * kValuePitch + 16 * piece, few.values + at,
                                wanted);
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

// A head of the token by a warp, four values a lane: normed and turned.
__device__ __forceinline__ uint2 made(const Few& few, const u8* head, const u8* norm, int token) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float4 v = floats(reinterpret_cast<const uint2*>(head)[lane]);
    if constexpr (kNormed) {
        float all = v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) all += __shfl_xor_sync(kAll, all, offset);
        const float by = 1.0f / sqrtf(all / kHead + few.eps);
        const float4 weight = floats(reinterpret_cast<const uint2*>(norm)[lane]);
        v = {v.x * by * weight.x, v.y * by * weight.y, v.z * by * weight.z, v.w * by * weight.w};
    }
    const uint2* turn = reinterpret_cast<const uint2*>(few.turn + static_cast<i64>(token) * (4 * kHead));
    const float4 cos = floats(turn[lane]), sin = floats(turn[32 + lane]), other = other_half(v);
    return packed({v.x * cos.x + other.x * sin.x, v.y * cos.y + other.y * sin.y,
                   v.z * cos.z + other.z * sin.z, v.w * cos.w + other.w * sin.w});
}

// The block's queries, and where it has the token's own key, that and its value, into shared memory; the
// latter two into the cache.
__device__ __forceinline__ void make(const Few& few, const Range& range, u8* memory, int token, int group) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int heads = kShared * few.groups;
    const u8* qkv = few.qkv + static_cast<i64>(token) * (heads + 2 * few.groups) * (2 * kHead);
    for (int head = warp; head < kShared; head += kWarps) {
        const u8* from = qkv + (group * kShared + head) * (2 * kHead);
        const uint2 query = made(few, from, few.q_norm, token);
        reinterpret_cast<uint2*>(memory + kQueries + head * kKeyPitch)[lane] = query;
    }
    if (range.begin > range.own || range.end <= range.own) return;
    const i64 at = ((range.first + range.own) * few.groups + group) * (2 * kHead);
    if (warp == kWarps - 1) {
        const uint2 key = made(few, qkv + (heads + group) * (2 * kHead), few.k_norm, token);
        reinterpret_cast<uint2*>(memory + kOwn)[lane] = key;
        reinterpret_cast<uint2*>(few.keys + at)[lane] = key;
    } else if (warp == kWarps - 2) {
        const u8* from = qkv + (heads + few.groups + group) * (2 * kHead);
        const uint2 value = reinterpret_cast<const uint2*>(from)[lane];
        reinterpret_cast<uint2*>(memory + kOwn + 2 * kHead)[lane] = value;
        reinterpret_cast<uint2*>(few.values + at)[lane] = value;
    }
}

// The token's own key and value into a tile whose keys begin at `key`.
__device__ __forceinline__ void place_own(const Range& range, u8* memory, u8* stage, int key) {
    const int line = range.own - key, thread = static_cast<int>(threadIdx.x);
    u8* to = thread < 32 ? stage + line * kKeyPitch : stage + kTile * kKeyPitch + line * kValuePitch;
    if (thread < 64)
        reinterpret_cast<uint2*>(to)[thread % 32] = reinterpret_cast<const uint2*>(memory + kOwn)[thread];
}

// Of a warp, for query lane / 4: the maximum, this lane's sum of weights, sums of values 8 i + 2 (lane % 4) and
// the next.
struct Sums {
    float most = kNone, weights = 0.0f, values[kHead / 8][4] = {};
};

using Query = uint4[kHead / 32];

// 16 keys from `key` on, of which those before `end` count: scores, weights, values.
__device__ __forceinline__ void attend(const Query& query, u32 keys, u32 values, int key, int end,
                                       Sums& sums) {
    const u32 lane = threadIdx.x % 32;
    float scores[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int step = 0; step < kHead / 32; ++step) {
            const uint4 k = ptx::load_shared(keys + (8 * half + lane / 4) * kKeyPitch + 64 * step + lane % 4 * 16);
            const u32 first[4] = {query[step].x, 0, query[step].y, 0};
            const u32 second[4] = {query[step].z, 0, query[step].w, 0};
            ptx::mma_bf16(scores[half], first, k.x, k.y);
            ptx::mma_bf16(scores[half], second, k.z, k.w);
        }
    float most = sums.most;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float& score = scores[i / 2][i % 2];
        const bool there = key + i / 2 * 8 + static_cast<int>(lane % 4) * 2 + i % 2 < end;
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
    const u32 own = values + (lane % 16) * kValuePitch + lane / 16 * 16;
#pragma unroll
    for (int pair = 0; pair < kHead / 16; ++pair) {
        u32 v[4];
        ptx::load_matrix_x4_transposed(own + 32 * pair, v);
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

// Parts together, by a thread for value threadIdx.x of every query: into a part, or with `y` divided into the
// outputs of the group's heads.
__device__ __forceinline__ void gather(const float* parts, int count, float* into, u16* y) {
    const int value = static_cast<int>(threadIdx.x);
    for (int query = 0; query < kShared; ++query) {
        float most = kNone, weights = 0.0f, sum = 0.0f;
        for (int i = 0; i < count; ++i) most = fmaxf(most, parts[i * kPart + kShared * kHead + query]);
        for (int i = 0; i < count; ++i) {
            const float* part = parts + i * kPart;
            const float by = exp2f(part[kShared * kHead + query] - most);
            weights = fmaf(by, part[kShared * (kHead + 1) + query], weights);
            sum = fmaf(by, part[query * kHead + value], sum);
        }
        if (y != nullptr) {
            y[query * kHead + value] = static_cast<u16>(ptx::pack_bf16(sum / weights, 0.0f));
            continue;
        }
        into[query * kHead + value] = sum;
        if (value == 0) into[kShared * kHead + query] = most, into[kShared * (kHead + 1) + query] = weights;
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

extern "C" __global__ void __launch_bounds__(kThreads) attend_few(const __grid_constant__ Few few) {
    u8* memory = ptx::shared_memory();
    const u32 ring = ptx::smem_u32(memory);
    const int unit = static_cast<int>(blockIdx.x) / few.splits, split = static_cast<int>(blockIdx.x) % few.splits;
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
    ptx::wait_for_launches();
    make(few, range, memory, token, group);
    __syncthreads();
    Query query = {};
    if (lane / 4 < kShared)
#pragma unroll
        for (int step = 0; step < kHead / 32; ++step)
            query[step] =
                ptx::load_shared(ring + kQueries + lane / 4 * kKeyPitch + 64 * step + lane % 4 * 16);
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
        if (key + 16 * warp < range.end)
            attend(query, ring + stage + 16 * warp * kKeyPitch,
                   ring + stage + kTile * kKeyPitch + 16 * warp * kValuePitch, key + 16 * warp, range.end, sums);
        __syncthreads();
        if (tile + kStages < tiles) ask(few, range, group, ring + stage, key + kStages * kTile);
        ptx::copy_commit();
    }
    ptx::copy_wait<0>();
    float* parts = reinterpret_cast<float*>(memory);
    leave(parts + warp * kPart, sums);
    __syncthreads();
    u16* y = reinterpret_cast<u16*>(few.y) + static_cast<i64>(unit) * kShared * kHead;
    float* own = few.parts + static_cast<i64>(blockIdx.x) * kPart;
    gather(parts, kWarps, own, few.splits == 1 ? y : nullptr);
    if (few.splits > 1 && is_last(few, memory, unit))
        gather(own - static_cast<i64>(split) * kPart, few.splits, nullptr, y);
}

}  // namespace attention
