// The kernels of entropy: how spread a query's weights are, in nats.
//
//     H_i = sum_j P_ij (lse_i - x_ij),  P = exp(x - lse)      0 where no key is visible
//
// A weight that underflows adds 0, whatever its score.
//
// A block has BLOCK_Q queries of one head, fixed rows of Tiles (a family's pair_tiles.cuh), and
// streams the key tiles that they see, from the last to the first. A thread adds up its rows' pairs
// of a tile first, then the tiles.
//
// Grid: tiles of BLOCK_Q queries of all (batch, head) pairs (query_tile.cuh), the last tiles first:
// if CAUSAL, those see the most keys.
#pragma once
#include "common/query_tile.cuh"
#include "readouts/log_weight.cuh"
#include "readouts/row_sums.cuh"

template <class Tiles> struct EntropyPlan {
    typename Tiles::RowTile q;
    typename Tiles::ColumnTile k[NUM_STAGES];
};

constexpr float LN_2 = 0.6931471805599453f;

// -P log P. It is 0 where P is, also with log P = -inf; NaN stays.
template <class Tiles, class Real>
__device__ __forceinline__ Real surprise(Real log_p) {
    const Real p = Tiles::exponential(log_p);
    return p == 0 ? Real(0) : -p * log_p;
}

// The same to base 2 (log_weight.cuh); NaN stays, as P has it.
__device__ __forceinline__ float surprise_log2(float log2_p) {
    constexpr float LOWEST = -1e30f;
    return -exp2_approx(log2_p) * fmaxf(log2_p, LOWEST);
}

// Adds the pairs of a piece of a key tile to the thread's rows, queries. FAST: log_weight.cuh.
template <bool MASKED, bool FAST, class Tiles>
__device__ __forceinline__ void add_piece(
    typename Tiles::Real (&sums)[Tiles::OWN_ROWS], const Tiles& tiles,
    const EntropyPlan<Tiles>& shared, int stage, int piece, const ScoreTile& score_tile,
    const QueryLse<typename Tiles::Real> (&rows)[Tiles::OWN_ROWS]) {
    using Real = typename Tiles::Real;
    typename Tiles::Scores s;
    tiles.products(s, shared.q, shared.k[stage], piece);
    const float scale_log2 = static_cast<float>(score_tile.score_mod.scale) * LOG2_E;
    #pragma unroll
    for (int i = 0; i < Tiles::OWN_ROWS; ++i) {
        const int query = score_tile.q_start + Tiles::row(i);
        Real of_piece = 0;
        #pragma unroll
        for (int j = 0; j < Tiles::OWN_COLUMNS; ++j) {
            const int key = score_tile.k_start + Tiles::column(piece, j);
            const Real product = Tiles::at(s, i, j);
            if constexpr (FAST)
                of_piece += surprise_log2(fmaf(product, scale_log2, -rows[i].lse * LOG2_E));
            else if (!MASKED || sees(score_tile, query, key))
                of_piece +=
                    surprise<Tiles>(log_weight(score_tile, product, query, key, rows[i]));
        }
        sums[i] += FAST ? of_piece * Real(LN_2) : of_piece;
    }
}

// The same of all pieces. is_full: no pair is masked. is_fast: log_weight.cuh.
template <class Tiles>
__device__ __forceinline__ void add_tile(
    typename Tiles::Real (&sums)[Tiles::OWN_ROWS], const Tiles& tiles,
    const EntropyPlan<Tiles>& shared, int stage, const ScoreTile& score_tile,
    const QueryLse<typename Tiles::Real> (&rows)[Tiles::OWN_ROWS], bool is_full, bool is_fast) {
    #pragma unroll 1
    for (int piece = 0; piece < Tiles::PIECES; ++piece)
        if (is_full && is_fast)
            add_piece<false, HAS_FAST_WEIGHTS>(
                sums, tiles, shared, stage, piece, score_tile, rows);
        else if (is_full)
            add_piece<false, false>(sums, tiles, shared, stage, piece, score_tile, rows);
        else
            add_piece<true, false>(sums, tiles, shared, stage, piece, score_tile, rows);
}

