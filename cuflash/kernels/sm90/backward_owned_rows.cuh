// OWNED_ROWS: with OWNED_DQ a block prepares the rows' statistics of its heads as well, in place of
// prepare/row_stats.cu. Heads go to blocks in turn, so nothing has to be zeroed before. One warp of
// the producer is up to ROW_STAGES query tiles ahead of the first iterations that need them:
//
//     delta = rowsum(dO * O)
//
// It copies rows of dO and O to shared memory, a piece of a tile at a time, PIECES pieces ahead,
// and writes a tile's QueryRows to global memory, from where each iteration's are copied as they
// are without OWNED_ROWS. Query tiles follow in the order in which key tiles, the last ones first,
// see them: from the last one on if CAUSAL.
#pragma once
#include "sm90/backward_owned_dq.cuh"

constexpr int LANES_OF_ROW = 32 / PIECE_ROWS, TILE_PIECES = BLOCK_Q / PIECE_ROWS;
constexpr int ROW_CHUNKS = HEAD_DIM_V / 8;                  // of 16 bytes

// A piece of a query tile of one of the block's heads.
struct RowPiece {
    int pair = blockIdx.x, rank = 0, piece = 0;             // tiles by rank
    __device__ __forceinline__ RowPiece after(int pieces, int num_tiles) const {
        RowPiece next = *this;
        next.piece += pieces;
        if (next.piece < TILE_PIECES) return next;
        next.piece -= TILE_PIECES;
        if (++next.rank < num_tiles) return next;
        next.rank = 0;
        next.pair += gridDim.x;
        return next;
    }
    __device__ __forceinline__ int tile(int num_tiles) const {
        return CAUSAL ? num_tiles - 1 - rank : rank;
    }
};

// Starts the copies of a piece: rows of dO, then of O. Rows past the end become the last one.
template <class Shared>
__device__ __forceinline__ void load_piece(
    const Arguments& args, Shared& shared, const RowPiece& at, int num_tiles, int slot) {
    const BackwardArguments& arrays = args.arrays;
    const int heads = arrays.shape.num_heads_q;
    const int head = at.pair % heads, batch = at.pair / heads;
    const int first = at.tile(num_tiles) * BLOCK_Q + at.piece * PIECE_ROWS;
    constexpr int ROW_BYTES = HEAD_DIM_V * 2;
    const int lane = threadIdx.x % 32;
    if (lane == 0) mbarrier_arrive_expect(shared.piece_full_at(slot), 2 * PIECE_ROWS * ROW_BYTES);
    __syncwarp();
    for (int i = lane; i < 2 * PIECE_ROWS; i += 32) {
        const bool is_out = i >= PIECE_ROWS;
        const i64 query = min(first + i % PIECE_ROWS, arrays.shape.seqlen_q - 1);
        const Strides& stride = is_out ? arrays.out_stride : arrays.dout_stride;
        const Element* row = static_cast<const Element*>(is_out ? arrays.out : arrays.dout)
                           + batch * stride.batch + query * stride.token + head * stride.head;
        bulk_load(shared.piece_at(slot) + i * ROW_BYTES, row, shared.piece_full_at(slot),
                  ROW_BYTES);
    }
}

// The lane's share of the sum of products of two rows in shared memory.
__device__ __forceinline__ float row_product_of(u32 dout, u32 out, int lane) {
    constexpr int CHUNKS = ROW_CHUNKS / LANES_OF_ROW;
    float sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < CHUNKS; ++i) {
        // In an order without bank conflicts: eight lanes read eight groups of four banks.
        const int chunk = lane % LANES_OF_ROW * CHUNKS + (i + lane / 2) % CHUNKS;
        const uint4 x = load_shared_16(dout + chunk * 16), y = load_shared_16(out + chunk * 16);
        const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
        #pragma unroll
        for (int word = 0; word < 4; ++word) {
            sum = fmaf(to_float(low_half<Element>(xs[word])),
                       to_float(low_half<Element>(ys[word])), sum);
            sum = fmaf(to_float(high_half<Element>(xs[word])),
                       to_float(high_half<Element>(ys[word])), sum);
        }
    }
    #pragma unroll
    for (int distance = 1; distance < LANES_OF_ROW; distance *= 2)
        sum += __shfl_xor_sync(WHOLE_WARP, sum, distance);
    return sum;
}

// All of a tile's statistics but delta, by a warp.
__device__ __forceinline__ void write_lse(
    const Arguments& args, QueryRows& rows, int pair, int tile) {
    const int lane = threadIdx.x % 32, seqlen_q = args.arrays.shape.seqlen_q;
    float lse[BLOCK_Q / 32];
    bool is_large = false;
    #pragma unroll
    for (int i = 0; i < BLOCK_Q / 32; ++i) {
        const int query = tile * BLOCK_Q + i * 32 + lane;
        lse[i] = infinity();
        if (query < seqlen_q)
            lse[i] = effective_lse(static_cast<const float*>(args.arrays.lse)[
                static_cast<i64>(pair) * seqlen_q + query]);
        is_large |= fabsf(lse[i] * LOG2_E) > MAX_FUSED_LSE && lse[i] < infinity();
    }
    const bool has_large_lse = __ballot_sync(WHOLE_WARP, is_large) != 0;
    #pragma unroll
    for (int i = 0; i < BLOCK_Q / 32; ++i)
        rows.lse[i * 32 + lane] = has_large_lse ? lse[i] : lse[i] * LOG2_E;
    if (lane == 0) {
        rows.has_large_lse = has_large_lse;
        rows.scale = static_cast<float>(args.arrays.scale);
        rows.q_start = tile * BLOCK_Q;
        rows.head = pair % args.arrays.shape.num_heads_q;
    }
}

