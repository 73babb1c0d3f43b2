// Forward attention for 16-bit types on Hopper (sm_90a): TMA loads, warpgroup MMAs.
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) V
//
// FlashAttention-3 (arXiv:2407.08608). The grid is persistent: a block computes query tiles, each
// BLOCK_Q queries of one head, until none is left. Warpgroup 0, the producer, loads Q, K and V. The
// other warpgroups, the consumers, compute 64 queries of the tile each. A consumer visits the key
// tiles that its queries see from the last to the first and keeps the running maximum m of S, the
// sum l of P = exp(scale (S - m)) and the unnormalised acc = P V.
//
// Two overlaps hide the exponentials. Intra-warpgroup pipelining: S of the next key tile and P V of
// this one are issued together, and the softmax of the next tile runs while P V is computed.
// Pingpong scheduling: named barriers let one consumer at a time issue its GEMMs, so the softmax of
// one runs under the GEMMs of another. With Q_STAGES > 1 the next key tile may be the first one of
// the next query tile, so the pipeline does not drain between query tiles.
//
//     forward_shared.cuh           constants, what the producer publishes, SharedPlan
//     forward_scheduler.cuh        tile schedulers: which query tile a block computes next
//     forward_key_parts.cuh        parts of the last query tiles, which forward_merge.cu merges
//     forward_producer.cuh         producer
//     forward_consumer.cuh         consumer: main loop iteration, GEMMs, epilogue
//     forward_option_consumer.cuh  consumer with options
//     forward_softmax.cuh          online softmax, both consumers
//     forward_scores.cuh           score modifications; causal, window, segment masks; dropout
//     forward_boolean_mask.cuh     boolean mask
//     alibi_mma.cuh                ALiBi by an extra MMA
//     forward_epilogue.cuh         O and lse of a query tile
//     forward_recompute.cuh        rows whose result may be wrong by this arithmetic (NaN,
//                                  infinities, scores above 2^24): detected in the epilogue,
//                                  recomputed one by one
//
// Where sequences are short, a tile of 64 queries has one consumer, and several blocks run on an SM
// instead: each hides the others' latencies.
//
// Grid: BLOCKS_PER_SM blocks per SM, or one per query tile if those are fewer. The static scheduler
// assigns tiles to blocks, longest first; with HAS_TAIL each of the last tiles has a block of its
// own, which follows these. With packed sequences or segment ids, the host does not
// know how long a tile takes, so blocks take tiles from an atomic counter; with segment ids, in the
// order of prepare/segment_order.cu, longest first.
// Block: 1 + CONSUMER_WARPGROUPS warpgroups.
//
// Slow for few queries: a consumer computes 64 rows even for one query, and the keys of a head are
// not split among blocks.
//
// Constants: Element, CAUSAL, NEGATE_SCORES (scale < 0 and scores are LINEAR), HEAD_DIM and
// HEAD_DIM_V (multiples of 16 that ptx.cuh has MMAs for), BLOCK_Q, BLOCK_K, Q_STAGES, KV_STAGES,
// BLOCKS_PER_SM, SHARED_BYTES, HAS_TAIL, KEY_PARTS, RUN_TILES (long_sums.cuh); Arguments and the
// options (docs/guide/options.md). LINEAR (score_mod.cuh): the call has no softcap, ALiBi or bias,
// so scores are scale S.
// Shared memory: SharedPlan, tiles as in smem.cuh.
#include "sm90/forward_producer.cuh"
#include "sm90/forward_option_consumer.cuh"

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
    float long_sums[decltype(consumer.long_sums)::SIZE];
    consumer.long_sums.hold_in(long_sums);
    // The grid has at most one block per tile, but with packed sequences some slots have no tile,
    // so other blocks may have taken all.
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

    if (consumer.warpgroup == 0) consumer.scheduler_barrier_sync();     // pairs the last arrival
    if (Q_STAGES > 1 && consumer.lane == 0) tma_store_wait<0>();
    if (!consumer.exact)
        recompute_rows(args, consumer.warp_row, consumer.scale_log2,
                       shared.work_tiles[work_slot(consumer.q)].q_start);
}

// An SM has 64 K registers. Consumers get those that the producer does not need; with SPARSE_TILES
// it needs 16 more, except beside three consumers, which cannot spare any.
constexpr int PRODUCER_REGISTERS = CONSUMER_WARPGROUPS == 3 ? 32 : SPARSE_TILES ? 40 : 24;
constexpr int BLOCK_REGISTERS = 65536 / (BLOCKS_PER_SM * THREADS) / 8 * 8 * THREADS;
constexpr int CONSUMER_REGISTERS =
    (BLOCK_REGISTERS / WARPGROUP - PRODUCER_REGISTERS) / CONSUMER_WARPGROUPS / 8 * 8;
static_assert(CONSUMER_REGISTERS <= 240, "a thread has up to 255");

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
forward_sm90(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    if (threadIdx.x == 0) shared.init_barriers();
    if (KEY_PARTS && threadIdx.x == 0) griddepcontrol_launch_dependents();  // forward_merge.cu
    shared.fill_alibi<THREADS>();
    __syncthreads();

    if (threadIdx.x < WARPGROUP) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        produce(args, shared);
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        consume(args, shared);
    }
}