template <class Tiles>
__device__ __forceinline__ void entropy_of_queries(
    const Arguments& call_args, unsigned char* shared_bytes) {
    using Real = typename Tiles::Real;
    auto& shared = *reinterpret_cast<EntropyPlan<Tiles>*>(shared_bytes);

    // Prologue: find the query tile, and the key tiles that it sees.
    TileCoord coord = query_tile_of_block<false>(call_args);
    const auto sequence = sequence_of_block<false>(call_args, coord.tile, BLOCK_Q, true);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const auto& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    ScoreTile score_tile(args, coord.batch, 0);
    score_tile.q_start = coord.tile * BLOCK_Q;
    score_tile.set_head(args, coord.batch, coord.head);
    const PairMask& pair_mask = score_tile.pair_mask;
    const KeyTiles tiles = score_tile.mask.key_tiles(score_tile.q_start, BLOCK_Q, BLOCK_K);
    const int kv_head = coord.head / (shape.num_heads_q / shape.num_heads_kv);
    const auto load_keys = [&](int tile, int stage) {
        Tiles::load(shared.k[stage], arrays.k, arrays.k_stride, coord.batch, kv_head,
                    tile * BLOCK_K, shape.seqlen_k, shape.head_dim);
        Tiles::commit();
    };

    Real sums[Tiles::OWN_ROWS] = {};
    QueryLse<Real> rows[Tiles::OWN_ROWS];
    Tiles queries;
    int tile = pair_mask.key_tile_before(coord.tile, tiles.num_visited, tiles.first);
    const Real* lse = static_cast<const Real*>(arrays.lse)
                    + index_of_query(args, coord.batch, coord.head, 0);
    #pragma unroll
    for (int i = 0; i < Tiles::OWN_ROWS; ++i) {
        const int query = score_tile.q_start + Tiles::row(i);
        const Real own = query < shape.seqlen_q ? lse[query] : -Real(infinity());
        rows[i] = QueryLse<Real>(score_tile, query, effective_lse(own));
    }
    bool is_fast = HAS_FAST_WEIGHTS;                        // the same in all of the warp
    if constexpr (HAS_FAST_WEIGHTS) {
        #pragma unroll
        for (int i = 0; i < Tiles::OWN_ROWS; ++i) is_fast &= !needs_exact_weights(rows[i].lse);
        is_fast = __ballot_sync(WHOLE_WARP, is_fast) == WHOLE_WARP;
    }
    if (tile >= tiles.first) {
        Tiles::load(shared.q, arrays.q, arrays.q_stride, coord.batch, coord.head,
                    score_tile.q_start, shape.seqlen_q, shape.head_dim);
        load_keys(tile, 0);
        Tiles::wait();
        __syncthreads();
        queries.take_rows(shared.q);
    }

    // Main loop, one key tile an iteration. It is on its way to `stage`; the other stage is free
    // once all threads are past the first barrier.
    for (int stage = 0; tile >= tiles.first;) {
        const int next = pair_mask.key_tile_before(coord.tile, tile, tiles.first);
        Tiles::wait();
        __syncthreads();
        if (NUM_STAGES == 2 && next >= tiles.first) load_keys(next, stage ^ 1);
        score_tile.k_start = tile * BLOCK_K;
        const bool is_full = tiles.full(tile) && pair_mask.sees_all(coord.tile, tile);
        add_tile(sums, queries, shared, stage, score_tile, rows, is_full, is_fast);
        if constexpr (NUM_STAGES == 2) {
            stage ^= 1;
        } else {
            __syncthreads();
            if (next >= tiles.first) load_keys(next, stage);
        }
        tile = next;
    }

    // Epilogue.
    Real* result = static_cast<Real*>(arrays.result)
                 + index_of_query(call_args, coord.batch, coord.head, 0) + sequence.first_q;
    reduce_rows<Sum<Real>, Tiles>(sums, shared.q, [&](int row, Real sum) {
        const int query = score_tile.q_start + row;
        if (query < shape.seqlen_q) result[query] = sum;
    });
}
