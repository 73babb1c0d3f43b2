// Backward attention as in sm90/backward_wide.cu, by clusters of two blocks: head dimensions from
// 193 to 256, calls without options.
//
//     S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = P (dP - delta)
//     dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
//
// A persistent cluster takes one work tile after another: 128 keys of one key head, 64 of which are
// a block's (backward_cluster_producer.cuh). Both blocks visit the same query tiles. Each sends its
// dS^T to the other's shared memory, so that each computes dQ from all 128 keys, but only half of
// its columns: a cluster adds half as much to the sums of dQ as two blocks would. Warpgroup 0
// produces: it loads tiles. Each of the others has a role:
//     1, queries     half of the columns of dQ, added from registers to a sum in global memory
//     2, scores      S^T, dP^T, P^T, and dS^T, which it stores and sends; dV += P^T dO
//     3, gradient    dK += dS^T Q
// finish/dq.cu scales and rounds the sums of dQ.
//
// When dS^T is stored, the next S, this dV and the next dP are issued. The tensor cores then have
// dV, dP, dK and dQ to do while the next P is computed:
//
//     scores         |P  |dS |S'     |P'      |dS'|S"
//     tensor cores           |S' dV dP'       |   |S"
//     gradient               |dK          |
//     queries                |    dQ  out  dQ  out|
//
// Grid: two blocks a cluster. Block: 4 warpgroups.
//
// Constants: as sm90/backward_wide.cu's, with two stages; CLUSTER_BLOCKS.
// Shared memory: SharedPlan, tiles as in smem.cuh.
//
// mbarriers: as in backward_shared.cuh. q_empty and dout_empty: an arrival of each warp of the role
// that reads last, of both blocks. ds_full: an arrival of each score warp. ds_empty: of each warp
// that reads dS^T, those of the other block too: dS^T is then free in both. peer_ds_full: the other
// block's dS^T has arrived. work_ready: block 1 awaits a work tile. DETERMINISTIC: DqOrder, of the
// block's columns.
//
// Bad at: one stage of dS^T has room, so that scores wait where dQ is late.
#include "sm90/backward_scores.cuh"
#include "sm90/backward_cluster_producer.cuh"
#include "sm90/backward_roles.cuh"
#include "sm90/backward_dq_order.cuh"
#include "common/dq_accum.cuh"

constexpr int BLOCK_THREADS = 4 * WARPGROUP;
constexpr int ROLE_WARPS = WARPGROUP / 32;
constexpr int DQ_COLUMNS = HEAD_DIM / CLUSTER_BLOCKS;       // a block's
constexpr int K_PANEL_BYTES = BLOCK_K * PANEL_ROW_BYTES;

// An SM's 64 K registers are 512 for the four threads of the same rank in the warpgroups.
constexpr int PRODUCER_REGISTERS = 32, QUERY_REGISTERS = 72;
constexpr int SCORE_REGISTERS = 248, GRADIENT_REGISTERS = 160;

// ptxas refuses a product of 256 columns in a kernel of 512 threads, which has 128 registers; and
// one of 128 columns where a thread has fewer than 90.
constexpr int GRADIENT_PARTS = 2;
constexpr int DQ_PARTS = DQ_COLUMNS / PANEL_COLUMNS, DQ_REGS = PANEL_COLUMNS / 2;
template <int COLUMNS> constexpr int PART_REGS = COLUMNS / GRADIENT_PARTS / 2;
template <int COLUMNS> constexpr int PART_BYTES =
    COLUMNS / GRADIENT_PARTS / PANEL_COLUMNS * BLOCK_Q * PANEL_ROW_BYTES;

static_assert(BLOCK_Q == 64 && BLOCK_K == 64, "a warpgroup's product has 64 rows");
static_assert(STAGES == 2, "the previous iteration's stage is the other one");
static_assert(HEAD_DIM % 128 == 0 && HEAD_DIM_V % 128 == 0, "halves of whole panels");
static_assert(QueryGrid::M_TILES == 1 && THREADS == WARPGROUP, "a warpgroup has all of dQ");
static_assert(!OPTIONS && !PACKED && !INTEGER_DQ, "calls without options");
static_assert(DQ_SEMAPHORES == (DETERMINISTIC ? CLUSTER_BLOCKS : 0), "each half has its order");

