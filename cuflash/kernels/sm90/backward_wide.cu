// Backward attention as in sm90/backward.cu, for head dimensions up to 256: dK and dV of 64 keys
// fill the registers of a warpgroup each, so a third one has S and dP.
//
//     S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = P (dP - delta)
//     dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
//
// A persistent block takes one work tile after another, 64 keys of one key head
// (backward_scheduler.cuh). Warpgroup 0 produces: it loads tiles. Each of the others has one role:
//     1, scores      S^T and dP^T, from these P^T and dS^T, which go to shared memory;
//                    dQ, which it adds from its registers to a float sum in global memory, or
//                    to integers if INTEGER_DQ
//     2, gradient    dV += P^T dO
//     3, gradient    dK += dS^T Q
// finish/dq.cu scales and rounds the sums of dQ.
//
// The scores are an iteration ahead: S and dP of the next query tile are issued with dQ of this
// one. The tensor cores then have dV and dK to do, and the rest of dQ, while the next P and dS are
// computed:
//
//     tensor cores   dQ S' dQ dP'  (dV  dK, of two others)  dQ' S" dQ' dP"
//     scores           |  |out |out,P'   dS'                  |  |out |out,P"
//
// Grid: as sm90/backward.cu's. Block: 4 warpgroups.
//
// Constants: as sm90/backward.cu's, but HEAD_DIM up to 256 and BLOCK_K and BLOCK_Q 64; NUM_WARPS
// and SCORE_WARPS_Q of dQ alone; DQ_SEMAPHORES 0, or DQ_PARTS if DETERMINISTIC; INTEGER_DQ.
// Shared memory: SharedPlan, tiles as in smem.cuh.
//
// mbarriers: as in backward_shared.cuh. *_empty: an arrival of each warp of the role that reads
// last. p_full and ds_full, from the scores to the roles that need P or dS: an arrival of each
// warp. P and dS have no empty barriers: their stage is free when the same stage of Q and dO is, as
// these are read with them.
//
// Bad at: only 64 keys share a load of Q and dO, and an iteration adds up to 64 KB of dQ.
#include "sm90/backward_option_scores.cuh"
#include "sm90/backward_producer.cuh"
#include "sm90/backward_roles.cuh"
#include "sm90/backward_dq_order.cuh"
#include "common/dq_accum.cuh"
#include "sm90/backward_integer_dq.cuh"

constexpr int BLOCK_THREADS = 4 * WARPGROUP;
constexpr int ROLE_WARPS = WARPGROUP / 32;

// So many columns of dQ at a time: its accumulator takes registers in addition to S and dP.
constexpr int DQ_COLUMNS = HEAD_DIM % 128 == 0 ? 128 : HEAD_DIM;
constexpr int DQ_PARTS = HEAD_DIM / DQ_COLUMNS, DQ_REGS = DQ_COLUMNS / 2;
constexpr int K_PANEL_BYTES = BLOCK_K * PANEL_ROW_BYTES;

// An SM's 64 K registers are 512 for the four threads of the same rank in the warpgroups, which
// start with 128 each.
constexpr int PRODUCER_REGISTERS = 32;
constexpr int GRADIENT_REGISTERS = HEAD_DIM > 192 ? HEAD_DIM / 2 + 32 : 128;
constexpr int REMAINING_REGISTERS = 512 - PRODUCER_REGISTERS - 2 * GRADIENT_REGISTERS;
constexpr int SCORE_REGISTERS = REMAINING_REGISTERS < 240 ? REMAINING_REGISTERS : 240;

// Whether registers hold the next iteration's biases, S and dP along with dQ.
constexpr bool EARLY_BIASES = SCORE_REGISTERS > DQ_REGS + 2 * S_REGS + 64;

static_assert(BLOCK_Q == 64 && BLOCK_K == 64, "a warpgroup's product has 64 rows");
static_assert(HEAD_DIM % 64 == 0 && HEAD_DIM_V <= HEAD_DIM, "whole panels; registers");
static_assert(QueryGrid::M_TILES == 1 && THREADS == WARPGROUP, "a warpgroup has all of dQ");
static_assert(DQ_SEMAPHORES == 0 || DQ_SEMAPHORES == DQ_PARTS, "each part of dQ has its order");

