// Staged rows brought by a kernel of nothing else, where its peers' products bring theirs: for a rank on
// which somebody reads rows before their product, or whose product cannot bring them and staged rows are
// coded, which no pull takes. The movers are those of fused/movers.cuh, so are the bits; counters get full,
// and nobody waits for them.
#include "fused/movers.cuh"

namespace fused {

constexpr int kBringers = 256;  // threads

extern "C" __global__ void __launch_bounds__(kBringers, 1)
    bring_rows(const __grid_constant__ Group group, const __grid_constant__ Rows rows) {
    Bring{group, rows}();
}

}  // namespace fused