struct SharedTiles {
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
    SmemTile<BLOCK_K, DQ_COLUMNS> peer_k;                   // the other block's keys
    SmemTile<BLOCK_Q, HEAD_DIM> q[STAGES];
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout[STAGES];
    SmemTile<BLOCK_K, BLOCK_Q> ds, peer_ds;                 // dS^T
    QueryRows rows[STAGES];
    SentWorkTile work_tiles[WORK_STAGES];
    u64 q_full[STAGES], q_empty[STAGES], dout_full[STAGES], dout_empty[STAGES];
    u64 ds_full, ds_empty, peer_ds_full;
    u64 k_full, v_full, peer_k_full, kv_empty;
    u64 work_full[WORK_STAGES], work_empty[WORK_STAGES], work_ready[WORK_STAGES];
};
struct SharedPlan : SharedTiles, DqOrder<DETERMINISTIC ? 1 : 0> {};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

__device__ __forceinline__ void init_barriers(SharedPlan& shared) {
    constexpr int READERS = CLUSTER_BLOCKS * ROLE_WARPS;
    const auto init = [](u64& barrier, int arrivals) {
        mbarrier_init(shared_address(&barrier), arrivals);
    };
    for (int i = 0; i < STAGES; ++i) {
        init(shared.q_full[i], 1);
        init(shared.q_empty[i], READERS);
        init(shared.dout_full[i], 1);
        init(shared.dout_empty[i], READERS);
    }
    init(shared.ds_full, ROLE_WARPS);
    init(shared.ds_empty, (1 + CLUSTER_BLOCKS) * ROLE_WARPS);   // dK; dQ of both blocks
    init(shared.peer_ds_full, ROLE_WARPS);
    init(shared.k_full, 1);
    init(shared.v_full, 1);
    init(shared.peer_k_full, 1);
    init(shared.kv_empty, ROLE_WARPS);
    for (int i = 0; i < WORK_STAGES; ++i) {
        init(shared.work_full[i], 1);
        // the three roles, the K/V producer, the semaphores' warp
        init(shared.work_empty[i], 3 * ROLE_WARPS + 1 + DETERMINISTIC);
        init(shared.work_ready[i], 1);
    }
    shared.init_dq_order();
    fence_mbarrier_init();
}

// Stores the block's rows of dK or dV, scaled, and flags the tile if one is not finite.
template <int COLUMNS>
__device__ __forceinline__ void store_gradient(
    const Arguments& args, float (&sum)[GRADIENT_PARTS][PART_REGS<COLUMNS>], const WorkTile& work,
    void* target, const Strides& stride, int num_columns, float scale) {
    const int thread = threadIdx.x % WARPGROUP, tile = work.tile + cluster_rank();
    const int key = tile * BLOCK_K + thread / 32 * 16 + thread % 32 / 4;
    const int seqlen_k = args.arrays.shape.seqlen_k;
    Element* first = static_cast<Element*>(target) + work.batch * stride.batch
                   + work.head * stride.head + key * stride.token;
    bool finite = true;
    #pragma unroll
    for (int part = 0; part < GRADIENT_PARTS; ++part) {
        #pragma unroll
        for (float& x : sum[part]) {
            x *= scale;
            finite &= fabsf(x) < infinity();
        }
        constexpr int COLUMNS_OF_PART = COLUMNS / GRADIENT_PARTS;
        store_to_array(first + part * COLUMNS_OF_PART, stride.token, sum[part], key, seqlen_k,
                       num_columns - part * COLUMNS_OF_PART);
    }
    if (MASKED && !finite) *recompute_flag_of_pair(args, work) = 1;
    __syncwarp();
}

// ---- The score warpgroup: S, dP, P, dS, and dV ----

// How many iterations the block had before this one: of it follow the stage and phase of Q and dO,
// and the phase of dS^T. One register holds them all.
struct IterationCount {
    u32 count = 0;
    __device__ __forceinline__ u32 stage() const { return count % STAGES; }
    __device__ __forceinline__ u32 phase() const { return count / STAGES % 2; }
    __device__ __forceinline__ u32 ds_phase() const { return count % 2; }
};

// An iteration of a work tile, whose S is complete; the previous dV and its dP have been issued. It
// issues the next S and dP, if it is not the last.
struct Iterate {
    const Arguments& args;
    SharedPlan& shared;
    const int &lane, &warp_row, &first_key, &first_full;
    float (&s)[S_REGS];
    float (&dp)[S_REGS];
    float (&dv)[GRADIENT_PARTS][PART_REGS<HEAD_DIM_V>];
    u32 (&p)[S_REGS / 2];                                   // P^T rounded, until dV is complete
    IterationCount& iteration;

