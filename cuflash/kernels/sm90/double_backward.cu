// The gradient of backward attention for 16-bit types on Hopper (sm_90a): d2K, d2V and the float
// sums of d2Q. simt/double_backward.cuh has the equations; of each pair
//
//     P = exp(scale S - lse),  dS = P (dP - D),  T = dS (W - b) + P (U - F)
//     d2Q = scale (dS ddK + T K),  d2K = scale (dS^T ddQ + T^T Q),  d2V = (P (W - b))^T dO
//
// A persistent block takes one work tile after another, 64 keys of one key head
// (backward_scheduler.cuh), and visits the query tiles that see them, of every query head of the
// group. Warpgroup 0 produces: it loads tiles. The others divide the ten matmuls by results, as in
// backward_wide.cu:
//     1, scores    S^T, W^T (two), dP^T, U^T; from these P (W - b), dS and T, rounded, which go to
//                  shared memory, each as soon as it is there (double_backward_role.cuh); with
//                  SCORE_MOD and narrow heads two warpgroups, of half of the queries each
//     2, keys      d2V and d2K, in registers
//     3, queries   d2Q of the iteration, which it adds from its registers to float sums in global
//                  memory; finish/dq.cu scales and rounds them
//
//     tensor cores of scores   S W W dP U |S' W' ..
//     its warps                  P  PW dS  |T
//     tensor cores of others     .. dV  dK dQ  | dK dQ ..
//
// Grid: as sm90/backward.cu's, ordered as DETERMINISTIC requires. Block: 3 + SCORE_WARPGROUPS
// warpgroups.
//
// Constants: Element, CAUSAL, HEAD_DIM and HEAD_DIM_V (32, 64, 96 or 128), BLOCK_Q and BLOCK_K
// (64), STAGES (of ddQ, dO and the weights), Q_STAGES (of Q), SCORE_WARPGROUPS (1, or 2 with
// SCORE_MOD), NUM_WARPS and SCORE_WARPS_Q of d2Q alone, DQ_SEMAPHORES (0, or 1 if DETERMINISTIC),
// SHARED_BYTES; HEADS_INNERMOST (backward_scheduler.cuh); Q_DOT, K_DOT, V_DOT: what moves;
// Arguments; no options but SCORE_MOD, whose arrays do not move (double_backward_score_mod.cuh).
// Shared memory and barriers: double_backward_producer.cuh.
//
// Where the causal mask cuts a tile, a NaN or an infinity may reach rows that do not see it, as
// 0 * NaN. Tiles with a non-finite result are then flagged (tile_flags.cuh), and the simt kernels,
// launched next, compute these anew.
//
// Bad at: short sequences: K and V of the next work tile wait for the end of this one.
#include "sm90/double_backward_role.cuh"
#include "common/dq_accum.cuh"
#include "common/tile_flags.cuh"

constexpr int BLOCK_THREADS = (3 + SCORE_WARPGROUPS) * WARPGROUP;
constexpr int DQ_REGS = HEAD_DIM / 2, DK_REGS = HEAD_DIM / 2, DV_REGS = HEAD_DIM_V / 2;
constexpr int K_PANEL_BYTES = BLOCK_K * PANEL_ROW_BYTES, Q_PANEL_BYTES = BLOCK_Q * PANEL_ROW_BYTES;

// Of the threads of the same rank in the warpgroups: four have 512 as in backward_wide.cu, and five
// 480, 96 of each at first.
constexpr bool FIVE = SCORE_WARPGROUPS == 2;
constexpr int PRODUCER_REGISTERS = SCORE_MOD ? 24 : 32;
constexpr int SCORE_REGISTERS = FIVE ? 144 : 248 - PRODUCER_REGISTERS;
constexpr int KEY_REGISTERS = FIVE ? 96 : 160, QUERY_REGISTERS = FIVE ? 72 : 104;
static_assert(PRODUCER_REGISTERS + SCORE_WARPGROUPS * SCORE_REGISTERS + KEY_REGISTERS
                  + QUERY_REGISTERS == (FIVE ? 480 : 512), "");
static_assert(!FIVE || DK_REGS + DV_REGS <= 64, "the keys' warpgroup has 96 registers");

static_assert(BLOCK_Q == FLAG_TOKENS && BLOCK_K == FLAG_TOKENS, "a matmul has 64 rows");
static_assert(QueryGrid::M_TILES == 1 && THREADS == WARPGROUP, "a warpgroup has all of d2Q");
static_assert(DQ_SEMAPHORES == 0 || DQ_SEMAPHORES == 1, "one warpgroup adds to d2Q");

