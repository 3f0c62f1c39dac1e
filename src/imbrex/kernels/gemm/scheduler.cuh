// Which tile comes next: the order of a persistent grouped GEMM, as data.
//
// The output is a list of segments; a segment is rows x columns of one expert. Without a list (`segments`
// null) there is one segment an expert, with all its rows and all columns, in order. With a list, five ints a
// segment (expert, row begin, row end, column begin, column end) on the device give any order: by source
// rank, by column slice over all experts, a chunk of the experts. Block b takes tile b, then what a counter
// of all blocks gives.
//
// Inside a segment, tiles run down `kGroupM` row tiles, then one column tile to the right, so that the blocks
// that run together share few distinct panels of A and B (measured choice, see gemm/run.cuh).
//
// Example: ends = {130, 130, 300}, 128 x 256 tiles, 512 columns: segments have 2 x 2, 0 x 2 and 2 x 2 tiles;
// tile 5 is the second of expert 2: row 130 + 128 = 258, 42 rows left, column 0.
//
// Plain C++ but for the qualifiers, so that the tests compile and run it on the CPU.
#pragma once

#ifdef __CUDACC_RTC__
#define IMBREX_BOTH __device__ __forceinline__
#else
#define IMBREX_BOTH inline
#endif

namespace gemm {

struct Tile {
    int expert;
    int row;      // first row of the output
    int rows;     // rows of the segment from `row` on; may exceed a tile of kBlockM rows, none of 64
    int column;   // first column of the output
    int columns;  // columns of the segment from `column` on; may exceed the tile
};

// kFixedRows: output rows do not depend on the offsets (weight gradients: [experts, fixed_rows, columns]).
// kTall: tiles of a segment are as few as kBlockM allows, and differ by 64 rows at most: 5 blocks of 64 rows
// are tiles of 3 and 2, 4 of 2 and 2.
template <int kBlockM, int kBlockN, int kGroupM, bool kFixedRows, bool kTall = false>
struct Schedule {
    const int* ends;      // [experts] end of each expert's rows; expert e begins where e - 1 ends
    const int* segments;  // [count][5] or null
    int count;            // segments
    int fixed_rows;
    int columns;

    int segment = -1;
    int first = 0;  // number of the segment's first tile; `count_from` sets that of all tiles
    int tiles = 0;
    int height = kBlockM;  // of a tile: kBlockM, or 64 (gemm/height.cuh)
    // Of several products whose tiles one walk counts, the one that the tile sought last is of: here there is
    // one. A walk over more (fused/home.cu) has the same functions.
    static constexpr int product = 0;
    int row_tiles = 0, row_begin = 0, row_end = 0, column_begin = 0, column_end = 0, expert = 0;

    IMBREX_BOTH int row_tiles_of(int rows) const {
        return height < kBlockM ? (rows + 63) / 64 : (rows + kBlockM - 1) / kBlockM;
    }

    IMBREX_BOTH void enter(int index) {
        segment = index;
        if (segments != nullptr) {
            const int* s = segments + 5 * index;
            expert = s[0], row_begin = s[1], row_end = s[2], column_begin = s[3], column_end = s[4];
        } else {
            expert = index;
            row_begin = kFixedRows ? 0 : row_end;
            row_end = kFixedRows ? fixed_rows : ends[index];
            column_begin = 0, column_end = columns;
        }
        row_tiles = row_tiles_of(row_end - row_begin);
        first += tiles;
        tiles = row_tiles * ((column_end - column_begin + kBlockN - 1) / kBlockN);
    }

    IMBREX_BOTH void count_from(int number) { first = number; }

    // The tile of this number, which must not fall from call to call. False when there is none.
    IMBREX_BOTH bool seek(int number, Tile& tile) {
        while (number >= first + tiles) {
            if (segment + 1 >= count) return false;
            enter(segment + 1);
        }
        const int column_tiles = (column_end - column_begin + kBlockN - 1) / kBlockN;
        const int local = number - first;
        const int group = local / (kGroupM * column_tiles);
        const int inside = local - group * kGroupM * column_tiles;
        const int left = row_tiles - group * kGroupM;
        const int side = left < kGroupM ? left : kGroupM;
        const int row_tile = group * kGroupM + inside % side;
        int before = row_tile * height, most = height;
        if (kTall) {
            const int blocks = (row_end - row_begin + 63) / 64, each = blocks / row_tiles,
                      more = blocks - each * row_tiles;  // tiles, the first ones, of one block more
            before = 64 * (row_tile * each + (row_tile < more ? row_tile : more));
            most = 64 * (row_tile < more ? each + 1 : each);
        }
        tile.expert = expert;
        tile.row = row_begin + before;
        tile.rows = row_end - tile.row;
        if (most < kBlockM && tile.rows > most) tile.rows = most;
        tile.column = column_begin + inside / side * kBlockN;
        tile.columns = column_end - tile.column;
        return true;
    }
};

}  // namespace gemm