    // S, and dP, of iteration `next`.
    __device__ __forceinline__ void issue_s(IterationCount next) const {
        const u32 stage = next.stage();
        mbarrier_wait(barrier_at(shared.q_full, stage), next.phase());
        warpgroup_fence_operand(s);
        wgmma_fence();
        gemm_abt_ss<Element, 1, BLOCK_K, BLOCK_Q, HEAD_DIM>(
            s, own_descriptor(shared_address(&shared.k), 0),
            advance(own_descriptor(shared_address(&shared.q), 0), stage * sizeof shared.q[0]));
        wgmma_commit();
    }
    __device__ __forceinline__ void issue_dp(IterationCount next) const {
        const u32 stage = next.stage();
        mbarrier_wait(barrier_at(shared.dout_full, stage), next.phase());
        warpgroup_fence_operand(dp);
        wgmma_fence();
        gemm_abt_ss<Element, 1, BLOCK_K, BLOCK_Q, HEAD_DIM_V>(
            dp, own_descriptor(shared_address(&shared.v), 0),
            advance(own_descriptor(shared_address(&shared.dout), 0),
                    stage * sizeof shared.dout[0]));
        wgmma_commit();
    }
    // dV += P^T dO, of this iteration.
    __device__ __forceinline__ void issue_dv(bool accumulate) const {
        const u64 dout = advance(
            own_descriptor(shared_address(&shared.dout), BLOCK_Q * PANEL_ROW_BYTES),
            iteration.stage() * sizeof shared.dout[0]);
        #pragma unroll
        for (int part = 0; part < GRADIENT_PARTS; ++part) warpgroup_fence_operand(dv[part]);
        wgmma_fence();
        #pragma unroll
        for (int part = 0; part < GRADIENT_PARTS; ++part)
            gemm_ab_rs<Element, BLOCK_Q>(
                dv[part], p, advance(dout, part * PART_BYTES<HEAD_DIM_V>), accumulate);
        wgmma_commit();
    }
    // The dV that has read `stage` of dO is complete.
    __device__ __forceinline__ void release_dout(bool condition, u32 stage) const {
        #pragma unroll
        for (int part = 0; part < GRADIENT_PARTS; ++part) warpgroup_fence_operand(dv[part]);
        arrive_in_both(lane == 0 && condition, barrier_at(shared.dout_empty, stage));
    }
    // Zeroes x at masked pairs, if the query tile has some.
    __device__ __forceinline__ void mask(float (&x)[S_REGS], const QueryRows& rows) const {
        const Shape& shape = args.arrays.shape;
        if (!cuts(first_full, shape.seqlen_q, rows.q_start)) return;
        const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, {}};
        zero_masked(x, mask, MaskBounds(mask, {}, first_key), rows.q_start + lane % 4 * 2);
    }
    // Each warp stores its 16 rows of dS^T, and sends them to the other block. The other's previous
    // dS^T has been read: ds_empty is complete.
    __device__ __forceinline__ void send_ds(const u32 (&ds)[S_REGS / 2]) const {
        constexpr int WARP_BYTES = 16 * PANEL_ROW_BYTES;
        const u32 rows = shared_address(&shared.ds) + warp_row * PANEL_ROW_BYTES;
        const u32 received = shared_address(&shared.peer_ds) + warp_row * PANEL_ROW_BYTES;
        const u32 full = shared_address(&shared.peer_ds_full);
        mbarrier_arrive_expect_if(lane == 0, full, WARP_BYTES);
        publish(shared_address(&shared.ds), shared_address(&shared.ds_full), ds, warp_row, lane);
        copy_to_block_if(
            lane == 0, peer_address(received), rows, peer_address(full), WARP_BYTES);
        __syncwarp();
    }
    template <class Last> __device__ __forceinline__ void operator()(Last last, bool first) const {
        u32 ds[S_REGS / 2];
        const QueryRows& rows = shared.rows[iteration.stage()];
        const int first_column = lane % 4 * 2;
        const LaneRows<> lane_rows(rows, first_column);
        exponentiate(s, lane_rows, static_cast<float>(args.arrays.scale) * LOG2_E);
        mask(s, rows);
        wgmma_wait<1>();                                    // the previous dV, which reads p
        release_dout(!first, iteration.stage() ^ 1);
        pack_pairs<Element>(p, s);
        wgmma_wait<0>();                                    // dP
        warpgroup_fence_operand(dp);
        const u32 lane_delta = lane_rows.delta.address();
        #pragma unroll
        for (int j = 0; j < S_REGS / 4; ++j) {
            float delta[2];
            lane_rows.delta.read(lane_delta, j, delta);
            #pragma unroll
            for (int i = j * 4; i < j * 4 + 4; ++i) dp[i] = s[i] * (dp[i] - delta[i % 2]);
        }
        mask(dp, rows);
        pack_pairs<Element>(ds, dp);
        mbarrier_wait(shared_address(&shared.ds_empty), iteration.ds_phase() ^ 1);
        send_ds(ds);
        if (!last.value) issue_s({iteration.count + 1});
        issue_dv(!first);
        if (!last.value) issue_dp({iteration.count + 1});
        wgmma_wait<last.value ? 0 : 2>();                   // the next S; at the end, dV
        if (last.value) release_dout(true, iteration.stage());
        warpgroup_fence_operand(s);
        ++iteration.count;
    }
};