struct SharedTiles {
    static constexpr int K_STAGES = 1;
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
    SmemTile<BLOCK_Q, HEAD_DIM> q[STAGES];
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout[STAGES];
    SmemTile<BLOCK_K, BLOCK_Q> p[STAGES], ds[STAGES];       // P^T, dS^T
    QueryRows rows[STAGES];
    u64 q_full[STAGES], q_empty[STAGES], dout_full[STAGES], dout_empty[STAGES];
    u64 p_full[STAGES], ds_full[STAGES];
    u64 k_full[K_STAGES], v_full, kv_empty, work_full[WORK_STAGES], work_empty[WORK_STAGES];
    WorkTile work_tiles[WORK_STAGES];
    int has_boundary[BOUNDARY_FLAGS];
    __device__ __forceinline__ u32 k_tile(WorkState) { return shared_address(&k); }
};
struct SharedPlan : SharedTiles, DqOrder<DQ_SEMAPHORES> {};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// ---- The score warpgroup: S, dP, P, dS, and dQ ----

// Adds columns [part * DQ_COLUMNS, (part + 1) * DQ_COLUMNS) of an iteration's dQ to its sums, of
// which `sums` is the thread's first. lane_grid: of row lane % 16 of the warp's rows.
__device__ __forceinline__ void add_dq(
    const Arguments& args, float* sums, const float (&dq)[DQ_REGS], int part, u32 lane_grid,
    int lane) {
    if constexpr (INTEGER_DQ) {
        const RowPair grids(lane_grid, lane);
        int* words = reinterpret_cast<int*>(sums) + dq_sum_step(0, part * (DQ_REGS / 4)) - lane * 3;
        add_limb<false>(words, dq, grids);
        if (grids.are_wide()) add_limb<true>(words + low_sums_distance(args), dq, grids);
    } else {
        #pragma unroll
        for (int n = 0; n < DQ_REGS / 4; ++n)
            reduce_add_4(sums + dq_sum_step(0, part * (DQ_REGS / 4) + n),
                         {dq[n * 4], dq[n * 4 + 1], dq[n * 4 + 2], dq[n * 4 + 3]});
    }
}

// S or dP of an iteration, the next to issue. Here and below the members are the variables of
// compute_scores(), as in sm90/backward.cu.
struct IssueS {
    SharedPlan& shared;
    const u64& k_rows;
    const PipelineState<STAGES>& next;
    float (&s)[S_REGS];

    __device__ __forceinline__ void operator()() const {
        mbarrier_wait(shared_address(&shared.q_full[next.index]), next.phase);
        issue_scores<HEAD_DIM>(s, k_rows, descriptor(shared_address(&shared.q[next.index]), 0));
    }
};
struct IssueDp {
    SharedPlan& shared;
    const u64& v_rows;
    PipelineState<STAGES>& next;
    float (&dp)[S_REGS];

    __device__ __forceinline__ void operator()() const {
        mbarrier_wait(shared_address(&shared.dout_full[next.index]), next.phase);
        issue_scores<HEAD_DIM_V>(
            dp, v_rows, descriptor(shared_address(&shared.dout[next.index]), 0));
        next.next();
    }
};

// `pairs` of the iteration whose S is being computed: its rows have come with Q.
struct PreparePairs {
    const Arguments& args;
    const Shape& shape;
    const Mask<CAUSAL, WINDOW>& mask;
    const MaskBounds& bounds;
    const PairMask& pair_mask;
    const Dropout<float>& dropout;
    SharedPlan& shared;
    const int &first_column, &first_key;
    LanePairs& pairs;

    __device__ __forceinline__ void operator()(int stage) const {
        const QueryRows& rows = shared.rows[stage];
        pairs.head = rows.head;
        pairs.query = rows.q_start + first_column;
        pairs.distance = pairs.query + shape.seqlen_k - shape.seqlen_q - first_key;
        const bool is_cut = cuts(bounds.first_full, bounds.end_full, rows.q_start);
        compute_bits(pairs, args, dropout, pair_mask, mask, rows, is_cut,
                     SKIPS_TILES && shared.has_boundary[stage]);
        if (EARLY_BIASES) load_biases(pairs, args);
    }
};

// An iteration of a work tile. The last one has no next S and dP to issue.
struct Iterate {
    const Arguments& args;
    const Shape& shape;
    const Mask<CAUSAL, WINDOW>& mask;
    const MaskBounds& bounds;
    const Dropout<float>& dropout;
    const float& scale_log2;
    SharedPlan& shared;
    const int &thread, &lane, &warp_row, &first_column;
    const WorkTile& work;
    QueryTileIterator& it;
    const u64& k_columns;
    float (&s)[S_REGS];
    float (&dp)[S_REGS];
    PipelineState<STAGES>& stage;
    LanePairs& pairs;
    const IssueS& issue_s;
    const IssueDp& issue_dp;
    const PreparePairs& prepare_pairs;

