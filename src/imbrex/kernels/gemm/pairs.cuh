// Which two tiles come next: the order of a grouped GEMM whose blocks work in pairs (a cluster) and share
// panels of B.
//
// Two row tiles of an expert that have the same columns are a pair. What is left over of an expert, an odd
// row tile and a last one of 64 rows or fewer (half the work: its partner would wait), goes with itself: a
// row tile and two neighbouring columns, nothing shared, next to the pairs of these columns, whose panels of
// B it reads again. Where the number of columns is odd, too, the last one has the rows that are left, two and
// two, and the second block may have none (rows 0).
//
// Example: 330 rows, 128 x 256 tiles, 768 columns: row tiles 0, 1 and 2 (74 rows), column tiles 0, 1, 2.
// Pairs: rows 0 1 of column 0, of column 1, row 2 of columns 0 1, rows 0 1 of column 2, row 2 of column 2 and
// none.
//
// Design record, H200, us of gate/up with SwiGLU and of down, 16384 rows, alone and in pairs:
//                              alone        pairs
//   DeepSeek-V3                1357, 714    1326, 690
//     rows drawn at random     1789, 889    1569, 798
//     the same in fp8           972, 508     936, 501
//   Phi-3.5                    2191, 1112   2168, 1104
//   Qwen2                       269, 142     269, 149
//   Qwen3                       170, 96      172, 98
// A last row tile of few rows runs ahead of the others and leaves L2 without its columns; a pair reads them
// at one time. L2 is not the limit of small experts: a pair starts 1.0 us later and goes at its slower
// block's pace. Half of B left out altogether, before: 9 % at most for DeepSeek-V3, 3 to 4 % for others.
// No gain: first tiles found by each block itself; GROUP_M 2, 4, 16, up to 65536 rows; wgrad (1.00 shared,
// 0.83 to 0.92 in turns).
// An arrival at the other block with .release.cluster, or a wait with .acquire.cluster, is a fence of the
// GPU each time: slots go by st.async, which needs neither.
//
// Plain C++ but for the qualifiers, as gemm/scheduler.cuh.
#pragma once
#include "gemm/scheduler.cuh"

namespace gemm {

// How the pairs of a segment lie: `groups` groups of kHigh pairs of row tiles but the last, which has
// `shared` of them and `left` single row tiles. Made anew for every pair, since the producer has few
// registers to keep it in.
struct Pairing {
    int row_tiles, column_tiles, groups, shared, left;
};

template <int kBlockM, int kBlockN, int kGroupM>
struct PairSchedule : Schedule<kBlockM, kBlockN, kGroupM, false> {
    static constexpr int kHigh = kGroupM / 2;  // pairs side by side
    int first_pair = 0, pairs = 0;             // of the segment

    IMBREX_BOTH Pairing pairing() const {
        const int rows = this->row_end - this->row_begin, columns = this->column_end - this->column_begin;
        // row tiles of more than 64 rows; where they are of 64, all
        const int full = this->height < kBlockM ? this->row_tiles_of(rows)
                         : rows > 64            ? (rows - 65) / kBlockM + 1
                                                : 0;
        Pairing found;
        found.row_tiles = this->row_tiles_of(rows);
        found.column_tiles = (columns + kBlockN - 1) / kBlockN;
        found.groups = full / 2 > kHigh ? (full / 2 + kHigh - 1) / kHigh : 1;
        found.shared = full / 2 - (found.groups - 1) * kHigh;
        found.left = found.row_tiles - full / 2 * 2;
        return found;
    }

    IMBREX_BOTH void place(Tile& tile, int row_tile, int column_tile) const {
        tile.expert = this->expert;
        tile.row = this->row_begin + row_tile * this->height;
        tile.rows = tile.row < this->row_end ? this->row_end - tile.row : 0;
        if (this->height < kBlockM && tile.rows > this->height) tile.rows = this->height;
        tile.column = this->column_begin + column_tile * kBlockN;
        tile.columns = this->column_end - tile.column;
    }

    IMBREX_BOTH void count_from(int number) { first_pair = number; }

    // The two tiles of this number, which must not fall from call to call; `together`: they share their
    // columns.
    IMBREX_BOTH bool seek(int number, Tile (&tile)[2], bool& together) {
        while (number >= first_pair + pairs) {
            if (this->segment + 1 >= this->count) return false;
            this->enter(this->segment + 1);
            const Pairing next = pairing();
            first_pair += pairs;
            pairs = (next.groups - 1) * kHigh * next.column_tiles +
                    next.column_tiles / 2 * (2 * next.shared + next.left);
            if (next.column_tiles % 2) pairs += next.shared + (next.left + 1) / 2;
        }
        const Pairing here = pairing();
        int local = number - first_pair, group = local / (kHigh * here.column_tiles);
        if (group > here.groups - 1) group = here.groups - 1;
        local -= group * kHigh * here.column_tiles;
        int row = 2 * group * kHigh, column;
        together = true;
        if (group < here.groups - 1) {
            column = local / kHigh, row += 2 * (local % kHigh);
        } else {
            const int each = 2 * here.shared + here.left;
            column = local / each * 2, local %= each;
            const bool two = column + 1 < here.column_tiles;
            const int rest = local - (two ? 2 : 1) * here.shared;  // its number among those left over
            if (rest < 0) {
                column += local / here.shared, row += 2 * (local % here.shared);
            } else if (two) {
                row += 2 * here.shared + rest, together = false;
                place(tile[0], row, column), place(tile[1], row, column + 1);
                return true;
            } else {
                row += 2 * (here.shared + rest), together = row + 1 < here.row_tiles;
            }
        }
        place(tile[0], row, column), place(tile[1], row + 1, column);
        return true;
    }
};

}  // namespace gemm
