// Backward attention for 16-bit types on Hopper (sm_90a): dK, dV, and the sums of dQ.
//
//     S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = P (dP - delta)
//     dV = P^T dO,  dK = scale dS^T Q,  dQ = scale dS K
//
// FlashAttention-3 (arXiv:2407.08608). A block stays on its multiprocessor and takes one tile of
// BLOCK_K keys of one key head after another. Warpgroup 0 loads, and adds to dQ. Each of the others
// has 64 keys of the tile, computes S^T and dP^T, of which P^T and dS^T are the A operands of dV
// and dK as they stand in registers, and keeps dK and dV. A step is a query tile that sees the
// keys, of each query head of the group in turn. All warpgroups then share dQ = dS K of the step,
// dS^T coming from shared memory, and each has its part of dQ added in float to a sum in global
// memory, which finish/dq.cu scales and rounds.
//
// The products of a step are issued so that the tensor cores have work while the warps compute:
//
//     tensor cores   S  dP    dV     dQ dK   S' dP' ...
//     warps             P     dS        dQ out   P'
//
// With 128 queries a step, exponentials take as long as two products. dQ then LAGS a step behind
// and follows dV, so that they have company, and a warpgroup may be half a step ahead of the other:
//
//     tensor cores   S  dP    dV dQ-  dK     S' dP' ...
//     warps             P     dS      dQ- out   P'
//
// Grid: as many blocks as multiprocessors, or as key tiles if those are fewer. Tiles are numbered
// by scheduler.cuh, the first keys first: if CAUSAL, most queries see those. A block takes the tile
// of its own number, then whichever is next when it is done (a counter in global memory).
// DETERMINISTIC: all come from the counter, and key tiles add to dQ in the order of their indices.
// If CAUSAL the last keys come first then: their first queries are those that the others come to
// later.
// Block: 1 + MATH_WARPGROUPS warpgroups.
//
// Constants: Element, CAUSAL, HEAD_DIM and HEAD_DIM_V (64 or 128, the former at least the latter),
// BLOCK_Q, BLOCK_K, STAGES (places for Q and dO), NUM_WARPS and SCORE_WARPS_Q (dq_accum.cuh),
// SHARED_BYTES; TURNS: 0, or MATH_WARPGROUPS to have the blocks of one head add to a query tile's
// dQ in the order of their key tiles; Arguments and the options (backward_steps.cuh).
// Shared memory: SharedPlan, tiles as in smem.cuh.
//
// Barriers: *_full, the TMA unit to the math warpgroups: an arrival of a loading thread, and a
// tile's bytes. *_empty, back: an arrival of every math warp. work_full, from the thread that loads
// Q to all others; work_empty, back: an arrival of each warp. ds_full, ds_empty: among the math
// warps, an arrival of each. Named ones: below.
//
// A NaN or an infinity may reach rows that do not see it, as 0 * NaN, where the mask cuts a tile.
// Key tiles with such rows of dK or dV are noted, for finish/dq.cu to compute these once more.
#include "sm90/backward_steps.cuh"
#include "common/dq_accum.cuh"

constexpr int MATH_WARPGROUPS = BLOCK_K / 64, MATH_THREADS = MATH_WARPGROUPS * WARPGROUP;
constexpr int ALL_THREADS = WARPGROUP + MATH_THREADS;
constexpr int DK_COUNT = HEAD_DIM / 2, DV_COUNT = HEAD_DIM_V / 2;
constexpr int DQ_COUNT = QueryGrid::N_TILES * 4;
constexpr int DQ_PART_BYTES = BLOCK_Q * HEAD_DIM * 4 / MATH_WARPGROUPS;
constexpr bool LAGS = BLOCK_Q > 64;                         // dQ is that of the step before
// Where a tile has few steps, what stands between tiles counts. K has two places, and V is given
// back after the last product with it, so the next tile's keys are there when it begins. A tile's
// end does not wait for gradients to leave: dK does through K's place, dV through that of dQ.
constexpr bool KEYS_AHEAD = WINDOW || SEGMENTS;

static_assert(TURNS == 0 || TURNS == MATH_WARPGROUPS, "each warpgroup adds a part of dQ");
static_assert(MATH_THREADS == THREADS, "the plan's warps are those that compute");
static_assert(MATH_WARPGROUPS == 2, "registers are dealt out for two");
static_assert(QueryGrid::M_TILES == 1 && QueryGrid::WARP_COLUMNS == 64,
              "a warpgroup's part of dQ is 64 queries and 64 columns");
