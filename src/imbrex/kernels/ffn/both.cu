// Gate and up, and down, of a small batch in one launch: ffn/both.cuh.
#include "ffn/both.cuh"

namespace ffn {

// Dynamic memory as of a product, 12 bytes for every expert and one more, and in fp8 scales of stages' rows.
extern "C" __global__ void __launch_bounds__(C::kThreads, 1)
    gate_up_and_down(const __grid_constant__ BothMaps maps, const __grid_constant__ Both both) {
    if (threadIdx.x == 0) ptx::stamp_begin();
    extern __shared__ u8 memory[];
    __shared__ Slot slots[kSlots];
    __shared__ u64 barriers[2 * C::kStages + 2 * kSlots + 2];
    Shared<Up> shared = lay_out<Up>(memory, slots, barriers, nullptr);
    const u32 behind = shared.staging + Up::kPanels * kPanel - ptx::smem_u32(memory);
    if (Up::kQuantises)
        shared.row_scales =
            reinterpret_cast<float*>(memory + behind + (12 * (both.experts + 1) + 15) / 16 * 16);
    if (threadIdx.x == 0) {
        make_barriers(shared);
        for (int i = 0; i < 6; ++i) ptx::prefetch_map(&maps.of[0][0] + i);
    }
    meet<Up>();
    if (threadIdx.x < 128) {
        ptx::wait_for_launches();
        ptx::more_registers<Up::kConsumerRegisters>();
        consume_both(both, maps, shared);
    } else {
        ptx::fewer_registers<Up::kProducerRegisters>();
        if (threadIdx.x / 32 == 4) {
            int* room = reinterpret_cast<int*>(memory + behind);
            Units units{room, room + both.experts + 1, room + 2 * (both.experts + 1)};
            units.take(both.hits, wait_for_hits(both.hits));
            if (threadIdx.x == 128) ptx::stamp(ptx::kKnows);
            if (ptx::lane_id() == 0)
                produce_both(both, maps, shared, units, WholeLaunch{},
                             [](const Work&, const Ring<Up>&, int ahead) {
                                 ptx::wait_for_launches();
                                 ptx::stamp(ptx::kSeen);
                                 ptx::launch_dependents();
                                 return ahead;
                             });
        } else if constexpr (Up::kQuantises) {
            quantise_both(both, shared, memory);
        }
    }
    ptx::wait_for_launches();  // a block without a tile: nothing ends before the launch before has
    ptx::launch_dependents();
    if (STAMPS) __syncthreads();
    if (threadIdx.x == 0) ptx::stamp_end();
}

}  // namespace ffn
