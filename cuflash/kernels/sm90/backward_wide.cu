// Backward attention as in sm90/backward.cu, for head dimensions up to 256: dK and dV of 64 keys
// fill the registers of a warpgroup each, so a third one has S and dP.
//
//     S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = P (dP - delta)
//     dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
//
// A block stays on its multiprocessor and takes one tile of 64 keys of one key head after another
// (backward_steps.cuh). Warpgroup 0 loads. Each of the others does one thing:
//     1, scores      S^T, dP^T, and from these P^T and dS^T, which it puts into shared memory;
//                    dQ, which it adds from its registers to a float sum in global memory
//     2              dV += P^T dO
//     3              dK += dS^T Q
// finish/dq.cu scales and rounds the sums of dQ.
//
// The scores are a step ahead: S and dP of the next query tile are issued with dQ of this one. So
// the tensor cores have dV and dK to do, and what is left of dQ, while a new P and dS are computed:
//
//     tensor cores   dQ S' dQ dP'  (dV  dK, of two others)  dQ' S" dQ' dP"
//     scores           |  |out |out,P'   dS'                  |  |out |out,P"
//
// Grid: as sm90/backward.cu's. Block: 4 warpgroups.
//
// Constants: as sm90/backward.cu's, but HEAD_DIM up to 256 and BLOCK_K and BLOCK_Q 64; NUM_WARPS
// and SCORE_WARPS_Q of dQ alone; TURNS 0 or 1.
// Shared memory: SharedPlan, tiles as in smem.cuh.
//
// Barriers: as sm90/backward.cu's. *_empty: an arrival of each warp that reads it last. p_full and
// ds_full, from the scores to those who need P or dS: an arrival of each warp. Nobody waits for an
// empty place of these two: it is the place of a Q and a dO, and they were read with them.
//
// Bad at: 64 keys share what is read of Q and dO, and a step's dQ is 64 KB of additions.
#include "sm90/backward_steps.cuh"
#include "common/dq_accum.cuh"

constexpr int ALL_THREADS = 4 * WARPGROUP;
constexpr int ROLE_WARPS = WARPGROUP / 32;

// dQ leaves in so many columns at a time, as its accumulator is beside those of S and dP.
constexpr int DQ_COLUMNS = HEAD_DIM % 128 == 0 ? 128 : HEAD_DIM;
constexpr int DQ_PARTS = HEAD_DIM / DQ_COLUMNS, DQ_COUNT = DQ_COLUMNS / 2;

// A multiprocessor's 64 K registers are 512 for each thread of a warpgroup, and all begin with 128.
constexpr int LOADING_REGISTERS = 32;
constexpr int GRADIENT_REGISTERS = HEAD_DIM > 192 ? HEAD_DIM / 2 + 32 : 128;
constexpr int LEFT = 512 - LOADING_REGISTERS - 2 * GRADIENT_REGISTERS;
constexpr int SCORE_REGISTERS = LEFT < 240 ? LEFT : 240;

// Whether there is room for the next step's biases, S and dP beside dQ.
constexpr bool BIASES_BESIDE_DQ = SCORE_REGISTERS > DQ_COUNT + 2 * S_COUNT + 64;

static_assert(BLOCK_Q == 64 && BLOCK_K == 64, "a warpgroup's product has 64 rows");
static_assert(HEAD_DIM % 64 == 0 && HEAD_DIM_V <= HEAD_DIM, "whole panels; registers");
static_assert(QueryGrid::M_TILES == 1 && THREADS == WARPGROUP, "a warpgroup has args of dQ");
static_assert(TURNS == 0 || TURNS == 1, "one warpgroup adds to dQ");