static_assert(HEAD_DIM_V <= HEAD_DIM && DQ_PART_BYTES >= 64 * HEAD_DIM * 2,
              "64 rows of dK or dV leave through the place of a part of dQ");

// A key tile's K and V, and what K's second place takes, whose parities are those of work. k_empty:
// as others'. k_read: among the math warps, an arrival of each; nobody reads the tile's K any more.
template <bool> struct KeyPlaces {
    static constexpr int K_PLACES = 1;
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
    __device__ __forceinline__ u32 k_place(Count) { return shared_address(&k); }
};
template <> struct KeyPlaces<true> {
    static constexpr int K_PLACES = 2;
    SmemTile<BLOCK_K, HEAD_DIM> k;
    SmemTile<BLOCK_K, HEAD_DIM_V> v;
    SmemTile<BLOCK_K, HEAD_DIM> second_k;
    __device__ __forceinline__ u32 k_place(Count count) {
        return shared_address(&k) + count.place() * static_cast<u32>(sizeof k + sizeof v);
    }
};
template <bool> struct KeyBarriers {
    __device__ __forceinline__ void init() {}
    __device__ __forceinline__ void give_place(bool, Count) {}
    __device__ __forceinline__ void say_read(bool) {}
    __device__ __forceinline__ void await_readers(Count) {}
};
template <> struct KeyBarriers<true> {
    u64 k_empty[2], k_read;
    __device__ __forceinline__ void init() {
        for (u64& barrier : k_empty) mbarrier_init(shared_address(&barrier), MATH_THREADS / 32);
        mbarrier_init(shared_address(&k_read), MATH_THREADS / 32);
    }
    __device__ __forceinline__ void await_place(Count count) {
        mbarrier_wait(shared_address(&k_empty[count.place()]), count.work_phase() ^ 1);
    }
    // That of the tile before.
    __device__ __forceinline__ void give_place(bool gives, Count count) {
        mbarrier_arrive_if(
            gives && count.tiles > 0, shared_address(&k_empty[count.place() ^ 1]));
    }
    __device__ __forceinline__ void say_read(bool says) {
        mbarrier_arrive_if(says, shared_address(&k_read));
    }
    __device__ __forceinline__ void await_readers(Count count) {
        mbarrier_wait(shared_address(&k_read), count.kv_phase());
    }
};

struct Places : KeyPlaces<KEYS_AHEAD> {
    SmemTile<BLOCK_Q, HEAD_DIM> q[STAGES];
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout[STAGES];
    SmemTile<BLOCK_K, BLOCK_Q> ds[2];                       // dS^T
    alignas(1024) unsigned char dq_then_out[MATH_WARPGROUPS][DQ_PART_BYTES];
    QueryRows rows[STAGES];
    u64 q_full[STAGES], q_empty[STAGES], dout_full[STAGES], dout_empty[STAGES];
    u64 ds_full[2], ds_empty[2];
    u64 k_full[K_PLACES], v_full, kv_empty;
    u64 work_full[WORKS], work_empty[WORKS];
    Work work[WORKS];                                       // key tiles; none after -1
    int parted[PARTED];
};
struct SharedPlan : Places, KeyBarriers<KEYS_AHEAD> {};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// Barrier 0 is __syncthreads. Of warpgroup g: DQ_FULL + g, its part of dQ is written; DQ_EMPTY + g,
// it has been read; OWN + g, its warps meet.
constexpr int DQ_FULL = 2, DQ_EMPTY = 4, OWN = 6, DQ_THREADS = WARPGROUP + 32;

// ---- The warps that add to dQ, one for each math warpgroup ----

__device__ __forceinline__ void add_dq(const Arguments& args, SharedPlan& shared, int group) {
    const BackwardArguments& arguments = args.arrays;
    const int lane = threadIdx.x % 32;
    const u32 part = shared_address(&shared.dq_then_out[group]);
    follow_steps(args, shared, [&](int number, int turn, bool others_before) {
        int* turns = turns_of_query_tile(args, number) + group;
        barrier_sync(DQ_FULL + group, DQ_THREADS);
        if (lane == 0) {
            // Those before are of smaller indices, and taken: the wait ends (next_index).
            if (DETERMINISTIC && others_before) while (load_acquire(turns) != turn) {}
            bulk_reduce_add(dq_sum_tile(arguments.dq_sum, number) + group * (DQ_PART_BYTES / 4),
                            part, DQ_PART_BYTES);
            tma_store_commit();
            if (DETERMINISTIC) {
                tma_store_wait<0>();
                __threadfence();
                store_release(turns, turn + 1);
            } else {
                tma_store_wait_read<0>();
            }
        }
        __syncwarp();
        barrier_arrive(DQ_EMPTY + group, DQ_THREADS);
    });
    tma_store_wait<0>();
}

