// `C`: how a kernel's product is cut, from the defines that gemm/gemm.cu explains.
#pragma once
#include "gemm/shape.cuh"

#ifndef BESIDE
#define BESIDE 0
#endif
#ifndef QUANTISES
#define QUANTISES 0
#endif
#ifndef WAITS
#define WAITS 0
#endif

namespace gemm {

struct Cut {
    static constexpr Layout kLayout = static_cast<Layout>(LAYOUT);
    static constexpr Epilogue kEpilogue = static_cast<Epilogue>(EPILOGUE);
    static constexpr bool kFp8 = FP8, kPingpong = PINGPONG, kWide = WIDE;
    static constexpr int kGroups = GROUPS, kBlocksM = BLOCKS_M, kBlockN = BLOCK_N, kStages = STAGES;
    static constexpr int kPanels = PANELS, kGroupM = GROUP_M, kCluster = CLUSTER, kWave = WAVE;
    static constexpr int kGather = GATHER, kBox = BOX;
    static constexpr int kBeside = BESIDE;
    static constexpr bool kQuantises = QUANTISES, kWaits = WAITS;
};
using C = Config<Cut>;

}  // namespace gemm