__device__ __forceinline__ void compute_scores(const Arguments& args, SharedPlan& shared) {
    const Shape& shape = args.arrays.shape;
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, warp_row = thread / 32 * 16;
    float s[S_REGS], dp[S_REGS], dv[GRADIENT_PARTS][PART_REGS<HEAD_DIM_V>];
    u32 p[S_REGS / 2];
    IterationCount iteration;
    for (WorkState state;; ++state.count) {
        const WorkTile& work = acquire_work_tile(shared, state);
        if (work.tile < 0) break;
        const int tile = work.tile + cluster_rank();
        const int first_key = tile * BLOCK_K + warp_row + lane / 4;
        const int first_full = query_tiles(args, tile, NoSequence{}).first_full * BLOCK_Q;
        int remaining =
            QueryTileIterator(args, query_tiles(args, work.tile, NoSequence{}), work).remaining;
        const Iterate iterate{
            .args = args, .shared = shared, .lane = lane, .warp_row = warp_row,
            .first_key = first_key, .first_full = first_full, .s = s, .dp = dp, .dv = dv,
            .p = p, .iteration = iteration};

        mbarrier_wait(shared_address(&shared.k_full), state.kv_phase());
        mbarrier_wait(shared_address(&shared.v_full), state.kv_phase());
        iterate.issue_s(iteration);
        iterate.issue_dp(iteration);
        wgmma_wait<1>();                                    // S
        warpgroup_fence_operand(s);
        bool first = true;
        for (; remaining > 1; --remaining, first = false) iterate(Bool<false>{}, first);
        iterate(Bool<true>{}, first);
        store_gradient<HEAD_DIM_V>(args, dv, work, args.arrays.dv, args.arrays.dv_stride,
                                   shape.head_dim_v, 1.0f);
        release_work_tile(shared, state, lane == 0);
    }
}

// ---- The query warpgroup: dQ ----

// Adds columns of an iteration's dQ to their sums.
__device__ __forceinline__ void add_dq(float* sums, const float (&dq)[DQ_REGS]) {
    #pragma unroll
    for (int n = 0; n < DQ_REGS / 4; ++n)
        reduce_add_4(sums + dq_sum_step(0, n),
                     {dq[n * 4], dq[n * 4 + 1], dq[n * 4 + 2], dq[n * 4 + 3]});
}

// dQ = dS K, or dQ += dS K, of the keys of a block.
__device__ __forceinline__ void issue_dq(
    float (&dq)[DQ_REGS], u64 ds, u64 k_columns, bool accumulate) {
    wgmma_fence();
    gemm_atb_ss<Element, BLOCK_K>(dq, ds, k_columns, accumulate);
    wgmma_commit();
}

__device__ __forceinline__ void compute_dq(const Arguments& args, SharedPlan& shared) {
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, rank = cluster_rank();
    const int first_sum = dq_sum_first(thread) + dq_sum_step(0, rank * (DQ_COLUMNS / 8));
    const u64 k_columns = own_descriptor(
        shared_address(&shared.k) + rank * (DQ_COLUMNS / PANEL_COLUMNS) * K_PANEL_BYTES,
        K_PANEL_BYTES);
    const u64 peer_k_columns = own_descriptor(shared_address(&shared.peer_k), K_PANEL_BYTES);
    const u64 ds = own_descriptor(shared_address(&shared.ds), 0);
    const u64 peer_ds = own_descriptor(shared_address(&shared.peer_ds), 0);
    PipelineState<1> stage;
    PipelineState<STAGES> order;
    for (WorkState state;; ++state.count) {
        const WorkTile work = acquire_work_tile(shared, state);
        if (work.tile < 0) break;
        __syncwarp();
        release_work_tile(shared, state, lane == 0);
        mbarrier_wait(shared_address(&shared.k_full), state.kv_phase());
        mbarrier_wait(shared_address(&shared.peer_k_full), state.kv_phase());
        QueryTileIterator it(args, query_tiles(args, work.tile, NoSequence{}), work);
        for (; it.remaining > 0; it.next(args, work), stage.next(), order.next()) {
            const int index = query_tile_index(args, NoSequence{}, work.batch, it.head, it.tile);
            float* sums = dq_sum_tile(args.arrays.dq_sum, index) + first_sum;
            mbarrier_wait(shared_address(&shared.ds_full), stage.phase);
            #pragma unroll
            for (int part = 0; part < DQ_PARTS; ++part) {
                const bool is_last = part == DQ_PARTS - 1;
                float dq[DQ_REGS];
                warpgroup_fence_operand(dq);
                issue_dq(dq, ds, advance(k_columns, part * K_PANEL_BYTES), false);
                if (part == 0)
                    mbarrier_wait(shared_address(&shared.peer_ds_full), stage.phase);
                issue_dq(dq, peer_ds, advance(peer_k_columns, part * K_PANEL_BYTES), true);
                wgmma_wait<0>();
                warpgroup_fence_operand(dq);
                arrive_in_both(lane == 0 && is_last, shared_address(&shared.ds_empty));
                mbarrier_arrive_if(lane == 0 && is_last && it.remaining == 1,
                                   shared_address(&shared.kv_empty));
                if (part == 0) shared.wait_acquired(0, order);
                add_dq(sums + dq_sum_step(0, part * (DQ_REGS / 4)), dq);
            }
            shared.arrive_added(0, order);
        }
    }
}

