// Backward attention for 16-bit types on Hopper (sm_90a) and head dimensions above 256, a gradient
// a pass: 64 rows of a gradient fill the registers of two warpgroups.
//
//     PASS DQ   dQ = scale dS K         64 queries, which visit the key tiles that they see
//     PASS DK   dK = scale dS^T Q       64 keys, which the queries that see them visit
//     PASS DV   dV = P^T dO             the same
//     S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  dS = P (dP - delta)
//
// The passes recompute S and dP: eight matmuls instead of five. In return no block adds to
// another's results, so all gradients are the same in every run, and no sums stand in memory.
//
// A block has 64 rows of Q and dO (DQ) or of K and V, which stay in shared memory; it visits tiles
// of 64 keys or queries. Scores are S^T and dP^T in every pass, as in sm90/backward.cu, whose
// options these are. Roles (wide_heads.cuh):
//     0, producer    a thread each loads the rows; what S and dP read of the visited tiles; the two
//                    halves of what the gradient sums
//     1, scores      S, dP; the weights P or dS, which go to shared memory
//     2, 3, sums     gradient += weights B, of the left and of the right half of its columns
//
// The scores are up to two tiles ahead of the sums. lse and delta come from prepare/row_stats.cu,
// as one QueryRows a query tile.
//
// Grid: a block per tile of queries of a query head (DQ), or of keys of a key head, the longest
// first; tile_of_block(). Block: 4 warpgroups.
//
// Constants: Element, PASS, CAUSAL, WINDOW, HEAD_DIM and HEAD_DIM_V (multiples of 64, 128 to 512),
// BLOCK_Q and BLOCK_K 64; KV_STAGES of chunks of SCORE_CHUNK columns for S and dP, STAGES of
// chunks of each half; SHARED_BYTES, DLSE, Arguments and the options; INTEGER_DQ, DQ_SEMAPHORES 0;
// HEADS_INNERMOST. DBIAS and DMOD in one pass alone.
// Shared memory: SharedPlan, tiles as in smem.cuh.
//
// Bad at: eight matmuls, and what is visited is read from L2 once for S and once for the sums.
// Tiles that segment ids or the user's mask hide are not skipped.
#include "sm90/backward_option_scores.cuh"
#include "sm90/backward_roles.cuh"
#include "sm90/semaphores.cuh"
#include "sm90/wide_heads.cuh"
#include "finish/recompute.cuh"

constexpr int DQ = 0, DK = 1, DV = 2;                       // PASS
constexpr bool OF_QUERIES = PASS == DQ, HAS_DP = PASS != DV;
constexpr int COLUMNS = PASS == DV ? HEAD_DIM_V : HEAD_DIM; // of the gradient
constexpr int LEFT_COLUMNS = left_columns(COLUMNS), RIGHT_COLUMNS = COLUMNS - LEFT_COLUMNS;

constexpr int BLOCK_THREADS = 4 * WARPGROUP, TILE = 64, WEIGHT_STAGES = 2;

// An SM's 64 K registers are 512 for the four threads of the same rank in the warpgroups.
constexpr int PRODUCER_REGISTERS = 32, CONSUMER_REGISTERS = 160;

// Barrier 0 is __syncthreads. The gradient's rows have been stored.
constexpr int STORED_BARRIER = 1;

static_assert(BLOCK_Q == TILE && BLOCK_K == TILE, "a warpgroup's product has 64 rows");
static_assert(HEAD_DIM % PANEL_COLUMNS == 0 && HEAD_DIM >= 128 && HEAD_DIM <= 512, "halves");
static_assert(HEAD_DIM_V % PANEL_COLUMNS == 0 && HEAD_DIM_V >= 128 && HEAD_DIM_V <= 512, "halves");
static_assert(!DETERMINISTIC && !INTEGER_DQ, "no sums in global memory");

using ScoreRing = ChunkRing<TILE, SCORE_CHUNK, KV_STAGES>;
using HalfRing = ChunkRing<TILE, PANEL_COLUMNS, STAGES>;