// By a warp.
template <class Shared>
__device__ __forceinline__ void prepare_rows(const Arguments& args, Shared& shared) {
    const Shape& shape = args.arrays.shape;
    const int lane = threadIdx.x % 32, num_tiles = num_query_tiles(args, BLOCK_Q);
    const int num_pairs = shape.num_heads_q * shape.batch;
    RowPiece at;
    u32 num_ready = 0;
    PipelineState<ROW_PIECES> slot;
    for (int i = 0; i < ROW_PIECES; ++i)
        load_piece(args, shared, at.after(i, num_tiles), num_tiles, i);
    for (; at.pair < num_pairs; at = at.after(1, num_tiles)) {
        const int tile = at.tile(num_tiles);
        QueryRows& rows =
            static_cast<QueryRows*>(args.arrays.delta)[at.pair * num_tiles + tile];
        if (MASKED && at.rank == 0 && at.piece == 0)
            for (int i = lane; i < num_key_tiles(args, BLOCK_K); i += 32)
                args.arrays.recompute_flags[at.pair * num_key_tiles(args, BLOCK_K) + i] = 0;
        if (at.piece == 0) write_lse(args, rows, at.pair, tile);
        mbarrier_wait(shared.piece_full_at(slot.index), slot.phase);
        constexpr int ROW_BYTES = HEAD_DIM_V * 2;
        const int row = lane / LANES_OF_ROW;
        const u32 dout = shared.piece_at(slot.index) + row * ROW_BYTES;
        float sum = row_product_of(dout, dout + PIECE_ROWS * ROW_BYTES, lane);
        const int row_of_tile = at.piece * PIECE_ROWS + row;
        if (tile * BLOCK_Q + row_of_tile >= shape.seqlen_q) sum = 0.0f;
        if (lane % LANES_OF_ROW == 0) rows.delta[row_of_tile] = sum;
        fence_async_proxy();
        __syncwarp();
        const RowPiece ahead = at.after(ROW_PIECES, num_tiles);
        if (ahead.pair < num_pairs) load_piece(args, shared, ahead, num_tiles, slot.index);
        slot.next();
        if (at.piece < TILE_PIECES - 1) continue;
        mbarrier_wait(shared.rows_taken_at(num_ready % ROW_STAGES), ~(num_ready / ROW_STAGES) & 1);
        fence_async_proxy_global();
        __syncwarp();
        mbarrier_arrive_if(lane == 0, shared.rows_ready_at(num_ready % ROW_STAGES));
        ++num_ready;
    }
}

// The producer of everything else, one thread: K and V, and for each iteration Q, its rows and dO.
template <class Shared>
__device__ __forceinline__ void produce_owned(const Arguments& args, Shared& shared) {
    constexpr bool SHARED_EMPTY = Shared::K_STAGES == 1;    // kv_empty is K's and V's
    const Shape& shape = args.arrays.shape;
    const int heads = shape.num_heads_kv;
    PipelineState<STAGES> stage;
    u32 num_taken = 0;
    WorkState state;
    for (int pair = blockIdx.x; pair < heads * shape.batch; pair += gridDim.x)
        for (int k_tile = num_key_tiles(args, BLOCK_K) - 1; k_tile >= 0; --k_tile, ++state.count) {
            WorkTile coord = {};
            static_cast<TileCoord&>(coord) = {k_tile, pair % heads, pair / heads};
            publish_work_tile(shared, state, coord);
            WorkTile work = {};
            static_cast<TileCoord&>(work) = {k_tile, pair % heads, pair / heads};
            const OwnedTiles tiles(args, k_tile);
            int awaited = tiles.first;                      // tiles before it have their rows
            for (int tile = tiles.first; tile < tiles.end; ++tile, stage.next()) {
                for (; awaited < (CAUSAL ? tiles.summed : min(tiles.summed, tile + 1)); ++awaited) {
                    const int i = num_taken % ROW_STAGES;
                    mbarrier_wait(shared.rows_ready_at(i), num_taken / ROW_STAGES & 1);
                    mbarrier_arrive(shared.rows_taken_at(i));
                    ++num_taken;
                }
                struct { int head, tile; } at = {work.head, tile};
                load_query_tile(args, shared, stage, work, at);
                if (tile > tiles.first) continue;
                if constexpr (SHARED_EMPTY)
                    mbarrier_wait(shared_address(&shared.kv_empty), state.kv_phase() ^ 1);
                else
                    shared.wait_k_empty(state);
                const int k_stage = SHARED_EMPTY ? 0 : state.stage();
                tma_load_tile<BLOCK_K, HEAD_DIM>(
                    shared.k_tile(state), args.k_map, shared_address(&shared.k_full[k_stage]),
                    k_tile * BLOCK_K, work.head, work.batch);
                if (!SHARED_EMPTY)
                    mbarrier_wait(shared_address(&shared.kv_empty), state.kv_phase() ^ 1);
                tma_load_tile<BLOCK_K, HEAD_DIM_V>(
                    shared_address(&shared.v), args.v_map, shared_address(&shared.v_full),
                    k_tile * BLOCK_K, work.head, work.batch);
            }
        }
    WorkTile none = {};
    none.tile = -1;
    publish_work_tile(shared, state, none);
}
