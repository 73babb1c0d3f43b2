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
//     wide_heads.cuh               the rings and matmuls of chunks of columns
//     forward_wide_shared.cuh      SharedPlan
//     forward_wide_scores.cuh      the score warpgroup
//
// Cost of a key tile of 64 at head_dim 512, at peak rates:
//     tensor cores     two matmuls of 1,024 cycles: 2,048
//     shared memory    S: 128 KB; P V: 96 KB; K and V arriving: 128 KB; in total 2,820 cycles
//     L2               128 KB for 8.4 MFLOP: 600 TFLOP/s read 9.4 TB/s
//     registers        acc: 128 of 160 per thread
//
// Bad at: only 64 queries share a load of K and V. Key tiles that segment ids or the user's mask
// hide are not skipped.
//
// Grid: as sm90/forward.cu's. Block: 4 warpgroups.
//
// Constants: as sm90/forward.cu's, but HEAD_DIM and HEAD_DIM_V multiples of 64, BLOCK_Q 64,
// Q_STAGES 1; KV_STAGES of K's chunks, STAGES of the chunks of each half of V.
// Shared memory: SharedPlan, tiles as in smem.cuh.
#include "common/long_sums.cuh"
#include "sm90/forward_query_producer.cuh"
#include "sm90/forward_recompute.cuh"
#include "sm90/forward_wide_scores.cuh"

constexpr int BLOCK_THREADS = 4 * WARPGROUP;

// An SM's 64 K registers are 512 for the four threads of the same rank in the warpgroups.
constexpr int PRODUCER_REGISTERS = 32, VALUE_REGISTERS = RUN_TILES > 0 ? 168 : 160;
constexpr int SCORE_REGISTERS = 512 - PRODUCER_REGISTERS - 2 * VALUE_REGISTERS;

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
    KeyRing::State stage;
    for_each_key_tile<DYNAMIC_SCHEDULER>(args, shared, [&](int k_start, int kv_head, int batch) {
        load_chunks<HEAD_DIM, sum_chunk(HEAD_DIM)>(
            shared.k, shared.k_barriers, stage, args.k_map, 0, k_start, kv_head, batch);
    });
}

template <int COLUMNS>
__device__ __forceinline__ void load_values(
    const Arguments& args, SharedPlan& shared, ValueRing<COLUMNS>& ring,
    RingBarriers<STAGES>& barriers, int first_column) {
    PipelineState<STAGES> stage;
    for_each_key_tile<false>(args, shared, [&](int k_start, int kv_head, int batch) {
        load_chunks<COLUMNS, value_chunk(COLUMNS)>(
            ring, barriers, stage, args.v_map, first_column, k_start, kv_head, batch);
    });
}

__device__ __forceinline__ void produce(const Arguments& args, SharedPlan& shared) {
    if (threadIdx.x < (DYNAMIC_SCHEDULER ? 32 : 1)) load_queries(args, shared);
    if (threadIdx.x == 32) load_keys(args, shared);
    if (threadIdx.x == 64)
        load_values<LEFT_COLUMNS>(args, shared, shared.v_left, shared.v_barriers[0], 0);
    if (threadIdx.x == 96)
        load_values<RIGHT_COLUMNS>(
            args, shared, shared.v_right, shared.v_barriers[1], LEFT_COLUMNS);
}

// ---- The value warpgroups ----

// What a warp stored of a work tile's rows, at the end: whether none needs recompute_row, and
// where the block's last work tile is.
struct Stored {
    bool exact;
    int last_slot;
};