// ---- Gradients of keys ----

struct KeyRole {
    const Arguments& args;
    SharedPlan& shared;
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32;

    // d2V += (P (W - b))^T dO, d2K += dS^T ddQ + T^T Q; = if not `accumulate`.
    __device__ __forceinline__ void iterate(
        const IterationStage& stage, float (&d2k)[DK_REGS], float (&d2v)[DV_REGS],
        bool accumulate) const {
        const int i = stage.q.index, n = stage.others.index;
        const u32 phase = stage.others.phase;
        const u64 q = descriptor(shared_address(&shared.q[i]), Q_PANEL_BYTES);
        const u64 q_dot = descriptor(shared_address(&shared.q_dot[n]), Q_PANEL_BYTES);
        const u64 dout = descriptor(shared_address(&shared.dout[n]), Q_PANEL_BYTES);
        mbarrier_wait(shared_address(&shared.dout_full[n]), phase);
        mbarrier_wait(shared_address(&shared.pw_full[n]), phase);
        add(d2v, shared.pw[n], dout, accumulate);
        if constexpr (Q_DOT) {
            mbarrier_wait(shared_address(&shared.q_dot_full[n]), phase);
            mbarrier_wait(shared_address(&shared.ds_full[n]), phase);
            add(d2k, shared.ds[n], q_dot, accumulate);
            wgmma_wait<1>();                                // d2V
            mbarrier_arrive_if(lane == 0, shared_address(&shared.dout_empty[n]));
            wgmma_wait<0>();
            mbarrier_arrive_if(lane == 0, shared_address(&shared.q_dot_empty[n]));
        } else {
            wgmma_wait<0>();
            mbarrier_arrive_if(lane == 0, shared_address(&shared.dout_empty[n]));
        }
        warpgroup_fence_operand(d2v);
        mbarrier_wait(shared_address(&shared.q_full[i]), stage.q.phase);
        mbarrier_wait(shared_address(&shared.t_full[n]), phase);
        add(d2k, shared.t[n], q, Q_DOT || accumulate);
        wgmma_wait<0>();
        warpgroup_fence_operand(d2k);
        mbarrier_arrive_if(lane == 0, shared_address(&shared.q_empty[i]));
        mbarrier_arrive_if(lane == 0, shared_address(&shared.weights_empty[n]));
    }

    // sum += weights^T rows, asynchronously; = if not `accumulate`.
    template <int COUNT, class Weights>
    __device__ __forceinline__ void add(
        float (&sum)[COUNT], const Weights& weights, u64 rows, bool accumulate) const {
        warpgroup_fence_operand(sum);
        wgmma_fence();
        gemm_ab_ss<Element, BLOCK_Q>(
            sum, descriptor(shared_address(&weights), 0), rows, accumulate);
        wgmma_commit();
    }

    // Scales a gradient of the work tile and stores it. Returns whether the lane's elements are all
    // finite.
    template <int COUNT>
    __device__ __forceinline__ bool store(
        const WorkTile& work, float (&gradient)[COUNT], float scale, void* array,
        const Strides& stride, int num_columns) const {
        const int key = work.tile * BLOCK_K + thread / 32 * 16 + lane / 4;
        bool finite = true;
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            gradient[i] *= scale;
            finite &= fabsf(gradient[i]) < infinity();
        }
        store_to_array(
            static_cast<Element*>(array) + work.batch * stride.batch + work.head * stride.head
                + key * stride.token,
            stride.token, gradient, key, args.arrays.shape.seqlen_k, num_columns);
        return finite;
    }

    __device__ __forceinline__ void run() const {
        const BackwardArguments& arrays = args.arrays;
        const Shape& shape = arrays.shape;
        float d2k[DK_REGS], d2v[DV_REGS];
        IterationStage stage;
        for (WorkState state;; ++state.count) {
            const WorkTile work = acquire_work_tile(shared, state);
            if (work.tile < 0) break;
            __syncwarp();
            release_work_tile(shared, state, lane == 0);
            const QueryTiles tiles = query_tiles(args, work.tile, NoSequence{});
            const int num_iterations = QueryTileIterator(args, tiles, work).remaining;
            for (int i = 0; i < num_iterations; ++i, stage.next())
                iterate(stage, d2k, d2v, i > 0);
            bool finite = store(work, d2k, static_cast<float>(arrays.scale), arrays.dk,
                                arrays.dk_stride, shape.head_dim);
            finite &= store(work, d2v, 1.0f, arrays.dv, arrays.dv_stride, shape.head_dim_v);
            if (CAUSAL && !finite)
                *key_flag(args, work.batch, work.head, work.tile * BLOCK_K) = 1;
            __syncwarp();
        }
    }
};