struct SharedPlan {
    SmemTile<TILE, HEAD_DIM> first;                         // Q or K
    SmemTile<TILE, HAS_DP ? HEAD_DIM_V : 1> second;         // dO or V
    SmemTile<TILE, TILE> weights[WEIGHT_STAGES];
    ScoreRing chunks;
    HalfRing halves[2];                                     // left, right
    QueryRows rows[WEIGHT_STAGES];                          // DQ: the first, of the block's queries
    // rows_full: what the block's rows need. *_empty: an arrival of each warp that reads.
    u64 rows_full, stats_empty[WEIGHT_STAGES];
    u64 weights_full[WEIGHT_STAGES], weights_empty[WEIGHT_STAGES];
    ScoreRing::Barriers chunk_barriers;
    HalfRing::Barriers half_barriers[2];
    int inexact[2][ROLE_WARPS];                             // whether rows are not finite

    __device__ __forceinline__ void init_barriers() {
        mbarrier_init(shared_address(&rows_full), HAS_DP ? 2 : 1);
        for (int i = 0; i < WEIGHT_STAGES; ++i) {
            mbarrier_init(shared_address(&stats_empty[i]), ROLE_WARPS);
            mbarrier_init(shared_address(&weights_full[i]), ROLE_WARPS);
            mbarrier_init(shared_address(&weights_empty[i]), 2 * ROLE_WARPS);
        }
        chunk_barriers.init();
        for (HalfRing::Barriers& half : half_barriers) half.init();
        fence_mbarrier_init();
    }
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// ---- Rows and visited tiles ----

// The block's rows, and the tiles [first, end) that it visits, of each of num_heads heads. Rows and
// tiles are counted within the packed sequence. By a whole warp.
struct Work {
    TileSequence sequence;
    bool exists;                                            // false: a slot without a tile
    Mask<CAUSAL, WINDOW> mask;
    int start, head, batch;
    int first, end, first_full, end_full, first_head, num_heads;