struct SharedPlan {
    static constexpr int K_PLACES = 1;
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
    SmemTile<BLOCK_Q, HEAD_DIM> q[STAGES];
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout[STAGES];
    SmemTile<BLOCK_K, BLOCK_Q> p[STAGES], ds[STAGES];       // P^T, dS^T
    QueryRows rows[STAGES];
    u64 q_full[STAGES], q_empty[STAGES], dout_full[STAGES], dout_empty[STAGES];
    u64 p_full[STAGES], ds_full[STAGES];
    u64 k_full[K_PLACES], v_full, kv_empty, work_full[WORKS], work_empty[WORKS];
    Work work[WORKS];                                       // key tiles; none after -1
    int parted[PARTED];
    __device__ __forceinline__ u32 k_place(Count) { return shared_address(&k); }
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// Barrier 0 is __syncthreads. TURN_HAS_COME: of a step's dQ; DQ_ADDED, it may pass on.
constexpr int TURN_HAS_COME = 1, DQ_ADDED = 2, TURN_THREADS = WARPGROUP + 32;

// ---- The warp that takes turns, if DETERMINISTIC ----

__device__ __forceinline__ void take_turns(const Arguments& args, SharedPlan& shared) {
    const int lane = threadIdx.x % 32;
    follow_steps(args, shared, [&](int number, int turn, bool others_before) {
        int* turns = turns_of_query_tile(args, number);
        // Those before are of smaller indices, and taken: the wait ends (next_index).
        if (lane == 0 && others_before) while (load_acquire(turns) != turn) {}
        __syncwarp();
        barrier_arrive(TURN_HAS_COME, TURN_THREADS);
        barrier_sync(DQ_ADDED, TURN_THREADS);
        if (lane == 0) {
            __threadfence();                                // of all that the barrier has ordered
            store_release(turns, turn + 1);
        }
        __syncwarp();
    });
}

// ---- The warpgroup of the scores, and of dQ ----

// Adds columns [part * DQ_COLUMNS, (part + 1) * DQ_COLUMNS) of the step's dQ to the sums, of which
// the thread's first stands at `sums`.
__device__ __forceinline__ void add_dq(float* sums, const float (&dq)[DQ_COUNT], int part) {
    #pragma unroll
    for (int n = 0; n < DQ_COUNT / 4; ++n)
        reduce_add_4(sums + dq_sum_step(0, part * (DQ_COUNT / 4) + n),
                     {dq[n * 4], dq[n * 4 + 1], dq[n * 4 + 2], dq[n * 4 + 3]});
}

__device__ __forceinline__ void compute_scores(const Arguments& arguments, SharedPlan& shared) {
    auto&& shape = tile_shape(arguments);
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, warp_row = thread / 32 * 16;
    const int first_column = lane % 4 * 2;                  // of a score fragment
    const float c = LINEAR ? static_cast<float>(arguments.arrays.scale) * LOG2_E : LOG2_E;
    Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(arguments)};
    Dropout<float> dropout(arguments);

    constexpr int K_PANEL_BYTES = BLOCK_K * PANEL_ROW_BYTES;
    const u64 k_rows = descriptor(shared_address(&shared.k), 0);
    const u64 v_rows = descriptor(shared_address(&shared.v), 0);
    const u64 k_columns = descriptor(shared_address(&shared.k), K_PANEL_BYTES);

    float s[S_COUNT], dp[S_COUNT];
    PipelineState<STAGES> ring, next;                       // of the step's; of the one to issue
    const auto issue_s = [&] {
        mbarrier_wait(shared_address(&shared.q_full[next.index]), next.phase);
        warpgroup_fence_operand(s);
        wgmma_fence();
        gemm_abt_ss<Element, 1, BLOCK_K, BLOCK_Q, HEAD_DIM>(
            s, k_rows, descriptor(shared_address(&shared.q[next.index]), 0));
        wgmma_commit();
    };
    const auto issue_dp = [&] {
        mbarrier_wait(shared_address(&shared.dout_full[next.index]), next.phase);
        warpgroup_fence_operand(dp);
        wgmma_fence();
        gemm_abt_ss<Element, 1, BLOCK_K, BLOCK_Q, HEAD_DIM_V>(
            dp, v_rows, descriptor(shared_address(&shared.dout[next.index]), 0));
        wgmma_commit();
        next.next();
    };

