// How high the tiles of a grouped GEMM are, 64 rows or 128: found on the device, since only there the rows of
// every expert are known. A tile of 64 rows is one whose second group of consumers has none, as an expert's
// last one often is.
//
// Blocks take tiles in turn, so a product lasts as many waves as there are tiles for a block. A wave of 64
// rows takes kLow of one of 128, a tile of 128 with 64 live rows or fewer kTail of a full one: fitted to 286
// measured products (docs/LOG.md), whose time with the height found is 1.002 of that with the better one
// (geometric mean, 1.08 at worst; always 128: 1.021 and 1.47).
//
// Example: experts of 128, 128, 128 and 128 rows, 16 columns of tiles, 132 blocks. 128 rows: 4 x 16 tiles,
// one wave, 1.00; 64 rows: 8 x 16, one wave, 0.65, so 64 (measured 77 and 63 us). With 129 rows instead of
// 128 in one of them (5 x 16 tiles, 0.93; 9 x 16 tiles, two waves, 1.30) it is 128. (Mixtral
// down of 512 rows: 64 high 106 us, 128 high 145.)
//
// Plain C++ but for the qualifiers, as gemm/scheduler.cuh.
#pragma once
#include "gemm/scheduler.cuh"

namespace gemm {

// Row tiles of either height, of some experts.
struct RowTiles {
    int high, low;
};

// Of experts `first`, `first + stride`, ...: a warp counts those of all its lanes.
IMBREX_BOTH RowTiles count_row_tiles(const int* ends, int experts, int first, int stride) {
    RowTiles found{0, 0};
#pragma unroll 4
    for (int expert = first; expert < experts; expert += stride) {
        const int rows = ends[expert] - (expert > 0 ? ends[expert - 1] : 0);
        found.high += (rows + 127) / 128, found.low += (rows + 63) / 64;
    }
    return found;
}

// `columns`: tiles side by side; `blocks`: that take tiles.
IMBREX_BOTH int tile_height(RowTiles rows, int columns, int blocks) {
    constexpr float kLow = 0.65f, kTail = 0.66f;
    const int high = rows.high, low = rows.low;
    if (low == high) return 128;
    const int tails = 2 * high - low;
    const float in_high = ((high * columns + blocks - 1) / blocks) * (1.f - (1.f - kTail) * tails / high);
    const float in_low = ((low * columns + blocks - 1) / blocks) * kLow;
    return in_low < in_high ? 64 : 128;
}

}  // namespace gemm