// ---- The gradient warpgroup: dK ----

__device__ __forceinline__ void compute_dk(const Arguments& args, SharedPlan& shared) {
    const int lane = threadIdx.x % 32;
    const u64 ds = own_descriptor(shared_address(&shared.ds), 0);
    const u64 q_columns = own_descriptor(shared_address(&shared.q), BLOCK_Q * PANEL_ROW_BYTES);
    float dk[GRADIENT_PARTS][PART_REGS<HEAD_DIM>];
    PipelineState<STAGES> stage;
    PipelineState<1> ds_stage;
    for (WorkState state;; ++state.count) {
        const WorkTile work = acquire_work_tile(shared, state);
        if (work.tile < 0) break;
        __syncwarp();
        release_work_tile(shared, state, lane == 0);
        const int num_iterations =
            QueryTileIterator(args, query_tiles(args, work.tile, NoSequence{}), work).remaining;
        for (int i = 0; i < num_iterations; ++i, stage.next(), ds_stage.next()) {
            mbarrier_wait(shared_address(&shared.q_full[stage.index]), stage.phase);
            mbarrier_wait(shared_address(&shared.ds_full), ds_stage.phase);
            const u64 q = advance(q_columns, stage.index * int(sizeof shared.q[0]));
            #pragma unroll
            for (int part = 0; part < GRADIENT_PARTS; ++part) warpgroup_fence_operand(dk[part]);
            wgmma_fence();
            #pragma unroll
            for (int part = 0; part < GRADIENT_PARTS; ++part)
                gemm_ab_ss<Element, BLOCK_Q>(
                    dk[part], ds, advance(q, part * PART_BYTES<HEAD_DIM>), i > 0);
            wgmma_commit();
            wgmma_wait<0>();
            #pragma unroll
            for (int part = 0; part < GRADIENT_PARTS; ++part) warpgroup_fence_operand(dk[part]);
            mbarrier_arrive_if(lane == 0, shared_address(&shared.ds_empty));
            arrive_in_both(lane == 0, shared_address(&shared.q_empty[stage.index]));
        }
        store_gradient<HEAD_DIM>(
            args, dk, work, args.arrays.dk, args.arrays.dk_stride, args.arrays.shape.head_dim,
            static_cast<float>(args.arrays.scale));
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) __cluster_dims__(CLUSTER_BLOCKS)
backward_sm90_cluster(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(of_block(shared_bytes));
    if (threadIdx.x == 0) init_barriers(shared);
    cluster_sync();                                         // before anything is sent

    // By a shuffle, so that the compiler knows that it is uniform in the warp.
    const int role = __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x / WARPGROUP), 0);
    if (role == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) produce_queries_in_cluster(args, shared);
        if (threadIdx.x / 32 == 1)                          // of the block's columns
            shared.order_additions<CLUSTER_BLOCKS>(args, shared, 0, cluster_rank());
        if (threadIdx.x == WARPGROUP - 32) produce_keys_in_cluster(args, shared);
    } else if (role == 1) {
        warpgroup_reg_dealloc<QUERY_REGISTERS>();
        compute_dq(args, shared);
    } else if (role == 2) {
        warpgroup_reg_alloc<SCORE_REGISTERS>();
        compute_scores(args, shared);
    } else {
        warpgroup_reg_alloc<GRADIENT_REGISTERS>();
        compute_dk(args, shared);
    }
    cluster_sync();                                         // the other block may still send
}