    template <class Last> __device__ __forceinline__ void operator()(Last last) const {
        const QueryRows& rows = shared.rows[stage.index];
        const int q_start = rows.q_start;
        const bool is_cut = cuts(bounds.first_full, bounds.end_full, q_start);
        const bool has_boundary = SKIPS_TILES && shared.has_boundary[stage.index];
        const ZeroMasked<false> zero_masked{
            mask, bounds, pairs, q_start, first_column, is_cut, has_boundary};
        const u32 ds_tile = shared_address(&shared.ds[stage.index]);
        float derivatives[S_REGS];
        u32 p[S_REGS / 2], ds[S_REGS / 2];

        const LaneRows<> lane_rows(rows, first_column);
        compute_p(s, derivatives, p, lane_rows, scale_log2, args, pairs, dropout, zero_masked,
                  is_cut || has_boundary);
        publish(shared_address(&shared.p[stage.index]),
                shared_address(&shared.p_full[stage.index]), p, warp_row, lane);
        wgmma_wait<0>();                                    // dP
        warpgroup_fence_operand(dp);
        mbarrier_arrive_if(lane == 0, shared_address(&shared.dout_empty[stage.index]));
        compute_ds(ds, dp, derivatives, s, p, lane_rows, args, pairs, dropout, zero_masked);
        drop_overflowing_rows(args, work, rows, ds, first_column);
        const u32 lane_grid = lane_grid_of(rows, thread);   // dK's warpgroup releases the rows
        publish(ds_tile, shared_address(&shared.ds_full[stage.index]), ds, warp_row, lane);
        mbarrier_wait(shared_address(&shared.ds_full[stage.index]), stage.phase);

        float* sums = dq_sum_tile(args.arrays.dq_sum,
                                  query_tile_index(args, sequence_of(work), work.batch,
                                                   it.head, it.tile))
                    + dq_sum_first(thread);
        #pragma unroll
        for (int part = 0; part < DQ_PARTS; ++part) {
            constexpr int PART_BYTES = DQ_COLUMNS / PANEL_COLUMNS * K_PANEL_BYTES;
            const bool is_first = part == 0, is_last = part == DQ_PARTS - 1;
            float dq[DQ_REGS];
            warpgroup_fence_operand(dq);
            wgmma_fence();
            gemm_atb_ss<Element, BLOCK_K>(
                dq, descriptor(ds_tile, 0), advance(k_columns, part * PART_BYTES));
            wgmma_commit();
            if (!last.value && is_first) issue_s();
            if (!last.value && is_last) {
                issue_dp();
                prepare_pairs((stage.index + 1) % STAGES);
            }
            if (last.value) wgmma_wait<0>();
            else if (is_first && is_last) wgmma_wait<2>();
            else wgmma_wait<1>();
            warpgroup_fence_operand(dq);
            shared.wait_acquired(part, stage);
            add_dq(args, sums, dq, part, lane_grid, lane);
            shared.arrive_added(part, stage);
        }
        if (!last.value && !EARLY_BIASES) load_biases(pairs, args);
        if (!last.value) wgmma_wait<1>();                   // the next S
        warpgroup_fence_operand(s);
        it.next(args, work);
        stage.next();
    }
};

