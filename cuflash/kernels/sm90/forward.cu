// Forward attention for 16-bit types on Hopper (sm_90a): TMA loads, warpgroup products.
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) V
//
// FlashAttention-3 (arXiv:2407.08608). A block stays on its multiprocessor and takes one tile of
// BLOCK_Q queries of one head after another. Warpgroup 0 only loads. Each of the others has 64
// queries of the tile and walks the key tiles that they see from the last to the first, with the
// running maximum m of S, the sum l of P = exp(scale (S - m)) and the unnormalised acc = P V.
//
// Two overlaps hide the exponentials. Within a warpgroup, S of the next key tile and P V of this
// one are issued together; the softmax of the next tile runs while P V does. Between warpgroups,
// named barriers let one issue its products at a time, so that they take turns at the tensor cores.
// The "next key tile" may be the first of the next query tile: nothing drains between tiles.
//
// Grid: as many blocks as multiprocessors, or as tiles if those are fewer. Tiles are numbered by
// scheduler.cuh, longest first. Those of packed sequences, or with segment ids, are taken from a
// counter: the host does not know their lengths. With segment ids prepare/segment_order.cu finds
// those. Block: 1 + MATH_WARPGROUPS warpgroups.
//
// Constants: Element, CAUSAL, NEGATE_SCORES (scale < 0, and scores are LINEAR), HEAD_DIM and
// HEAD_DIM_V (multiples of 16 and one of those that wgmma_registers is written for), BLOCK_Q,
// BLOCK_K, Q_STAGES, KV_STAGES, SHARED_BYTES; Arguments and the options (docs/guide/options.md).
// Shared memory: SharedPlan, tiles as in smem.cuh.
//
// Barriers: *_full, the TMA unit to the math warpgroups: an arrival of a loading thread, and a
// tile's bytes. *_empty, back: an arrival of every math warp.
//
// Rows whose result hangs on more than this arithmetic gives (NaN, infinities, scores above 2^24)
// are found at the end of a tile and computed again, one by one: recompute_row. Slow, rare.
#include "sm90/forward_consumer.cuh"
#include "sm90/forward_load.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward_wgmma(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    if (threadIdx.x == 0) {
        for (int i = 0; i < Q_STAGES; ++i) {
            mbarrier_init(shared_address(&shared.q_full[i]), 1);
            mbarrier_init(shared_address(&shared.q_empty[i]), MATH_WARPS);
        }
        for (int i = 0; i < KV_STAGES; ++i) {
            mbarrier_init(shared_address(&shared.k_full[i]), 1);
            mbarrier_init(shared_address(&shared.k_empty[i]), MATH_WARPS);
            mbarrier_init(shared_address(&shared.v_full[i]), 1);
            mbarrier_init(shared_address(&shared.v_empty[i]), MATH_WARPS);
        }
        shared.work.init();
        fence_mbarrier_init();
    }
    shared.fill_slopes<THREADS>();
    __syncthreads();

    // 64 K registers: the math warpgroups get what the loading one does not need. SPARSE_TILES take
    // some; but of 160 no math warpgroup can spare any.
    constexpr int MORE = SPARSE_TILES && MATH_WARPGROUPS == 2 ? 8 : 0;
    constexpr int MATH_REGISTERS = (MATH_WARPGROUPS == 2 ? 240 : 160) - MORE;
    constexpr int LOAD_REGISTERS = (MATH_WARPGROUPS == 2 ? 24 : 32) + MORE * MATH_WARPGROUPS;
    if (threadIdx.x < WARPGROUP) {
        warpgroup_reg_dealloc<LOAD_REGISTERS>();
        if (threadIdx.x < (DYNAMIC_SCHEDULER ? 32 : 1)) load_queries(arguments, shared);
        if constexpr (SPARSE_TILES) {
            if (threadIdx.x / 32 == 1) load_listed_keys(arguments, shared);
        } else {
            if (threadIdx.x == 32) load_keys(arguments, shared);
        }
    } else {
        warpgroup_reg_alloc<MATH_REGISTERS>();
        compute_all(arguments, shared);
    }
}
