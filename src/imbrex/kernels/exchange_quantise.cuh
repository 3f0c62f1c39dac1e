// Rows of bf16 in the mover's ring become rows of the fp8 codec, in place, between the load and the stores.
//
// A team of warps has one row in turn. A round reads 512 or 1024 values a warp and then, when all of the team have read, writes as many
// bytes, which this or earlier rounds have read.
#pragma once
#include "exchange_fp8.cuh"
#include "exchange_rows.cuh"

constexpr int kStep = 512;  // values a warp converts at once, 16 a lane, 8 lanes a block
#ifndef TEAM
#define TEAM 1
#endif
constexpr int kTeam = TEAM;          // warps that share a row
constexpr int kTeamsBarrier = 1;     // the first of their barriers

__device__ __forceinline__ void meet_team(int team) {
    if (kTeam > 1)
        ptx::named_barrier(kTeamsBarrier + team, 32 * kTeam);
    else
        __syncwarp();
}

// kSteps steps together, so that their chains of dependent instructions overlap. A lane has two words of 16 bytes side by side; every
// other four lanes read them in the other order, which keeps eight lanes on different banks. Not `wanted`: only meet.
template <int kSteps>
__device__ __forceinline__ void quantise_steps(u32 row, float* scales, int first, int team, bool wanted = true) {
    const int lane = static_cast<int>(ptx::lane_id()), swap = lane >> 2 & 1;
    uint4 value[kSteps][2];
    u32 amax[kSteps];
    Divisor d[kSteps];
    bool plain = true;
    if (wanted) {
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
#pragma unroll
            for (int j = 0; j < 2; ++j) value[i][j] = ptx::load_shared(row + 2 * (first + i * kStep + 16 * lane) + 16 * (j ^ swap));
#pragma unroll
        for (int i = 0; i < kSteps; ++i) amax[i] = larger(larger_of_four(value[i][0]), larger_of_four(value[i][1]));
    }
    meet_team(team);
    if (!wanted) return;
    for (int step = 1; step < 8; step *= 2)
#pragma unroll
        for (int i = 0; i < kSteps; ++i) amax[i] = larger(amax[i], __shfl_xor_sync(0xffffffffu, amax[i], step));
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        d[i] = divisor_of(amax[i]);
        plain &= d[i].plain;
    }
    plain = __all_sync(0xffffffffu, plain);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
        const uint2 one = eight_values(value[i][0], d[i], plain), other = eight_values(value[i][1], d[i], plain);
        const uint2 low = swap ? other : one, high = swap ? one : other;
        ptx::store_shared(row + first + i * kStep + 16 * lane, {low.x, low.y, high.x, high.y});
        if (lane % 8 == 0) scales[(first + i * kStep) / kBlock + lane / 8] = d[i].scale;
    }
}

// One row, all lanes of warp `part` of its team; `scales`: of this team, D / 128 floats.
__device__ inline void quantise_row(u32 row, float* scales, int width, int team, int part) {
    const int lane = static_cast<int>(ptx::lane_id());
    int first = 0;
    for (; first + 2 * kTeam * kStep <= width; first += 2 * kTeam * kStep) quantise_steps<2>(row, scales, first + 2 * part * kStep, team);
    for (; first < width; first += kTeam * kStep) quantise_steps<1>(row, scales, first + part * kStep, team, first + part * kStep < width);
    meet_team(team);
    for (int i = 4 * (lane + 32 * part); i < width / kBlock; i += 128 * kTeam)
        ptx::store_shared(row + width + 4 * i, {__float_as_uint(scales[i]), __float_as_uint(scales[i + 1]), __float_as_uint(scales[i + 2]),
                                                __float_as_uint(scales[i + 3])});
    if (kTeam > 1) meet_team(team);  // the next row's scales
    ptx::fence_async_shared();
}

// A quantising warp of team `number` among `teams`, which has every `teams`-th row. The stages are a multiple of the teams, so that a
// slot always meets the same team: one that met another's could take an older phase for this one. `scales`: shared, of this team.
__device__ inline void quantise_rows(const Call& call, const Ring& ring, int number, int teams, int part, float* scales) {
    int turn = 0;  // whose the next valid item is
    u32 slot = 0, round = 0;
    for (u32 segment_number = 0;; ++segment_number) {
        const u32 buffer = segment_number % kSegments;
        if (!wait_stage(call, ring.segment_full + 8 * buffer, (segment_number / kSegments) & 1)) return;
        SegmentHead* segment = segment_of(ring, segment_number);
        const int count = segment->count;
        if (count == 0) return;
        for (int i = 0; i < count; ++i) {
            if (item_of(ring, segment, i)->targets == 0) continue;
            if (turn == number) {
                if (!wait_stage(call, ring.slot_loaded + 8 * slot, round & 1)) return;
                quantise_row(ring.slots + slot * ring.slot_bytes, scales, ring.row_bytes / 2, number, part);
                ptx::mbarrier_arrive(ring.slot_full + 8 * slot);
            }
            turn = turn + 1 < teams ? turn + 1 : 0;
            if (++slot == static_cast<u32>(ring.stages)) {
                slot = 0;
                ++round;
            }
        }
        ptx::mbarrier_arrive(ring.segment_empty + 8 * buffer);
    }
}