    for (Count count;; ++count.tiles) {
        mbarrier_wait(shared_address(&shared.work_full[count.place()]), count.work_phase());
        const Work where = shared.work[count.place()];
        if (where.tile < 0) break;
        __syncwarp();
        mbarrier_arrive_if(lane == 0, shared_address(&shared.work_empty[count.place()]));
        const auto sequence = sequence_of(where);
        set_lengths(shape, sequence);
        set_lengths(mask, sequence);
        const QueryTiles tiles = query_tiles(arguments, where.tile, sequence);
        const int first_full = tiles.first_full * BLOCK_Q;  // query, of which all see all keys
        const int end_full = WINDOW ? tiles.end_full * BLOCK_Q : shape.seqlen_q;
        const int first_key = where.tile * BLOCK_K + warp_row + lane / 4;
        const int first_query[2] = {
            mask.open_first_query(first_key), mask.open_first_query(first_key + 8)};
        const PairMask pairs(arguments, where.batch);
        dropout.set_sequence(number_of(sequence));
        QuerySteps steps(arguments, tiles, where);

        mbarrier_wait(shared_address(&shared.k_full), count.kv_phase());
        issue_s();
        mbarrier_wait(shared_address(&shared.v_full), count.kv_phase());
        issue_dp();
        LanePairs of = {where.batch, 0, 0, first_key, 0};
        // Of the step whose S is on its way, and with it its rows.
        const auto look = [&](int stage) {
            const QueryRows& rows = shared.rows[stage];
            of.head = rows.head;
            of.query = rows.q_start + first_column;         // the lane's first
            of.past = of.query + shape.seqlen_k - shape.seqlen_q - first_key;
            const bool masked =
                rows.q_start < first_full || rows.q_start + BLOCK_Q > end_full;
            look_at_pairs(of, arguments, pairs, dropout, mask, rows, masked,
                          SEGMENTS && shared.parted[stage]);
            if (BIASES_BESIDE_DQ) load_biases(of, arguments);
        };
        look(ring.index);
        if (!BIASES_BESIDE_DQ) load_biases(of, arguments);
        wgmma_wait<1>();
        warpgroup_fence_operand(s);

        const auto step = [&](auto last) {
            const QueryRows& rows = shared.rows[ring.index];
            const int q_start = rows.q_start;
            const bool masked = q_start < first_full || q_start + BLOCK_Q > end_full;
            const bool parted = SEGMENTS && shared.parted[ring.index];
            const auto hide = [&](float (&x)[S_COUNT]) {
                if (!SEEN_AS_BITS && masked)
                    apply_mask(x, mask, first_query, q_start + first_column);
                if (HAS_MASK || masked || parted) hide_unseen(x, of);
            };
            const u32 ds_tile = shared_address(&shared.ds[ring.index]);
            float derivatives[S_COUNT];
            u32 p[S_COUNT / 2], ds[S_COUNT / 2];

            compute_p(s, derivatives, p, rows, first_column, c, arguments, of, dropout, hide,
                      masked || parted);
            store_rows<BLOCK_K>(shared_address(&shared.p[ring.index]), warp_row, lane, p);
            fence_async_proxy();
            __syncwarp();
            mbarrier_arrive_if(lane == 0, shared_address(&shared.p_full[ring.index]));

            wgmma_wait<0>();                                // dP
            warpgroup_fence_operand(dp);
            mbarrier_arrive_if(lane == 0, shared_address(&shared.dout_empty[ring.index]));
            score_gradients(dp, s, p, rows, first_column, of, dropout);
            if (MASKS_DS) hide(dp);
            add_dbias(dp, derivatives, arguments, of);
            pack_pairs<Element>(ds, dp);
            store_rows<BLOCK_K>(ds_tile, warp_row, lane, ds);
            fence_async_proxy();
            __syncwarp();
            mbarrier_arrive_if(lane == 0, shared_address(&shared.ds_full[ring.index]));
            mbarrier_wait(shared_address(&shared.ds_full[ring.index]), ring.phase);

            float* sums = dq_sum_tile(arguments.arrays.dq_sum,
                                      number_of(arguments, sequence_of(where), where.batch,
                                                steps.head, steps.tile))
                        + dq_sum_first(thread);
            #pragma unroll
            for (int part = 0; part < DQ_PARTS; ++part) {
                constexpr int PART_BYTES = DQ_COLUMNS / PANEL_COLUMNS * K_PANEL_BYTES;
                const bool first = part == 0, final = part == DQ_PARTS - 1;
                float dq[DQ_COUNT];
                warpgroup_fence_operand(dq);
                wgmma_fence();
                gemm_atb_ss<Element, BLOCK_K>(
                    dq, descriptor(ds_tile, 0), advance(k_columns, part * PART_BYTES));
                wgmma_commit();
                if (!last.value && first) issue_s();
                if (!last.value && final) {
                    issue_dp();
                    look((ring.index + 1) % STAGES);
                }
                if (last.value) wgmma_wait<0>();
                else if (first && final) wgmma_wait<2>();
                else wgmma_wait<1>();
                warpgroup_fence_operand(dq);
                if (DETERMINISTIC && first) barrier_sync(TURN_HAS_COME, TURN_THREADS);
                add_dq(sums, dq, part);
            }
            if (DETERMINISTIC) barrier_arrive(DQ_ADDED, TURN_THREADS);
            if (!last.value && !BIASES_BESIDE_DQ) load_biases(of, arguments);
            if (!last.value) wgmma_wait<1>();               // the next S
            warpgroup_fence_operand(s);
            steps.next(arguments, where);
            ring.next();
        };

        while (steps.left > 1) step(Bool<false>{});
        step(Bool<true>{});
        mbarrier_arrive_if(lane == 0, shared_address(&shared.kv_empty));
    }
}

// ---- The warpgroups of dV and dK ----

// Where a warpgroup's gradient comes from and goes to: sum += A B over the queries of each step.
struct Gradient {
    const void* a; int a_bytes;                             // the first place of P or dS
    const void* b; int b_bytes;                             // of dO or Q
    const u64* a_full; const u64* b_full; const u64* b_empty;
    void* target; Strides stride;
    int num_columns;
    float scale;
};