// ---- The warpgroups that compute ----

// A warp's rows of a gradient that are not 16, from the sequence's key `key` on: behind a packed
// sequence's last row comes the next one's first.
template <int COLUMNS>
__device__ __forceinline__ void store_last_rows(
    const TileOfSequence& where, int key, u32 tile, int warp_row, void* array, Strides stride,
    int num_columns) {
    u16* rows = static_cast<u16*>(array) + where.batch * stride.batch + where.head * stride.head
              + (where.first_k + key) * stride.token;
    store_tile<16, COLUMNS, 32, 64>(
        tile, warp_row, rows, stride.token, where.seqlen_k - key, num_columns, true,
        threadIdx.x % 32);
}
__device__ __forceinline__ bool has_rows_behind(const TileCoord&, int) { return false; }
__device__ __forceinline__ bool has_rows_behind(const TileOfSequence& where, int key) {
    return key + 16 > where.seqlen_k;
}

// Scales, rounds and sends out the warp's 16 rows of dK or dV, which is `array`, through its
// warpgroup's tile of 64; `key` is the first. Whether the lane's numbers are all finite.
template <int COUNT>
__device__ __forceinline__ bool send_out(
    const TensorMap& map, const Work& where, int key, u32 tile, float (&gradient)[COUNT],
    float scale, void* array, const Strides& stride, int num_columns) {
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16;
    bool finite = true;
    #pragma unroll
    for (int i = 0; i < COUNT; ++i) {
        gradient[i] *= scale;
        finite &= fabsf(gradient[i]) < infinity();
    }
    u32 packed[COUNT / 2];
    pack_pairs<Element>(packed, gradient);
    store_rows<64>(tile, warp_row, lane, packed);
    fence_async_proxy();
    __syncwarp();
    const bool by_rows = has_rows_behind(where, key);
    if constexpr (PACKED)
        if (by_rows)
            store_last_rows<COUNT * 2>(where, key, tile, warp_row, array, stride, num_columns);
    if (lane == 0 && !by_rows)
        tma_store_tile<64, COUNT * 2>(
            map, tile, warp_row, sequence_of(where).first_k + key, where.head, where.batch);
    __syncwarp();
    return finite;
}