// ---- Gradients of queries ----

struct QueryRole {
    const Arguments& args;
    SharedPlan& shared;
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32;

    // d2Q / scale = dS ddK + T K.
    __device__ __forceinline__ void compute(
        const IterationStage& stage, float (&d2q)[DQ_REGS]) const {
        const int n = stage.others.index;
        const u32 phase = stage.others.phase;
        const u64 k = descriptor(shared_address(&shared.k), K_PANEL_BYTES);
        const u64 k_dot = descriptor(shared_address(&shared.k_dot), K_PANEL_BYTES);
        mbarrier_wait(shared_address(&shared.ds_full[n]), phase);
        warpgroup_fence_operand(d2q);
        wgmma_fence();
        if constexpr (K_DOT) gemm_atb_ss<Element, BLOCK_K>(
            d2q, descriptor(shared_address(&shared.ds[n]), 0), k_dot);
        mbarrier_wait(shared_address(&shared.t_full[n]), phase);
        gemm_atb_ss<Element, BLOCK_K>(
            d2q, descriptor(shared_address(&shared.t[n]), 0), k, K_DOT);
        wgmma_commit();
        wgmma_wait<0>();
        warpgroup_fence_operand(d2q);
        mbarrier_arrive_if(lane == 0, shared_address(&shared.weights_empty[n]));
    }

    // Adds it to its sums; flags the query tile if the causal mask cuts it and d2Q is not finite.
    __device__ __forceinline__ void add(
        const float (&d2q)[DQ_REGS], const WorkTile& work, const QueryTileIterator& it,
        bool is_cut) const {
        float* sums = dq_sum_tile(args.arrays.dq_sum, query_tile_index(
                          args, NoSequence{}, work.batch, it.head, it.tile))
                    + dq_sum_first(thread);
        if (DETERMINISTIC) barrier_sync(SEMAPHORE_ACQUIRED, SEMAPHORE_THREADS);
        #pragma unroll
        for (int n = 0; n < DQ_REGS / 4; ++n)
            reduce_add_4(sums + dq_sum_step(0, n),
                         {d2q[n * 4], d2q[n * 4 + 1], d2q[n * 4 + 2], d2q[n * 4 + 3]});
        if (DETERMINISTIC) barrier_arrive(DQ_ADDED, SEMAPHORE_THREADS);
        if (!CAUSAL || !is_cut) return;
        bool finite = true;
        #pragma unroll
        for (int i = 0; i < DQ_REGS; ++i) finite &= fabsf(d2q[i]) < infinity();
        if (!finite) *query_flag(args, work.batch, it.head, it.tile * BLOCK_Q) = 1;
    }

    __device__ __forceinline__ void run() const {
        IterationStage stage;
        for (WorkState state;; ++state.count) {
            const WorkTile work = acquire_work_tile(shared, state);
            if (work.tile < 0) break;
            __syncwarp();
            release_work_tile(shared, state, lane == 0);
            const QueryTiles tiles = query_tiles(args, work.tile, NoSequence{});
            mbarrier_wait(shared_address(&shared.k_full), state.kv_phase());
            QueryTileIterator it(args, tiles, work);
            for (; it.remaining > 0; it.next(args, work), stage.next()) {
                float d2q[DQ_REGS];
                compute(stage, d2q);
                if (it.remaining == 1)                      // the work tile's last reads of K
                    mbarrier_arrive_if(lane == 0, shared_address(&shared.kv_empty));
                add(d2q, work, it, !tiles.full(it.tile));
                __syncwarp();
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
double_backward_sm90(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();

    // By a shuffle, so that the compiler knows that it is uniform in the warp.
    const int role = __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x / WARPGROUP), 0);
    if (role == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce_second_queries(args, shared);
        if (threadIdx.x == WARPGROUP - 32) produce_second_keys(args, shared);
        if (DETERMINISTIC && threadIdx.x / 32 == 1) order_dq_additions(args, shared);
    } else if (role == 1 || (FIVE && role == 2)) {
        warpgroup_reg_alloc<SCORE_REGISTERS>();
        ScoreRole{args, shared, FIVE ? (role - 1) * SCORE_COLUMNS : 0}.run();
    } else if (role == SCORE_WARPGROUPS + 1) {
        warpgroup_reg_alloc<KEY_REGISTERS>();
        KeyRole{args, shared}.run();
    } else {
        warpgroup_reg_dealloc<QUERY_REGISTERS>();
        QueryRole{args, shared}.run();
    }
}