template <int COLUMNS>
__device__ __forceinline__ void compute_gradient(const Arguments& args, SharedPlan& shared,
                                                 const Gradient& of) {
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32;
    const u64 a = descriptor(shared_address(of.a), 0);
    const u64 b = descriptor(shared_address(of.b), BLOCK_Q * PANEL_ROW_BYTES);
    // The assembler has no product of 256 columns where 512 threads begin with 128 registers.
    constexpr int PARTS = COLUMNS > 192 ? 2 : 1, PART_COLUMNS = COLUMNS / PARTS;
    constexpr int PART_BYTES = PART_COLUMNS / PANEL_COLUMNS * BLOCK_Q * PANEL_ROW_BYTES;
    float sum[PARTS][PART_COLUMNS / 2];
    PipelineState<STAGES> ring;
    for (Count count;; ++count.tiles) {
        mbarrier_wait(shared_address(&shared.work_full[count.place()]), count.work_phase());
        const Work where = shared.work[count.place()];
        if (where.tile < 0) break;
        __syncwarp();
        mbarrier_arrive_if(lane == 0, shared_address(&shared.work_empty[count.place()]));
        const auto sequence = sequence_of(where);
        const int num_steps = QuerySteps(args, query_tiles(args, where.tile, sequence), where).left;
        for (int i = 0; i < num_steps; ++i, ring.next()) {
            mbarrier_wait(shared_address(of.b_full + ring.index), ring.phase);
            mbarrier_wait(shared_address(of.a_full + ring.index), ring.phase);
            const u64 a_of_step = advance(a, ring.index * of.a_bytes);
            const u64 b_of_step = advance(b, ring.index * of.b_bytes);
            #pragma unroll
            for (int part = 0; part < PARTS; ++part) warpgroup_fence_operand(sum[part]);
            wgmma_fence();
            #pragma unroll
            for (int part = 0; part < PARTS; ++part)
                gemm_ab_ss<Element, BLOCK_Q>(
                    sum[part], a_of_step, advance(b_of_step, part * PART_BYTES), i > 0);
            wgmma_commit();
            wgmma_wait<0>();
            #pragma unroll
            for (int part = 0; part < PARTS; ++part) warpgroup_fence_operand(sum[part]);
            mbarrier_arrive_if(lane == 0, shared_address(of.b_empty + ring.index));
        }
        bool finite = true;
        const int key = where.tile * BLOCK_K + thread / 32 * 16 + lane / 4;
        Element* target = static_cast<Element*>(of.target) + where.batch * of.stride.batch
                        + where.head * of.stride.head + (sequence.first_k + key) * of.stride.token;
        #pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            #pragma unroll
            for (int i = 0; i < PART_COLUMNS / 2; ++i) {
                sum[part][i] *= of.scale;
                finite &= fabsf(sum[part][i]) < infinity();
            }
            store_to_array(target + part * PART_COLUMNS, of.stride.token, sum[part], key,
                           seqlen_k_of(args, sequence), of.num_columns - part * PART_COLUMNS);
        }
        if (MASKED && !finite) *recompute_flag(args, place_of_doubts(where)) = 1;
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
backward_wgmma_wide(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    if (threadIdx.x == 0) {
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
        for (int i = 0; i < WORKS; ++i) {
            mbarrier_init(shared_address(&shared.work_full[i]), 1);
            mbarrier_init(shared_address(&shared.work_empty[i]), 3 * ROLE_WARPS + 1 + TURNS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    const BackwardArguments& arrays = arguments.arrays;
    const int warp = threadIdx.x / 32;
    // By a shuffle, so that the compiler knows it to be the same in all lanes.
    const int role = __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x / WARPGROUP), 0);
    if (role == 0) {
        warpgroup_reg_dealloc<LOADING_REGISTERS>();
        if (threadIdx.x < LOADING_THREADS) load_queries(arguments, shared);
        if (threadIdx.x == WARPGROUP - 32) load_keys(arguments, shared);
        if (DETERMINISTIC && warp == 1) take_turns(arguments, shared);
    } else if (role == 1) {
        warpgroup_reg_alloc<SCORE_REGISTERS>();
        compute_scores(arguments, shared);
    } else if (role == 2) {
        warpgroup_reg_alloc<GRADIENT_REGISTERS>();
        compute_gradient<HEAD_DIM_V>(
            arguments, shared,
            {shared.p, sizeof(shared.p[0]), shared.dout, sizeof(shared.dout[0]), shared.p_full,
             shared.dout_full, shared.dout_empty, arrays.dv, arrays.dv_stride,
             arrays.shape.head_dim_v, 1.0f});
    } else {
        warpgroup_reg_alloc<GRADIENT_REGISTERS>();
        compute_gradient<HEAD_DIM>(
            arguments, shared,
            {shared.ds, sizeof(shared.ds[0]), shared.q, sizeof(shared.q[0]), shared.ds_full,
             shared.q_full, shared.q_empty, arrays.dk, arrays.dk_stride, arrays.shape.head_dim,
             static_cast<float>(arrays.scale)});
    }
}