__device__ __forceinline__ void compute_all(const Arguments& arguments, SharedPlan& shared) {
    auto&& shape = tile_shape(arguments);
    // By a shuffle, so that the compiler knows it to be the same in all lanes.
    const int group = __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x / WARPGROUP), 0) - 1;
    const int math_thread = threadIdx.x - WARPGROUP;
    const float c = LINEAR ? static_cast<float>(arguments.arrays.scale) * LOG2_E : LOG2_E;
    Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, window_of<WINDOW>(arguments)};
    Dropout<float> dropout(arguments);

    // The warpgroup's keys, as rows of K and V; its part of dQ, 64 queries and all columns or 64 of
    // them, as panels of dS^T or K.
    constexpr int PANEL_BYTES = BLOCK_K * PANEL_ROW_BYTES;
    constexpr bool BY_ROWS = BLOCK_Q == MATH_WARPGROUPS * 64;
    const u32 group_rows = group * 64 * PANEL_ROW_BYTES;
    const u32 dq_part = shared_address(&shared.dq_then_out[group]);

    const u32 q_full = shared_address(&shared.q_full), q_empty = shared_address(&shared.q_empty);
    const u32 dout_full = shared_address(&shared.dout_full);
    const u32 dout_empty = shared_address(&shared.dout_empty);
    const u32 ds_full = shared_address(&shared.ds_full);
    const u32 ds_empty = shared_address(&shared.ds_empty);

    float dk[DK_COUNT], dv[DV_COUNT];
    u32 ds[S_COUNT / 2];                                    // read until the next step
    PipelineState<STAGES> ring;
    PipelineState<2> place;                                 // of dS^T
    for (Count count;; ++count.tiles) {
        mbarrier_wait(shared_address(&shared.work_full[count.place()]), count.work_phase());
        const int k_tile = shared.work[count.place()].tile;
        if (k_tile < 0) break;
        const int batch = OPTIONS ? shared.work[count.place()].batch : 0;
        const auto sequence = sequence_of(shared.work[count.place()]);
        set_lengths(shape, sequence);
        set_lengths(mask, sequence);
        const QueryTiles tiles = query_tiles(arguments, k_tile, sequence);
        const int first_full = tiles.first_full * BLOCK_Q;  // query, of which all see all keys
        const int end_full = WINDOW ? tiles.end_full * BLOCK_Q : shape.seqlen_q;
        const int first_key = k_tile * BLOCK_K + math_thread / 32 * 16 + math_thread % 32 / 4;
        const int first_query[2] = {
            mask.open_first_query(first_key), mask.open_first_query(first_key + 8)};
        const PairMask pairs(arguments, batch);
        dropout.set_sequence(number_of(sequence));
        mbarrier_wait(shared_address(&shared.k_full) + (KEYS_AHEAD ? 8 * count.place() : 0),
             KEYS_AHEAD ? count.work_phase() : count.kv_phase());
        mbarrier_wait(shared_address(&shared.v_full), count.kv_phase());
        bool started = false;                               // dk and dv hold something
        bool sent = false;                                  // a part of dQ

        const auto issue_dq = [&](float (&dq)[DQ_COUNT], u32 ds_tile) {
            const u32 own_rows = opaque(group_rows), own_panel = own_rows * (BLOCK_K / 64);
            warpgroup_fence_operand(dq);
            wgmma_fence();
            gemm_atb_ss<Element, BLOCK_K>(
                dq, descriptor(ds_tile + (BY_ROWS ? own_panel : 0), 0),
                descriptor(shared.k_place(count) + (BY_ROWS ? 0 : own_panel), PANEL_BYTES));
            wgmma_commit();
        };
        // Of the step before. At a tile's first step there is none, and the product is one of K and
        // V, side by side, for nothing: round a branch the compiler runs out of registers.
        const auto issue_last_dq = [&](float (&dq)[DQ_COUNT]) {
            const u32 phase = place.index == 0 ? place.phase ^ 1 : place.phase;
            if (started) mbarrier_wait(ds_full + 8 * place.previous(), phase);
            issue_dq(dq, started ? shared_address(&shared.ds[place.previous()])
                                 : shared_address(KEYS_AHEAD && count.place() > 0
                                                  ? static_cast<void*>(&shared.v) : &shared.k));
        };
        const auto send_dq = [&](const float (&dq)[DQ_COUNT]) {
            // The first time the place is the warpgroup's own: dK and dV have left.
            if (KEYS_AHEAD && !sent) {
                tma_store_wait_read<0>();
                shared.give_place(math_thread % 32 == 0, count);
            }
            barrier_sync((sent ? DQ_EMPTY : OWN) + group, sent ? DQ_THREADS : WARPGROUP);
            const u32 dq_of_thread =
                shared_address(&shared.dq_then_out) + dq_sum_first(opaque(math_thread)) * 4;
            #pragma unroll
            for (int n = 0; n < DQ_COUNT / 4; ++n)
                store_shared_16(dq_of_thread + dq_sum_step(0, n) * 4, dq[n * 4], dq[n * 4 + 1],
                                dq[n * 4 + 2], dq[n * 4 + 3]);
            fence_async_proxy();
            barrier_arrive(DQ_FULL + group, DQ_THREADS);
            sent = true;
        };

        const auto step = [&](bool last) {
            const QueryRows& rows = shared.rows[ring.index];
            // Opaque: what follows from these, kept across the loop, would fill the registers.
            const u32 own_rows = opaque(group_rows);
            const int thread = opaque(math_thread), lane = thread % 32;
            const int first_column = lane % 4 * 2;          // of a score fragment
            const int key_of_lane = k_tile * BLOCK_K + thread / 32 * 16 + lane / 4;
            const u64 k_rows = descriptor(shared.k_place(count) + own_rows, 0);
            const u64 v_rows = descriptor(shared_address(&shared.v) + own_rows, 0);
            // Columns of B for the scores, rows of B for the gradients.
            const u64 q = descriptor(
                shared_address(&shared.q[ring.index]), BLOCK_Q * PANEL_ROW_BYTES);
            const u64 dout = descriptor(
                shared_address(&shared.dout[ring.index]), BLOCK_Q * PANEL_ROW_BYTES);
            float s[S_COUNT], dp[S_COUNT], dq[DQ_COUNT], derivatives[S_COUNT];
            u32 p[S_COUNT / 2];

            mbarrier_wait(q_full + 8 * ring.index, ring.phase);
            warpgroup_fence_operand(s);
            wgmma_fence();
            gemm_abt_ss<Element, 1, BLOCK_K, BLOCK_Q, HEAD_DIM>(s, k_rows, q);
            wgmma_commit();
            wgmma_wait<1>();                                // dK of the last step
            warpgroup_fence_operand(dk);
            mbarrier_arrive_if(started && lane == 0, q_empty + 8 * ring.previous());
            const int q_start = rows.q_start;
            const bool masked = q_start < first_full || q_start + BLOCK_Q > end_full;
            const bool parted = SEGMENTS && shared.parted[ring.index];
            const int query = q_start + first_column;       // the lane's first
            LanePairs of = {batch, rows.head, query, key_of_lane,
                            query + shape.seqlen_k - shape.seqlen_q - key_of_lane};
            const auto hide = [&](float (&x)[S_COUNT]) {
                if (!SEEN_AS_BITS && masked)
                    apply_mask(x, mask, first_query, q_start + first_column);
                // A window's bits, lane by lane. Segments' may be late: to ask them costs as much.
                if (HAS_MASK || (SEGMENTS ? masked || parted : of.hides_any())) hide_unseen(x, of);
            };
            mbarrier_wait(dout_full + 8 * ring.index, ring.phase);
            warpgroup_fence_operand(dp);
            wgmma_fence();
            gemm_abt_ss<Element, 1, BLOCK_K, BLOCK_Q, HEAD_DIM_V>(dp, v_rows, dout);
            wgmma_commit();
            load_biases(of, arguments);
            look_at_pairs(of, arguments, pairs, dropout, mask, rows, masked, parted);
            wgmma_wait<1>();                                // S
            warpgroup_fence_operand(s);

            compute_p(s, derivatives, p, rows, first_column, c, arguments, of, dropout, hide,
                      masked || parted);
            warpgroup_fence_operand(dv);
            wgmma_fence();
            gemm_ab_rs<Element, BLOCK_Q>(dv, p, dout, started);
            wgmma_commit();
            if (LAGS) issue_last_dq(dq);
            wgmma_wait<LAGS ? 2 : 1>();                     // dP
            warpgroup_fence_operand(dp);
            if (KEYS_AHEAD && !LAGS)
                mbarrier_arrive_if(last && lane == 0, shared_address(&shared.kv_empty));

            score_gradients(dp, s, p, rows, first_column, of, dropout);
            if (MASKS_DS) hide(dp);
            add_dbias(dp, derivatives, arguments, of);
            pack_pairs<Element>(ds, dp);
            if (LAGS) mbarrier_wait(ds_empty + 8 * place.index, place.phase ^ 1);
            const u32 ds_tile = shared_address(&shared.ds[place.index]);
            store_rows<BLOCK_K>(ds_tile, thread / 32 * 16, lane, ds);
            fence_async_proxy();
            __syncwarp();
            mbarrier_arrive_if(lane == 0, ds_full + 8 * place.index);

            if (!LAGS) {
                mbarrier_wait(ds_full + 8 * place.index, place.phase);
                issue_dq(dq, ds_tile);
            }
            warpgroup_fence_operand(dk);
            wgmma_fence();
            gemm_ab_rs<Element, BLOCK_Q>(dk, ds, q, started);
            wgmma_commit();
            wgmma_wait<1>();                                // dV, dQ
            warpgroup_fence_operand(dv);
            warpgroup_fence_operand(dq);
            mbarrier_arrive_if(lane == 0, dout_empty + 8 * ring.index);
            // Not before: a first step's product for nothing reads V, too.
            if (KEYS_AHEAD && LAGS)
                mbarrier_arrive_if(last && lane == 0, shared_address(&shared.kv_empty));
            if (LAGS) mbarrier_arrive_if(started && lane == 0, ds_empty + 8 * place.previous());
            if (!LAGS || started) send_dq(dq);

            started = true;
            place.next();
            ring.next();
        };

        for (int left = QuerySteps(arguments, tiles, {k_tile, 0, batch}).left; left > 0; --left)
            step(left == 1);

        wgmma_wait<0>();
        warpgroup_fence_operand(dk);
        if (LAGS) {
            float dq[DQ_COUNT];
            issue_last_dq(dq);
            wgmma_wait<0>();
            warpgroup_fence_operand(dq);
            mbarrier_arrive_if(threadIdx.x % 32 == 0, ds_empty + 8 * place.previous());
            send_dq(dq);
        }
        count.tiles = opaque(count.tiles);
        const int lane = threadIdx.x % 32;
        const Work where = shared.work[count.place()];
        __syncwarp();
        mbarrier_arrive_if(lane == 0, shared_address(&shared.work_empty[count.place()]));
        mbarrier_arrive_if(lane == 0, q_empty + 8 * ring.previous());
        if (KEYS_AHEAD) shared.say_read(lane == 0);
        else mbarrier_arrive_if(lane == 0, shared_address(&shared.kv_empty));
        barrier_sync(DQ_EMPTY + group, DQ_THREADS);
        // dK after dV, through the same place if there is no other.
        constexpr int DV_BYTES = 64 * HEAD_DIM_V * 2, DK_BYTES = 64 * HEAD_DIM * 2;
        constexpr bool SIDE_BY_SIDE = DV_BYTES + DK_BYTES <= DQ_PART_BYTES;
        const int key = where.tile * BLOCK_K + math_thread / 32 * 16;
        const BackwardArguments& arrays = arguments.arrays;
        bool finite = send_out(arguments.dv_map, where, key, dq_part, dv, 1.0f, arrays.dv,
                               arrays.dv_stride, shape.head_dim_v);
        if (KEYS_AHEAD) shared.await_readers(count);
        else if (!SIDE_BY_SIDE) tma_store_wait_read<0>();
        __syncwarp();
        const u32 dk_place = KEYS_AHEAD ? shared.k_place(count) + group * DK_BYTES
                                        : dq_part + (SIDE_BY_SIDE ? DV_BYTES : 0);
        finite &= send_out(arguments.dk_map, where, key, dk_place, dk,
                           static_cast<float>(arrays.scale), arrays.dk, arrays.dk_stride,
                           shape.head_dim);
        if (MASKED && !finite) *recompute_flag(arguments, place_of_doubts(where)) = 1;
        __syncwarp();
        if (!KEYS_AHEAD) tma_store_wait_read<0>();
    }
    if (KEYS_AHEAD) tma_store_wait_read<0>();
}

extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)
backward_wgmma(const __grid_constant__ Arguments arguments) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    constexpr int MATH_WARPS = MATH_THREADS / 32;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(shared_address(&shared.q_full[i]), 1);
            mbarrier_init(shared_address(&shared.q_empty[i]), MATH_WARPS);
            mbarrier_init(shared_address(&shared.dout_full[i]), 1);
            mbarrier_init(shared_address(&shared.dout_empty[i]), MATH_WARPS);
        }
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(shared_address(&shared.ds_full[i]), MATH_WARPS);
            mbarrier_init(shared_address(&shared.ds_empty[i]), MATH_WARPS);
        }
        for (u64& barrier : shared.k_full) mbarrier_init(shared_address(&barrier), 1);
        mbarrier_init(shared_address(&shared.v_full), 1);
        mbarrier_init(shared_address(&shared.kv_empty), MATH_WARPS);
        for (int i = 0; i < WORKS; ++i) {
            mbarrier_init(shared_address(&shared.work_full[i]), 1);
            mbarrier_init(shared_address(&shared.work_empty[i]), MATH_WARPS + MATH_WARPGROUPS + 1);
        }
        shared.init();
        fence_mbarrier_init();
    }
    __syncthreads();

    // 64 K registers: the math warpgroups get what the loading one does not need. (To find tiles
    // with SEGMENTS takes more, which is spilt: the others could not do with less.)
    const int warp = threadIdx.x / 32;
    if (threadIdx.x < WARPGROUP) {
        warpgroup_reg_dealloc<24>();
        if (threadIdx.x < LOADING_THREADS) load_queries(arguments, shared);
        if (threadIdx.x == WARPGROUP - 32) load_keys(arguments, shared);
        if (warp >= 1 && warp <= MATH_WARPGROUPS) add_dq(arguments, shared, warp - 1);
    } else {
        warpgroup_reg_alloc<240>();
        compute_all(arguments, shared);
    }
}
