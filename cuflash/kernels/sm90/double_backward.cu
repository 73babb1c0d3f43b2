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
//                  shared memory, each as soon as it is there
//     2, keys      d2V and d2K, in registers
//     3, queries   d2Q of the iteration, which it adds from its registers to float sums in global
//                  memory; finish/dq.cu scales and rounds them
//
//     tensor cores of scores   S W W dP U |S' W' ..
//     its warps                  P  PW dS  |T
//     tensor cores of others     .. dV  dK dQ  | dK dQ ..
//
// Grid: as sm90/backward.cu's, ordered as DETERMINISTIC requires. Block: 4 warpgroups.
//
// Constants: Element, CAUSAL, HEAD_DIM and HEAD_DIM_V (32, 64, 96 or 128), BLOCK_Q and BLOCK_K
// (64), STAGES (of ddQ, dO and the weights), Q_STAGES (of Q), NUM_WARPS and SCORE_WARPS_Q of d2Q
// alone, DQ_SEMAPHORES (0, or 1 if DETERMINISTIC), SHARED_BYTES; HEADS_INNERMOST
// (backward_scheduler.cuh); Q_DOT, K_DOT, V_DOT: what moves; Arguments; no options but SCORE_MOD,
// whose arrays do not move (double_backward_score_mod.cuh).
// Shared memory and barriers: double_backward_producer.cuh.
//
// Where the causal mask cuts a tile, a NaN or an infinity may reach rows that do not see it, as
// 0 * NaN. Tiles with a non-finite result are then flagged (tile_flags.cuh), and the simt kernels,
// launched next, compute these anew.
//
// Bad at: short sequences: K and V of the next work tile wait for the end of this one.
#include "sm90/double_backward_producer.cuh"
#include "sm90/double_backward_score_mod.cuh"
#include "sm90/backward_roles.cuh"
#include "common/dq_accum.cuh"
#include "common/tile_flags.cuh"

constexpr int BLOCK_THREADS = 4 * WARPGROUP;
constexpr int DQ_REGS = HEAD_DIM / 2, DK_REGS = HEAD_DIM / 2, DV_REGS = HEAD_DIM_V / 2;
constexpr bool SCORES_MOVE = Q_DOT || K_DOT;
constexpr int K_PANEL_BYTES = BLOCK_K * PANEL_ROW_BYTES, Q_PANEL_BYTES = BLOCK_Q * PANEL_ROW_BYTES;

// As in backward_wide.cu: 512 for the four threads of the same rank in the warpgroups.
constexpr int PRODUCER_REGISTERS = SCORE_MOD ? 24 : 32, SCORE_REGISTERS = 248 - PRODUCER_REGISTERS;
constexpr int KEY_REGISTERS = 160, QUERY_REGISTERS = 104;
static_assert(PRODUCER_REGISTERS + SCORE_REGISTERS + KEY_REGISTERS + QUERY_REGISTERS == 512, "");

static_assert(BLOCK_Q == FLAG_TOKENS && BLOCK_K == FLAG_TOKENS, "a matmul has 64 rows");
static_assert(QueryGrid::M_TILES == 1 && THREADS == WARPGROUP, "a warpgroup has all of d2Q");
static_assert(DQ_SEMAPHORES == 0 || DQ_SEMAPHORES == 1, "one warpgroup adds to d2Q");

// ---- The scores ----

struct ScoreRole {
    const Arguments& args;
    SharedPlan& shared;
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, warp_row = thread / 32 * 16;
    const int first_column = lane % 4 * 2;                  // the lane's first query in a tile
    const float scale_log2 = static_cast<float>(args.arrays.scale) * LOG2_E;
    const u64 k = descriptor(shared_address(&shared.k), 0);
    const u64 k_dot = descriptor(shared_address(&shared.k_dot), 0);
    const u64 v = descriptor(shared_address(&shared.v), 0);
    const u64 v_dot = descriptor(shared_address(&shared.v_dot), 0);

    __device__ __forceinline__ void publish_rounded(
        const float (&x)[S_REGS], const void* tile, const void* full) const {
        u32 rounded[S_REGS / 2];
        pack_pairs<Element>(rounded, x);
        publish(shared_address(tile), shared_address(full), rounded, warp_row, lane);
    }

    // Issues the scores' matmuls of a query tile, in the order in which they are waited for. dO's
    // stage has then arrived.
    __device__ __forceinline__ void issue(
        const IterationStage& stage, float (&s)[S_REGS], float (&w)[S_REGS], float (&dp)[S_REGS],
        float (&u)[S_REGS]) const {
        const int i = stage.q.index, n = stage.others.index;
        const u32 phase = stage.others.phase;
        const u64 q = descriptor(shared_address(&shared.q[i]), 0);
        const u64 dout = descriptor(shared_address(&shared.dout[n]), 0);
        mbarrier_wait(shared_address(&shared.q_full[i]), stage.q.phase);
        issue_scores<HEAD_DIM>(s, k, q);
        if constexpr (Q_DOT) mbarrier_wait(shared_address(&shared.q_dot_full[n]), phase);
        if constexpr (SCORES_MOVE)
            issue_tangents(w, k, k_dot, q, descriptor(shared_address(&shared.q_dot[n]), 0));
        mbarrier_wait(shared_address(&shared.dout_full[n]), phase);
        issue_scores<HEAD_DIM_V>(dp, v, dout);
        if constexpr (V_DOT) issue_scores<HEAD_DIM_V>(u, v_dot, dout);
    }

