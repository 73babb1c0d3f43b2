// Forward attention for 16-bit types on Hopper (sm_90a): TMA loads, warpgroup MMAs.
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) V
//
// FlashAttention-3 (arXiv:2407.08608). A persistent block takes one tile of BLOCK_Q queries of one
// head after another. Warpgroup 0, the producer, loads Q, K and V. Each of the others, a consumer,
// has 64 queries of the tile. It visits the key tiles that they see from the last to the first,
// with the running maximum m of S, the sum l of P = exp(scale (S - m)) and the unnormalised
// acc = P V.
//
// Two overlaps hide the exponentials. Within a warpgroup, S of the next key tile and P V of this
// one are issued together; the softmax of the next tile runs while P V does. Between warpgroups,
// named barriers let one at a time issue its GEMMs, so that one's softmax runs under another's
// GEMMs. The next key tile may be the first of the next query tile: nothing drains between tiles.
//
//     forward_shared.cuh     constants, what the producer publishes, SharedPlan
//     forward_scheduler.cuh  which query tile comes next
//     forward_load.cuh       producer
//     forward_consumer.cuh   consumer: main loop iteration, GEMMs, epilogue
//     forward_options.cuh    consumer with options
//     forward_softmax.cuh, forward_scores.cuh, forward_epilogue.cuh    its parts
//     forward_recompute.cuh  rows whose result needs more than this arithmetic (NaN, infinities,
//                            scores above 2^24): found in the epilogue, recomputed one by one
//
// Grid: one block an SM, or one a tile if those are fewer. The scheduler numbers tiles longest
// first. Blocks take the tiles of packed sequences, or with segment ids, from an atomic counter,
// because the host does not know how long they take; prepare/segment_order.cu orders the latter.
// Block: 1 + CONSUMER_WARPGROUPS warpgroups.
//
// Bad at few queries: a consumer computes 64 rows even for one query, and a head's keys are not
// split among blocks.
//
// Constants: Element, CAUSAL, NEGATE_SCORES (scale < 0, and scores are LINEAR), HEAD_DIM and
// HEAD_DIM_V (multiples of 16 for which wgmma_registers is written), BLOCK_Q, BLOCK_K, Q_STAGES,
// KV_STAGES, SHARED_BYTES; Arguments and the options (docs/guide/options.md).
// Shared memory: SharedPlan, tiles as in smem.cuh.
#include "sm90/forward_load.cuh"
#include "sm90/forward_options.cuh"

__device__ __forceinline__ void produce(const Arguments& args, SharedPlan& shared) {
    if (threadIdx.x < (DYNAMIC_SCHEDULER ? 32 : 1)) load_queries(args, shared);
    if constexpr (SPARSE_TILES) {
        if (threadIdx.x / 32 == 1) load_sparse_keys(args, shared);
    } else {
        if (threadIdx.x == 32) load_keys(args, shared);
    }
}

__device__ __forceinline__ void consume(const Arguments& args, SharedPlan& shared) {
    Fragments fragments;
    ConsumerOf<OPTIONS>::type consumer(args, shared, fragments);
    // A block has a tile at least, but with packed sequences other blocks may have taken them all.
    if constexpr (PACKED)
        if (!consumer.begin_tile()) return;
    if (consumer.warpgroup == CONSUMER_WARPGROUPS - 1) consumer.scheduler_barrier_arrive();
    if constexpr (!PACKED) consumer.begin_tile();

    consumer.first_iteration<false>();
    for (;;) {
        consumer.main_loop();
        consumer.release_q();
        const int slot = work_slot(consumer.q);
        if constexpr (Q_STAGES == 1) consumer.last_gemm_pv();
        consumer.q.next();
        if (!consumer.begin_tile()) {
            if constexpr (Q_STAGES > 1) {
                consumer.last_gemm_pv();
                barrier_sync(EPILOGUE_BARRIER + consumer.warpgroup, WARPGROUP);
            }
            consumer.epilogue(slot);
            break;
        }
        if constexpr (Q_STAGES == 1) consumer.first_iteration<true>(slot);
        else consumer.iteration_across_tiles(slot);
    }

    if (consumer.warpgroup == 0) consumer.scheduler_barrier_sync();     // the last arrival
    if (Q_STAGES > 1 && consumer.lane == 0) tma_store_wait<0>();
    if (!consumer.exact)
        recompute_rows(args, consumer.warp_row, consumer.scale_log2,
                       shared.work_tiles[work_slot(consumer.q)].q_start);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
forward_wgmma(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    if (threadIdx.x == 0) shared.init_barriers();
    shared.fill_alibi<THREADS>();
    __syncthreads();

    // An SM has 64 K registers: consumers get what the producer does not need. SPARSE_TILES needs a
    // few more there; of 160, three consumer warpgroups can spare none.
    constexpr int MORE = SPARSE_TILES && CONSUMER_WARPGROUPS == 2 ? 8 : 0;
    constexpr int CONSUMER_REGISTERS = (CONSUMER_WARPGROUPS == 2 ? 240 : 160) - MORE;
    constexpr int PRODUCER_REGISTERS =
        (CONSUMER_WARPGROUPS == 2 ? 24 : 32) + MORE * CONSUMER_WARPGROUPS;
    if (threadIdx.x < WARPGROUP) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        produce(args, shared);
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        consume(args, shared);
    }
}