// half: 0 or 1, the left or the right one.
template <int COLUMNS>
__device__ __forceinline__ Stored compute_values(
    const Arguments& args, SharedPlan& shared, ValueRing<COLUMNS>& ring, int half) {
    using Half = ColumnHalf<COLUMNS, ValueRing<COLUMNS>>;
    typename Half::Sums sums;
    Half acc(sums, ring, shared.v_barriers[half], half * LEFT_COLUMNS);
    const int lane = acc.lane, warp = acc.warp;
    const u64 p_desc = descriptor(shared_address(&shared.p), 0);
    PipelineState<P_STAGES> p;
    PipelineState<1> q;
    bool exact = true;                                      // no row so far needs recompute_row
    LongSums<COLUMNS / 2, 2> long_sums;
    float state[decltype(long_sums)::SIZE];
    long_sums.hold_in(state);
    const auto element = [&](int i) -> float& {
        constexpr int OF_CHUNK = Half::CHUNK / 2;
        return sums[i / OF_CHUNK][i % OF_CHUNK];
    };
    for (;; q.next()) {
        pipeline_wait(shared_address(shared.q_full), q);
        const WorkTile work = shared.work_tiles[work_slot(q)];
        if (work.num_rows == 0) break;
        __syncwarp();                                       // all lanes have read `work`
        mbarrier_arrive_if(lane == 0, shared_address(shared.q_empty));
        const int num_tiles =
            work.num_visited - first_key_tile(mask_of(args, work), work.q_start);
        float inverse[2] = {0.0f, 0.0f}, max_scaled[2] = {0.0f, 0.0f};
        for (int i = 0; i < num_tiles; ++i, p.next()) {
            const bool begins = i == 0 || (RUN_TILES > 0 && i % max(RUN_TILES, 1) == 0);
            if (RUN_TILES > 0 && begins && i > 0) long_sums.add(element, max_scaled);
            pipeline_wait(shared_address(&shared.p_full), p);
            const RowFactors& factors = shared.factors[p.index];
            float rescale[2];
            #pragma unroll
            for (int row = 0; row < 2; ++row) {
                rescale[row] = factors.rescale[acc.lane_row + row * 8];
                if (i == num_tiles - 1) inverse[row] = factors.inverse[acc.lane_row + row * 8];
                max_scaled[row] = factors.max_scaled_of(acc.lane_row + row * 8);
            }
            const bool rescales = rescale[0] != 1.0f || rescale[1] != 1.0f;
            if (__ballot_sync(WHOLE_WARP, rescales) != 0 && !begins) acc.multiply(rescale);
            acc.add_product(advance(p_desc, p.index * static_cast<int>(sizeof(shared.p[0]))),
                            !begins, Element{});
            mbarrier_arrive_if(lane == 0, barrier_at(shared.p_empty, p.index));
        }

        // Marks rows that need recompute_row by a NaN in the half's first column; a lane's two rows
        // together.
        long_sums.finish(element, max_scaled);
        acc.multiply(inverse);
        const u32 inexact = __ballot_sync(WHOLE_WARP, !acc.is_finite());
        if ((inexact >> lane / 4 * 4 & 0xF) != 0) sums[0][0] = sums[0][2] = quiet_nan();
        exact &= inexact == 0;
        acc.store(out_of(args.arrays, work), args.arrays.out_stride.token, work.num_rows,
                  args.arrays.shape.head_dim_v);
    }

    return {exact, work_slot(q)};
}

// Two warps, one of each half, have the same 16 rows, and recompute 8 of them each. One function
// for both halves, so that all wait at one instruction.
__device__ __forceinline__ void recompute_inexact(
    const Arguments& args, SharedPlan& shared, int half, const Stored& stored) {
    const int warp = threadIdx.x % WARPGROUP / 32;
    if (threadIdx.x % 32 == 0) shared.inexact[half][warp] = !stored.exact;
    barrier_sync(STORED_BARRIER, 2 * WARPGROUP);
    if (shared.inexact[0][warp] || shared.inexact[1][warp])
        recompute_rows<LEFT_COLUMNS>(
            args, warp * 16 + half * 8, exponent_scale<LINEAR>(args.arrays.scale),
            shared.work_tiles[stored.last_slot].q_start, 8);
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
    } else if (role == 1) {
        warpgroup_reg_alloc<SCORE_REGISTERS>();
        compute_scores(args, shared);
    } else {
        warpgroup_reg_alloc<VALUE_REGISTERS>();
        const Stored stored =
            role == 2 ? compute_values<LEFT_COLUMNS>(args, shared, shared.v_left, 0)
                      : compute_values<RIGHT_COLUMNS>(args, shared, shared.v_right, 1);
        recompute_inexact(args, shared, role - 2, stored);
    }
}