__device__ __forceinline__ void compute_scores(const Arguments& args, SharedPlan& shared) {
    auto&& shape = tile_shape(args);
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, warp_row = thread / 32 * 16;
    const int first_column = lane % 4 * 2;                  // the lane's first query in a tile
    const float scale_log2 = LINEAR ? static_cast<float>(args.arrays.scale) * LOG2_E : LOG2_E;
    Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(args)};
    Dropout<float> dropout(args);

    const u64 k_rows = descriptor(shared_address(&shared.k), 0);
    const u64 v_rows = descriptor(shared_address(&shared.v), 0);
    const u64 k_columns = descriptor(shared_address(&shared.k), K_PANEL_BYTES);

    float s[S_REGS], dp[S_REGS];
    PipelineState<STAGES> stage, next;                      // this iteration's; the next to issue
    const IssueS issue_s{shared, k_rows, next, s};
    const IssueDp issue_dp{shared, v_rows, next, dp};

    for (WorkState state;; ++state.count) {
        const WorkTile work = acquire_work_tile(shared, state);
        if (work.tile < 0) break;
        __syncwarp();
        release_work_tile(shared, state, lane == 0);
        const auto sequence = sequence_of(work);
        set_lengths(shape, sequence);
        set_lengths(mask, sequence);
        const QueryTiles tiles = query_tiles(args, work.tile, sequence);
        const int first_key = work.tile * BLOCK_K + warp_row + lane / 4;
        const MaskBounds bounds(mask, tiles, first_key);
        const PairMask pair_mask(args, work.batch);
        dropout.set_sequence(number_of(sequence));
        QueryTileIterator it(args, tiles, work);

        mbarrier_wait(shared_address(&shared.k_full), state.kv_phase());
        issue_s();
        mbarrier_wait(shared_address(&shared.v_full), state.kv_phase());
        issue_dp();
        LanePairs pairs = {PACKED ? number_of(sequence) : work.batch, 0, 0, first_key, 0,
                           shape.seqlen_q, shape.seqlen_k};
        const PreparePairs prepare_pairs{
            .args = args, .shape = shape, .mask = mask, .bounds = bounds, .pair_mask = pair_mask,
            .dropout = dropout, .shared = shared, .first_column = first_column,
            .first_key = first_key, .pairs = pairs};
        prepare_pairs(stage.index);
        if (!EARLY_BIASES) load_biases(pairs, args);
        wgmma_wait<1>();                                    // S
        warpgroup_fence_operand(s);

        const Iterate iterate{
            .args = args, .shape = shape, .mask = mask, .bounds = bounds, .dropout = dropout,
            .scale_log2 = scale_log2, .shared = shared, .thread = thread, .lane = lane,
            .warp_row = warp_row, .first_column = first_column, .work = work, .it = it,
            .k_columns = k_columns, .s = s, .dp = dp, .stage = stage, .pairs = pairs,
            .issue_s = issue_s, .issue_dp = issue_dp, .prepare_pairs = prepare_pairs};
        while (it.remaining > 1) iterate(Bool<false>{});
        iterate(Bool<true>{});
        mbarrier_arrive_if(lane == 0, shared_address(&shared.kv_empty));
    }
}

// ---- The gradient warpgroups: dV, dK ----

// Operands and result of a gradient: sum += A B over the queries of each iteration.
struct Gradient {
    const void* a; int a_bytes;                             // P^T or dS^T, the first stage
    const void* b; int b_bytes;                             // dO or Q
    const u64* a_full; const u64* b_full; const u64* b_empty;
    void* target; Strides stride;
    int num_columns;
    float scale;
};