    // P (W - b) to shared memory, once the weights of the stage before are read.
    __device__ __forceinline__ void publish_product(
        const IterationStage& stage, const float (&p)[S_REGS], const float (&w)[S_REGS]) const {
        const int n = stage.others.index;
        u32 rounded[S_REGS / 2];
        round_product(rounded, p, w);
        mbarrier_wait(shared_address(&shared.weights_empty[n]), stage.others.phase ^ 1);
        publish(shared_address(&shared.pw[n]), shared_address(&shared.pw_full[n]), rounded,
                warp_row, lane);
    }

    // One query tile. `key`: the lane's first. What a user's f is of masked pairs, NaN perhaps, is
    // zeroed in each tile of weights, after the factors that f gives it.
    __device__ __forceinline__ void iterate(
        const IterationStage& stage, const Mask<CAUSAL, WINDOW>& mask, const MaskBounds& bounds,
        int batch, int key) const {
        const int n = stage.others.index;
        const SecondRows& rows = shared.rows[n];
        float s[S_REGS], w[S_REGS], dp[S_REGS], u[S_REGS];
        issue(stage, s, w, dp, u);
        const bool is_cut = cuts(bounds.first_full, bounds.end_full, rows.q_start);
        const int query = rows.q_start + first_column;      // the lane's first
        ScoreMod<float> score_mod(args);
        score_mod.set_head(args, batch, rows.head);
        Slopes user;                                        // SCORE_MOD

        wgmma_wait<1 + SCORES_MOVE + V_DOT>();              // S
        warpgroup_fence_operand(s);
        if constexpr (SCORE_MOD)
            probabilities_of_user(s, user, score_mod, rows, first_column, key);
        else
            exponentiate(s, LaneRows<>(rows, first_column), scale_log2);
        if (is_cut) {
            zero_masked(s, mask, bounds, query);
            if constexpr (SCORE_BENDS) zero_masked(user.slopes, mask, bounds, query);
        }

        wgmma_wait<1 + V_DOT>();                            // W
        if constexpr (SCORES_MOVE) warpgroup_fence_operand(w);
        else
            #pragma unroll
            for (float& x : w) x = 0.0f;
        if constexpr (SCORE_MOD)
            relative_tangents_of_user(w, user, score_mod.scale, rows, first_column);
        else
            relative_tangents(w, rows, first_column);
        if (is_cut) zero_masked(w, mask, bounds, query);
        publish_product(stage, s, w);

        wgmma_wait<V_DOT>();                                // dP
        warpgroup_fence_operand(dp);
        score_gradients(dp, s, rows, first_column);
        if (is_cut) zero_masked(dp, mask, bounds, query);
        if constexpr (SCORE_MOD) {
            float scaled[S_REGS];
            score_gradients_of_user(scaled, dp, user);
            publish_rounded(scaled, &shared.ds[n], &shared.ds_full[n]);
        } else {
            publish_rounded(dp, &shared.ds[n], &shared.ds_full[n]);
        }

        wgmma_wait<0>();                                    // U
        if constexpr (V_DOT) warpgroup_fence_operand(u);
        else
            #pragma unroll
            for (float& x : u) x = 0.0f;
        second_score_gradients(u, s, w, dp, rows, first_column);
        if constexpr (SCORE_MOD) second_score_gradients_of_user(u, dp, user);
        __syncwarp();
        mbarrier_arrive_if(lane == 0, shared_address(&shared.dout_empty[n]));
        if (is_cut) zero_masked(u, mask, bounds, query);
        publish_rounded(u, &shared.t[n], &shared.t_full[n]);
    }

    __device__ __forceinline__ void run() const {
        const Shape& shape = args.arrays.shape;
        const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, {}};
        IterationStage stage;
        for (WorkState state;; ++state.count) {
            const WorkTile work = acquire_work_tile(shared, state);
            if (work.tile < 0) break;
            __syncwarp();
            release_work_tile(shared, state, lane == 0);
            const QueryTiles tiles = query_tiles(args, work.tile, NoSequence{});
            const int key = work.tile * BLOCK_K + warp_row + lane / 4;
            const MaskBounds bounds(mask, tiles, key);
            int remaining = QueryTileIterator(args, tiles, work).remaining;
            mbarrier_wait(shared_address(&shared.k_full), state.kv_phase());
            mbarrier_wait(shared_address(&shared.v_full), state.kv_phase());
            for (; remaining > 0; --remaining, stage.next())
                iterate(stage, mask, bounds, work.batch, key);
            mbarrier_arrive_if(lane == 0, shared_address(&shared.kv_empty));
        }
    }
};

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
    } else if (role == 1) {
        warpgroup_reg_alloc<SCORE_REGISTERS>();
        ScoreRole{args, shared}.run();
    } else if (role == 2) {
        warpgroup_reg_alloc<KEY_REGISTERS>();
        KeyRole{args, shared}.run();
    } else {
        warpgroup_reg_dealloc<QUERY_REGISTERS>();
        QueryRole{args, shared}.run();
    }
}
