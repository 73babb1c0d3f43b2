// Forward attention of 33 to some thousand rows over many keys, for 16-bit types on Hopper
// (sm_90a): warpgroup MMAs. A row is a pair of a query and a query head of a group.
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) V
//
// As forward.cu, the keys of a head are split among blocks (parts.cuh), whose states
// finish/merge_parts.cu merges, and the query heads of a group are packed: K and V are read once
// for 64 or 128 rows of a key head. As sm90/forward.cu, a producer warpgroup loads, and each
// consumer warpgroup computes 64 rows: S of a key tile is issued with P V of the one before
// (intra-warpgroup pipelining), and the consumers issue in turns (pingpong scheduling).
//
// 128 rows do 128 operations for each byte of K and V, so reading at 4.4 TB/s needs 560 TFLOP/s:
// memory is the limit up to there, the tensor cores beyond.
//
//     sm90_shared.cuh     named barriers, SharedPlan
//     sm90_producer.cuh   K and V by cp.async, from arrays or pages
//     sm90_consumer.cuh   consumer: Q, main loop, results
//
// Grid: parts.cuh. Block: 1 + BLOCK_Q / 64 warpgroups.
//
// Constants: those of forward.cu, with BLOCK_K for NUM_WARPS; KV_STAGES; HEAD_DIM and HEAD_DIM_V,
// rounded up to multiples of 16 that ptx.cuh has MMAs for.
// Shared memory: SharedPlan, tiles as in smem.cuh.
//
// Bad at: options, which are computed pair by pair; float8 caches, which it does not read; short
// parts, since blocks do not overlap.
#include "decode/sm90_consumer.cuh"
#include "decode/sm90_producer.cuh"

// The producer needs registers to find its parts, too. Where a thread has as many as it can use,
// none move.
constexpr int PRODUCER_REGISTERS = 56;
constexpr int CONSUMER_REGISTERS =
    (65536 / BLOCKS_PER_SM / WARPGROUP - PRODUCER_REGISTERS) / CONSUMER_WARPGROUPS / 8 * 8;
constexpr bool MOVES_REGISTERS = BLOCKS_PER_SM * THREADS > 256;

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
forward_decode_sm90(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();

    if (threadIdx.x < WARPGROUP) {
        if constexpr (MOVES_REGISTERS) warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        Parts parts(args);
        Part part;
        KeyProducer producer(args, shared);
        while (parts.next(part)) producer.load_part(part);
    } else {
        if constexpr (MOVES_REGISTERS) warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        Parts parts(args);
        Part part;
        Fragments fragments;
        Consumer consumer(args, shared, fragments);
        if (consumer.warpgroup == CONSUMER_WARPGROUPS - 1) consumer.scheduler_barrier_arrive();
        while (parts.next(part)) consumer.compute_part(part);
        if (consumer.warpgroup == 0 && CONSUMER_WARPGROUPS > 1)
            consumer.scheduler_barrier_sync();              // pairs the last arrival
    }
}