template <int COLUMNS>
__device__ __forceinline__ void compute_gradient(
    const Arguments& args, SharedPlan& shared, const Gradient& gradient) {
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    const u64 first_a = descriptor(shared_address(gradient.a), 0);
    const u64 first_b = descriptor(shared_address(gradient.b), BLOCK_Q * PANEL_ROW_BYTES);
    // ptxas refuses a product of 256 columns in a kernel of 512 threads, which has 128 registers.
    constexpr int PARTS = COLUMNS > 192 ? 2 : 1, PART_COLUMNS = COLUMNS / PARTS;
    constexpr int PART_BYTES = PART_COLUMNS / PANEL_COLUMNS * BLOCK_Q * PANEL_ROW_BYTES;
    float sum[PARTS][PART_COLUMNS / 2];
    PipelineState<STAGES> stage;
    for (WorkState state;; ++state.count) {
        const WorkTile work = acquire_work_tile(shared, state);
        if (work.tile < 0) break;
        __syncwarp();
        release_work_tile(shared, state, lane == 0);
        const auto sequence = sequence_of(work);
        const QueryTiles tiles = query_tiles(args, work.tile, sequence);
        const int num_iterations = QueryTileIterator(args, tiles, work).remaining;
        for (int i = 0; i < num_iterations; ++i, stage.next()) {
            mbarrier_wait(shared_address(gradient.b_full + stage.index), stage.phase);
            mbarrier_wait(shared_address(gradient.a_full + stage.index), stage.phase);
            const u64 a = advance(first_a, stage.index * gradient.a_bytes);
            const u64 b = advance(first_b, stage.index * gradient.b_bytes);
            #pragma unroll
            for (int part = 0; part < PARTS; ++part) warpgroup_fence_operand(sum[part]);
            wgmma_fence();
            #pragma unroll
            for (int part = 0; part < PARTS; ++part)
                gemm_ab_ss<Element, BLOCK_Q>(
                    sum[part], a, advance(b, part * PART_BYTES), i > 0);
            wgmma_commit();
            wgmma_wait<0>();
            #pragma unroll
            for (int part = 0; part < PARTS; ++part) warpgroup_fence_operand(sum[part]);
            mbarrier_arrive_if(lane == 0, shared_address(gradient.b_empty + stage.index));
        }

        const Strides& stride = gradient.stride;
        const int key = work.tile * BLOCK_K + thread / 32 * 16 + lane / 4;
        bool finite = true;
        Element* target = static_cast<Element*>(gradient.target) + work.batch * stride.batch
                        + work.head * stride.head + (sequence.first_k + key) * stride.token;
        #pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            #pragma unroll
            for (int i = 0; i < PART_COLUMNS / 2; ++i) {
                sum[part][i] *= gradient.scale;
                finite &= fabsf(sum[part][i]) < infinity();
            }
            store_to_array(target + part * PART_COLUMNS, stride.token, sum[part], key,
                           seqlen_k_of(args, sequence), gradient.num_columns - part * PART_COLUMNS);
        }
        if (MASKED && !finite) *recompute_flag(args, flag_coord(work)) = 1;
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
backward_sm90_wide(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    if (threadIdx.x == 0) {
        shared.init_dq_order();
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared_address(&shared.q_full[i]), 1);
            mbarrier_init(shared_address(&shared.q_empty[i]), ROLE_WARPS);
            mbarrier_init(shared_address(&shared.dout_full[i]), 1);
            mbarrier_init(shared_address(&shared.dout_empty[i]), 2 * ROLE_WARPS);
            mbarrier_init(shared_address(&shared.p_full[i]), ROLE_WARPS);
            mbarrier_init(shared_address(&shared.ds_full[i]), ROLE_WARPS);
        }
        mbarrier_init(shared_address(&shared.k_full), 1);
        mbarrier_init(shared_address(&shared.v_full), 1);
        mbarrier_init(shared_address(&shared.kv_empty), ROLE_WARPS);
        for (int i = 0; i < WORK_STAGES; ++i) {
            mbarrier_init(shared_address(&shared.work_full[i]), 1);
            // score and gradient warps, the K/V producer, the semaphores' warps
            mbarrier_init(
                shared_address(&shared.work_empty[i]), 3 * ROLE_WARPS + 1 + DQ_SEMAPHORES);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    const BackwardArguments& arrays = args.arrays;
    const int warp = threadIdx.x / 32;
    // By a shuffle, so that the compiler knows that it is uniform in the warp.
    const int role = __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x / WARPGROUP), 0);
    if (role == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x < Q_PRODUCER_THREADS) produce_queries(args, shared);
        if (threadIdx.x == WARPGROUP - 32) produce_keys(args, shared);
        if (warp >= 1 && warp <= DQ_SEMAPHORES)
            shared.order_additions(args, shared, warp - 1, warp - 1);
    } else if (role == 1) {
        warpgroup_reg_alloc<SCORE_REGISTERS>();
        compute_scores(args, shared);
    } else if (role == 2) {
        warpgroup_reg_alloc<GRADIENT_REGISTERS>();
        compute_gradient<HEAD_DIM_V>(
            args, shared,
            {.a = shared.p, .a_bytes = sizeof(shared.p[0]),
             .b = shared.dout, .b_bytes = sizeof(shared.dout[0]),
             .a_full = shared.p_full, .b_full = shared.dout_full, .b_empty = shared.dout_empty,
             .target = arrays.dv, .stride = arrays.dv_stride,
             .num_columns = arrays.shape.head_dim_v, .scale = 1.0f});
    } else {
        warpgroup_reg_alloc<GRADIENT_REGISTERS>();
        compute_gradient<HEAD_DIM>(
            args, shared,
            {.a = shared.ds, .a_bytes = sizeof(shared.ds[0]),
             .b = shared.q, .b_bytes = sizeof(shared.q[0]),
             .a_full = shared.ds_full, .b_full = shared.q_full, .b_empty = shared.q_empty,
             .target = arrays.dk, .stride = arrays.dk_stride,
             .num_columns = arrays.shape.head_dim,
             .scale = static_cast<float>(arrays.scale)});
    }
}
