// Forward attention as in sm90/forward.cu, for head dimensions up to 576 (of V up to 512): O of 64
// queries fills the registers of two warpgroups, so a third one has S and P.
//
//     S = Q K^T,  lse = log(rowsum(exp(scale S))),  O = exp(scale S - lse) V
//
// A persistent block computes query tiles of 64 queries, one after another, and visits the key
// tiles of each from the last to the first. Warpgroup 0 produces: a thread each loads Q, K, and the
// two halves of V. Each of the others has one role:
//     1, scores      S; the online softmax, as forward.cu's; P, which goes to shared memory with
//                    the factors by which the rows of acc are rescaled
//     2, values      acc += P V of the left half of V's columns
//     3, values      the same of the right half
//
//     tensor cores   S'  (P V, left and right)  S"  (P' V', left and right)
//     scores            P'                         P"
//
// The scores are up to two key tiles ahead. While they compute P, the tensor cores have P V of the
// previous tile to do. K and the halves of V come in chunks of columns, each through a ring of
// stages of its own; a chunk's stage is free as soon as its MMAs are done.
//
//     forward_wide_shared.cuh      chunks, SharedPlan
//     forward_wide_scores.cuh      the score warpgroup
//
// Cost of a key tile of 64 at head_dim 512, at peak rates:
//     tensor cores     two matmuls of 1,024 cycles: 2,048
//     shared memory    S: 128 KB; P V: 96 KB; K and V arriving: 128 KB; in total 2,820 cycles
//     L2               128 KB for 8.4 MFLOP: 600 TFLOP/s read 9.4 TB/s
//     registers        acc: 128 of 160 per thread
//
// Bad at: only 64 queries share a load of K and V.
//
// Grid: as sm90/forward.cu's. Block: 4 warpgroups.
//
// Constants: as sm90/forward.cu's, but HEAD_DIM and HEAD_DIM_V multiples of 64, BLOCK_Q 64,
// Q_STAGES 1; KV_STAGES of K's chunks, STAGES of the chunks of each half of V. No options for which
// SPARSE_TILES is set.
// Shared memory: SharedPlan, tiles as in smem.cuh.
#include "sm90/forward_query_producer.cuh"
#include "sm90/forward_recompute.cuh"
#include "sm90/forward_wide_scores.cuh"

constexpr int BLOCK_THREADS = 4 * WARPGROUP;

// An SM's 64 K registers are 512 for the four threads of the same rank in the warpgroups.
constexpr int PRODUCER_REGISTERS = 32, CONSUMER_REGISTERS = 160;

// Barrier 0 is __syncthreads. O of all of the block's tiles has been stored.
constexpr int STORED_BARRIER = 1;

// ---- Producers: one thread each ----

// Calls load(k_start, work, kv_head) for each key tile of each query tile.
template <bool REQUESTS, class Load>
__device__ __forceinline__ void for_each_key_tile(
    const Arguments& args, SharedPlan& shared, Load load) {
    const Shape& shape = args.arrays.shape;
    const int group_size = shape.num_heads_q / shape.num_heads_kv;
    TileScheduler scheduler(args);
    for (;;) {
        const WorkTile work = scheduler.acquire(args, shared);
        if (work.num_rows == 0) return;
        const int first_tile = first_key_tile(mask_of(args, work), work.q_start);
        for (int tile = work.num_visited - 1; tile >= first_tile; --tile) {
            if (REQUESTS && tile == min(first_tile + REQUEST_AHEAD, work.num_visited - 1))
                shared.work_tiles.request();
            load(work.first_k + tile * BLOCK_K, work.head / group_size, work.batch);
        }
    }
}

__device__ __forceinline__ void load_keys(const Arguments& args, SharedPlan& shared) {
    PipelineState<KV_STAGES> stage;
    for_each_key_tile<PACKED>(args, shared, [&](int k_start, int kv_head, int batch) {
        for (int chunk = 0; chunk < K_CHUNKS; ++chunk, stage.next()) {
            mbarrier_wait(barrier_at(shared.k_empty, stage.index), stage.phase ^ 1);
            tma_load_tile<BLOCK_K, K_COLUMNS>(
                shared_address(&shared.k[stage.index]), args.k_map,
                barrier_at(shared.k_full, stage.index), k_start, kv_head, batch, 0,
                chunk * K_COLUMNS);
        }
    });
}