    explicit __device__ __forceinline__ Work(const Arguments& args) {
        const Shape& shape = arrays_of(args).shape;
        const int group_size = shape.num_heads_q / shape.num_heads_kv;
        const int num_tiles =
            OF_QUERIES ? num_query_tiles(args, TILE) : num_key_tiles(args, TILE);
        const TileCoord coord = tile_of_block(
            blockIdx.x, num_tiles, OF_QUERIES ? shape.num_heads_q : shape.num_heads_kv,
            shape.batch, arrays_of(args).schedule);
        // The last queries see the most keys; the first keys are seen by the most queries.
        int tile = OF_QUERIES ? num_tiles - 1 - coord.tile : coord.tile;
        const auto found = sequence_of_block<!OF_QUERIES>(args, tile, TILE, OF_QUERIES);
        sequence = found;
        exists = found.has_tile;
        mask = {seqlen_q_of(args, sequence), seqlen_k_of(args, sequence),
                window_of<WINDOW>(args)};
        start = tile * TILE;
        head = coord.head;
        batch = coord.batch;
        first_head = OF_QUERIES ? head / group_size : head * group_size;
        num_heads = OF_QUERIES ? 1 : group_size;
        if constexpr (OF_QUERIES) {
            const KeyTiles keys = mask.key_tiles(start, TILE, TILE);
            first = keys.first;
            end = keys.num_visited;
            first_full = keys.first_full;
            end_full = keys.num_full;
        } else {
            const QueryTiles queries = mask.query_tiles(start, TILE, TILE);
            first = queries.first;
            end = queries.end;
            first_full = queries.first_full;
            end_full = queries.end_full;
        }
    }
    // The first query and the first key of a visited tile's pairs.
    __device__ __forceinline__ int q_start(int tile) const {
        return OF_QUERIES ? start : tile * TILE;
    }
    __device__ __forceinline__ int k_start(int tile) const {
        return OF_QUERIES ? tile * TILE : start;
    }
    // Tokens of the arrays.
    __device__ __forceinline__ int first_row() const {
        return (OF_QUERIES ? sequence.first_q : sequence.first_k) + start;
    }
    __device__ __forceinline__ int first_token(int tile) const {
        return (OF_QUERIES ? sequence.first_k : sequence.first_q) + tile * TILE;
    }
    __device__ __forceinline__ int num_rows() const {
        return (OF_QUERIES ? mask.seqlen_q : mask.seqlen_k) - start;
    }
    __device__ __forceinline__ int num_visits() const { return max(end - first, 0) * num_heads; }
    __device__ __forceinline__ bool is_full(int tile) const {
        return tile >= first_full && tile < end_full;
    }
    // Calls visit(head, tile) for each visited tile. HEADS_INNERMOST: as backward_scheduler.cuh.
    template <class Visit> __device__ __forceinline__ void for_each(Visit visit) const {
        if constexpr (HEADS_INNERMOST) {
            for (int tile = end - 1; tile >= first; --tile)
                for (int other = first_head; other < first_head + num_heads; ++other)
                    visit(other, tile);
            return;
        }
        for (int other = first_head; other < first_head + num_heads; ++other)
            for (int tile = first; tile < end; ++tile) visit(other, tile);
    }
};

__device__ __forceinline__ const QueryRows* rows_of(
    const Arguments& args, const Work& work, int head, int tile) {
    return static_cast<const QueryRows*>(args.arrays.delta)
         + query_tile_index(args, work.sequence, work.batch, head, tile);
}

// The tile of the block's recompute_flag: packed sequences count all slots.
__device__ __forceinline__ int first_slot_of(NoSequence) { return 0; }
__device__ __forceinline__ int first_slot_of(const Sequence& sequence) {
    return sequence.first_slot;
}

// ---- Producers: one thread each ----

__device__ __forceinline__ void load_rows(
    const Arguments& args, SharedPlan& shared, const Work& work) {
    const u32 full = shared_address(&shared.rows_full);
    if constexpr (OF_QUERIES)
        bulk_load(shared_address(&shared.rows[0]),
                  rows_of(args, work, work.head, work.start / TILE), full,
                  sizeof(QueryRows));
    tma_load_tile<TILE, HEAD_DIM>(
        shared_address(&shared.first), OF_QUERIES ? args.q_map : args.k_map, full,
        work.first_row(), work.head, work.batch, OF_QUERIES ? sizeof(QueryRows) : 0);
    if constexpr (HAS_DP)
        tma_load_tile<TILE, HEAD_DIM_V>(
            shared_address(&shared.second), OF_QUERIES ? args.dout_map : args.v_map, full,
            work.first_row(), work.head, work.batch);
}

__device__ __forceinline__ void load_scores(
    const Arguments& args, SharedPlan& shared, const Work& work) {
    ScoreRing::State stage;
    PipelineState<WEIGHT_STAGES> stats;
    work.for_each([&](int head, int tile) {
        constexpr int STATS_BYTES = OF_QUERIES ? 0 : sizeof(QueryRows);
        load_chunks<HEAD_DIM, SCORE_CHUNK>(
            shared.chunks, shared.chunk_barriers, stage, OF_QUERIES ? args.k_map : args.q_map, 0,
            work.first_token(tile), head, work.batch, STATS_BYTES, [&](u32 full) {
                if constexpr (OF_QUERIES) return;
                mbarrier_wait(barrier_at(shared.stats_empty, stats.index), stats.phase ^ 1);
                bulk_load(shared_address(&shared.rows[stats.index]),
                          rows_of(args, work, head, tile), full, STATS_BYTES);
                stats.next();
            });
        if constexpr (HAS_DP)
            load_chunks<HEAD_DIM_V, SCORE_CHUNK>(
                shared.chunks, shared.chunk_barriers, stage,
                OF_QUERIES ? args.v_map : args.dout_map, 0, work.first_token(tile), head,
                work.batch);
    });
}

template <int HALF_COLUMNS>
__device__ __forceinline__ void load_half(
    const Arguments& args, SharedPlan& shared, const Work& work, int half) {
    HalfRing::State stage;
    const TensorMap& map = PASS == DQ ? args.k_map : PASS == DK ? args.q_map : args.dout_map;
    work.for_each([&](int head, int tile) {
        load_chunks<HALF_COLUMNS, PANEL_COLUMNS>(
            shared.halves[half], shared.half_barriers[half], stage, map, half * LEFT_COLUMNS,
            work.first_token(tile), head, work.batch);
    });
}

// ---- The score warpgroup ----

// The iterations of the score warpgroup. S^T and dP^T: 64 keys by 64 queries, in every pass.
__device__ __forceinline__ void compute_weights(
    const Arguments& args, SharedPlan& shared, const Work& work) {
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, warp_row = thread / 32 * 16;
    const int first_column = lane % 4 * 2;                  // the lane's first query in a tile
    const float scale = static_cast<float>(args.arrays.scale);
    const float scale_log2 = LINEAR ? scale * LOG2_E : LOG2_E;
    const PairMask pair_mask(args, work.batch);
    Dropout<float> dropout(args);
    dropout.set_sequence(number_of(work.sequence));
    float s[S_REGS], dp[S_REGS];
    ScoreRing::State chunk;
    PipelineState<WEIGHT_STAGES> stats, stage;
    mbarrier_wait(shared_address(&shared.rows_full), 0);

    work.for_each([&](int head, int tile) {
        const int q_start = work.q_start(tile);
        const int first_key = work.k_start(tile) + warp_row + lane / 4;
        gemm_by_chunks<Element, 1, HEAD_DIM, SCORE_CHUNK, OF_QUERIES>(
            s, shared_address(&shared.first), shared.chunks, shared.chunk_barriers, chunk, lane);
        const QueryRows& rows = shared.rows[OF_QUERIES ? 0 : stats.index];
        const bool is_cut = !work.is_full(tile), has_boundary = SKIPS_TILES;
        const MaskBounds bounds(work.mask, {}, first_key);
        LanePairs pairs = {PACKED ? number_of(work.sequence) : work.batch,
                           OF_QUERIES ? work.head : head, q_start + first_column, first_key,
                           q_start + first_column + work.mask.seqlen_k - work.mask.seqlen_q
                               - first_key,
                           work.mask.seqlen_q, work.mask.seqlen_k};
        compute_bits(pairs, args, dropout, pair_mask, work.mask, rows, is_cut, has_boundary);
        load_biases(pairs, args);
        if constexpr (HAS_DP)
            gemm_by_chunks<Element, 1, HEAD_DIM_V, SCORE_CHUNK, OF_QUERIES>(
                dp, shared_address(&shared.second), shared.chunks, shared.chunk_barriers, chunk,
                lane);

        const ZeroMasked<false> zero_masked{
            work.mask, bounds, pairs, q_start, first_column, is_cut, has_boundary};
        const LaneRows<> lane_rows(rows, first_column);
        float derivatives[S_REGS];
        u32 weights[S_REGS / 2];
        compute_p(s, derivatives, weights, lane_rows, scale_log2, args, pairs, dropout,
                  zero_masked, is_cut || has_boundary);
        if constexpr (HAS_DP) {
            u32 ds[S_REGS / 2];
            compute_ds(ds, dp, derivatives, s, weights, lane_rows, args, pairs, dropout,
                       zero_masked);
            #pragma unroll
            for (int i = 0; i < S_REGS / 2; ++i) weights[i] = ds[i];
        }
        if constexpr (!OF_QUERIES) {
            __syncwarp();                                   // all lanes have read the statistics
            mbarrier_arrive_if(lane == 0, barrier_at(shared.stats_empty, stats.index));
            stats.next();
        }
        mbarrier_wait(barrier_at(shared.weights_empty, stage.index), stage.phase ^ 1);
        publish(shared_address(&shared.weights[stage.index]),
                barrier_at(shared.weights_full, stage.index), weights, warp_row, lane);
        stage.next();
    });
}

// ---- The warpgroups of sums ----

// Recomputes rows of the block that a masked NaN or infinity may have reached, `count` from `first`
// on, by a warp.
__device__ __forceinline__ void recompute(
    const Arguments& whole, const Work& work, int first, int count) {
    const Arguments& args = sequence_arguments(whole, work.sequence, TILE);
    const int end = min(first + count, work.num_rows());
    for (int row = first; row < end; ++row)
        if constexpr (OF_QUERIES) recompute_query(args, work.batch, work.head, work.start + row);
        else recompute_key(args, work.batch, work.head, work.start + row);
}

// The iterations of a warpgroup of sums. half: 0 or 1, the left or the right one. Returns whether
// all of the lane's sums are finite.
template <int HALF_COLUMNS>
__device__ __forceinline__ bool compute_half(
    const Arguments& args, SharedPlan& shared, const Work& work, int half) {
    using Half = ColumnHalf<HALF_COLUMNS, HalfRing>;
    typename Half::Sums sums;
    Half gradient(sums, shared.halves[half], shared.half_barriers[half], half * LEFT_COLUMNS);
    const int lane = gradient.lane;
    const u64 weights = descriptor(shared_address(&shared.weights), 0);
    PipelineState<WEIGHT_STAGES> stage;
    const int count = work.num_visits();
    for (int i = 0; i < count; ++i, stage.next()) {
        pipeline_wait(shared_address(&shared.weights_full), stage);
        gradient.template add_product<OF_QUERIES>(
            advance(weights, stage.index * static_cast<int>(sizeof(shared.weights[0]))), i > 0,
            Element{});
        mbarrier_arrive_if(lane == 0, barrier_at(shared.weights_empty, stage.index));
    }
    if (count == 0) gradient.clear();

    const BackwardArguments& arrays = args.arrays;
    const Shape& shape = arrays.shape;
    const float scale = PASS == DV ? 1.0f : static_cast<float>(arrays.scale);
    gradient.multiply({scale, scale});
    const bool finite = gradient.is_finite();
    void* array = PASS == DQ ? arrays.dq : PASS == DK ? arrays.dk : arrays.dv;
    const Strides stride =
        PASS == DQ ? arrays.dq_stride : PASS == DK ? arrays.dk_stride : arrays.dv_stride;
    gradient.store(
        static_cast<Element*>(array) + work.batch * stride.batch + work.head * stride.head
            + work.first_row() * stride.token,
        stride.token, work.num_rows(), PASS == DV ? shape.head_dim_v : shape.head_dim,
        PASS != DQ || rows_aligned(array, stride));
    return finite;
}

// Recomputes the tile's rows that are not finite. DV leaves a flag to DK, which recomputes rows of
// both. Two warps have the same 16 rows, and recompute half of them each. One function for both
// halves, so that all wait at one instruction.
__device__ __forceinline__ void recompute_inexact(
    const Arguments& args, SharedPlan& shared, const Work& work, int half, bool finite) {
    if constexpr (!MASKED) return;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % ROLE_WARPS;
    int* flag = nullptr;
    if constexpr (!OF_QUERIES)
        flag = recompute_flag(args, {first_slot_of(work.sequence) + work.start / TILE,
                                     work.head, work.batch});
    if constexpr (PASS == DV) {
        if (!finite) *flag = 1;
    } else {
        const bool found = __ballot_sync(WHOLE_WARP, !finite) != 0 || (!OF_QUERIES && *flag != 0);
        if (lane == 0) shared.inexact[half][warp] = found;
        barrier_sync(STORED_BARRIER, 2 * WARPGROUP);
        if (shared.inexact[0][warp] || shared.inexact[1][warp])
            recompute(args, work, warp * 16 + half * 8, 8);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
backward_sm90_passes(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(1024) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    if (threadIdx.x == 0) shared.init_barriers();
    __syncthreads();

    const Work work(args);
    if (!work.exists) return;
    // By a shuffle, so that the compiler knows that it is uniform in the warp.
    const int role = __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x / WARPGROUP), 0);
    if (role == 0) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        if (threadIdx.x == 0) load_rows(args, shared, work);
        if (threadIdx.x == 32) load_scores(args, shared, work);
        if (threadIdx.x == 64) load_half<LEFT_COLUMNS>(args, shared, work, 0);
        if (threadIdx.x == 96) load_half<RIGHT_COLUMNS>(args, shared, work, 1);
    } else {
        warpgroup_reg_alloc<CONSUMER_REGISTERS>();
        if (role == 1) {
            compute_weights(args, shared, work);
            return;
        }
        const bool finite = role == 2 ? compute_half<LEFT_COLUMNS>(args, shared, work, 0)
                                      : compute_half<RIGHT_COLUMNS>(args, shared, work, 1);
        recompute_inexact(args, shared, work, role - 2, finite);
    }
}