template <int COLUMNS>
__device__ __forceinline__ void load_values(
    const Arguments& args, SharedPlan& shared, ValueRing<COLUMNS>& ring, ValueBarriers& barriers,
    int first_column) {
    using Ring = ValueRing<COLUMNS>;
    PipelineState<STAGES> stage;
    for_each_key_tile<false>(args, shared, [&](int k_start, int kv_head, int batch) {
        for (int chunk = 0; chunk < Ring::CHUNKS; ++chunk, stage.next()) {
            mbarrier_wait(barrier_at(barriers.empty, stage.index), stage.phase ^ 1);
            tma_load_tile<BLOCK_K, Ring::CHUNK>(
                shared_address(&ring.stages[stage.index]), args.v_map,
                barrier_at(barriers.full, stage.index), k_start, kv_head, batch, 0,
                first_column + chunk * Ring::CHUNK);
        }
    });
}

__device__ __forceinline__ void produce(const Arguments& args, SharedPlan& shared) {
    if (threadIdx.x < (DYNAMIC_SCHEDULER ? 32 : 1)) load_queries(args, shared);
    if (threadIdx.x == 32) load_keys(args, shared);
    if (threadIdx.x == 64) load_values(args, shared, shared.v_left, shared.v_barriers[0], 0);
    if (threadIdx.x == 96)
        load_values(args, shared, shared.v_right, shared.v_barriers[1], LEFT_COLUMNS);
}

// ---- The value warpgroups ----

template <int COLUMNS> struct ValueWarpgroup {
    using Ring = ValueRing<COLUMNS>;
    using Sums = float[Ring::CHUNKS][Ring::CHUNK / 2];

    const Arguments& args;
    SharedPlan& shared;
    Sums& acc;                                              // not a member: as ScoreFragments
    const u64 v_desc;
    const u32 v_full, v_empty;
    const int first_column;                                 // of O

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % ROLE_WARPS;
    const int lane_row = warp * 16 + lane / 4;
    const u64 p_desc = descriptor(shared_address(&shared.p), 0);
    const u32 p_full = shared_address(&shared.p_full), p_empty = shared_address(&shared.p_empty);
    PipelineState<P_STAGES> p;
    PipelineState<STAGES> v;
    bool exact = true;                                      // no row so far needs recompute_row

    __device__ __forceinline__ ValueWarpgroup(
        const Arguments& args, SharedPlan& shared, const Ring& ring,
        const ValueBarriers& barriers, int first_column, Sums& acc)
        : args(args), shared(shared), acc(acc),
          v_desc(descriptor(shared_address(&ring.stages), BLOCK_K * PANEL_ROW_BYTES)),
          v_full(shared_address(&barriers.full)), v_empty(shared_address(&barriers.empty)),
          first_column(first_column) {}

    // acc += P V of the next key tile, or acc = P V. The last one sets the lane's `inverse`.
    __device__ __forceinline__ void iteration(
        bool is_first, bool is_last, float (&inverse)[2]) {
        pipeline_wait(p_full, p);
        const RowFactors& factors = shared.factors[p.index];
        float rescale[2];
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            rescale[half] = factors.rescale[lane_row + half * 8];
            if (is_last) inverse[half] = factors.inverse[lane_row + half * 8];
        }
        const bool rescales = rescale[0] != 1.0f || rescale[1] != 1.0f;
        if (__ballot_sync(WHOLE_WARP, rescales) != 0 && !is_first) multiply(rescale);
        const u64 p_tile = advance(p_desc, p.index * static_cast<int>(sizeof(shared.p[0])));
        #pragma unroll
        for (int chunk = 0; chunk < Ring::CHUNKS; ++chunk) {
            pipeline_wait(v_full, v);
            if (chunk == 0) fence_operands();
            wgmma_fence();
            gemm_ab_ss<Element, BLOCK_K>(
                acc[chunk], p_tile,
                advance(v_desc, v.index * static_cast<int>(sizeof(Ring::stages[0]))), !is_first);
            wgmma_commit();
            if (chunk > 0) {
                wgmma_wait<1>();
                mbarrier_arrive_if(lane == 0, v_empty + 8 * v.previous());
            }
            v.next();
        }
        wgmma_wait<0>();
        fence_operands();
        mbarrier_arrive_if(lane == 0, v_empty + 8 * v.previous());
        mbarrier_arrive_if(lane == 0, p_empty + 8 * p.index);
        p.next();
    }
    __device__ __forceinline__ void fence_operands() {
        #pragma unroll
        for (int chunk = 0; chunk < Ring::CHUNKS; ++chunk) warpgroup_fence_operand(acc[chunk]);
    }
    __device__ __forceinline__ void multiply(const float (&factors)[2]) {
        #pragma unroll
        for (int chunk = 0; chunk < Ring::CHUNKS; ++chunk)
            #pragma unroll
            for (int i = 0; i < Ring::CHUNK / 2; ++i) acc[chunk][i] *= factors[i / 2 % 2];
    }

    // Stores O's rows. Marks those that need recompute_row by a NaN in the half's first column; a
    // lane's two rows together.
    __device__ __forceinline__ void store(const QueryTile& tile, const float (&inverse)[2]) {
        multiply(inverse);
        bool finite = true;
        #pragma unroll
        for (int chunk = 0; chunk < Ring::CHUNKS; ++chunk)
            #pragma unroll
            for (int i = 0; i < Ring::CHUNK / 2; ++i)
                finite &= fabsf(acc[chunk][i]) < infinity();
        const u32 inexact = __ballot_sync(WHOLE_WARP, !finite);
        if ((inexact >> lane / 4 * 4 & 0xF) != 0) acc[0][0] = acc[0][2] = quiet_nan();
        exact &= inexact == 0;
        const i64 stride = args.arrays.out_stride.token;
        Element* out = out_of(args.arrays, tile) + lane_row * stride + first_column;
        #pragma unroll
        for (int chunk = 0; chunk < Ring::CHUNKS; ++chunk)
            store_to_array(
                out + chunk * Ring::CHUNK, stride, acc[chunk], lane_row, tile.num_rows,
                args.arrays.shape.head_dim_v - first_column - chunk * Ring::CHUNK);
    }
};

// half: 0 or 1, the left or the right one.
template <int COLUMNS>
__device__ __forceinline__ void compute_values(
    const Arguments& args, SharedPlan& shared, const ValueRing<COLUMNS>& ring,
    const ValueBarriers& barriers, int half) {
    float acc[ValueRing<COLUMNS>::CHUNKS][ValueRing<COLUMNS>::CHUNK / 2];
    ValueWarpgroup<COLUMNS> values(args, shared, ring, barriers, half * LEFT_COLUMNS, acc);
    PipelineState<1> q;
    for (;; q.next()) {
        pipeline_wait(shared_address(shared.q_full), q);
        const WorkTile work = shared.work_tiles[work_slot(q)];
        if (work.num_rows == 0) break;
        __syncwarp();                                       // all lanes have read `work`
        mbarrier_arrive_if(values.lane == 0, shared_address(shared.q_empty));
        const int num_tiles =
            work.num_visited - first_key_tile(mask_of(args, work), work.q_start);
        float inverse[2] = {0.0f, 0.0f};
        for (int i = 0; i < num_tiles; ++i) values.iteration(i == 0, i == num_tiles - 1, inverse);
        values.store(work, inverse);
    }

    // Two warps have the same 16 rows, and recompute half of them each.
    const int warp = values.warp;
    if (values.lane == 0) shared.inexact[half][warp] = !values.exact;
    barrier_sync(STORED_BARRIER, 2 * WARPGROUP);
    if (shared.inexact[0][warp] || shared.inexact[1][warp])
        recompute_rows<LEFT_COLUMNS>(
            args, warp * 16 + half * 8, exponent_scale<LINEAR>(args.arrays.scale),
            shared.work_tiles[work_slot(q)].q_start, 8);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
forward_sm90_wide(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();

    // By a shuffle, so that the compiler knows that it is uniform in the warp.
    const int role = __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x / WARPGROUP), 0);
    if (role == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        produce(args, shared);
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        if (role == 1) compute_scores(args, shared);
        else if (role == 2)
            compute_values(args, shared, shared.v_left, shared.v_barriers[0], 0);
        else compute_values(args, shared, shared.v_right, shared.v_barriers[1], 1);
    }
}
