// The kernels of weight_sums: how much weight each key gets from a head's queries.
//
//     c_j = sum_i r_i P_ij,  P = exp(scale S - lse)          REDUCE_MAX: max_i r_i P_ij
//
// over the queries i that see key j, with row weights r_i (ROW_WEIGHTS, else 1); 0 where none does.
// CHOSEN: of those whose flag is set. Others add nothing, whatever their scores. FINDS_QUERY: not
// the maxima are stored, but the first query that has each, -1 if there is none.
//
// A block has BLOCK_K keys of one query head, fixed rows of Tiles (a family's pair_tiles.cuh), and
// streams the query tiles that see them, in a fixed order: no atomics, the same bits in every run.
// A thread adds up its rows' pairs of a tile first, then the tiles: sums of many queries lose few
// digits.
//
// Grid: tiles of BLOCK_K keys of all (batch, query head) pairs (scheduler.cuh), the first tiles
// first: if CAUSAL, most queries see those.
#pragma once
#include "common/scheduler.cuh"
#include "readouts/log_weight.cuh"
#include "readouts/row_sums.cuh"
#include "score/query_order.cuh"

template <class Tiles> struct WeightSumsPlan {
    typename Tiles::RowTile k;
    typename Tiles::ColumnTile q[NUM_STAGES];
    alignas(16) typename Tiles::Real lse[NUM_STAGES][BLOCK_Q];      // effective; times log2(e)
    typename Tiles::Real lse_log2[NUM_STAGES][BLOCK_Q], row_weights[NUM_STAGES][BLOCK_Q];
    int chosen[NUM_STAGES][BLOCK_Q];
};

// Loads Q, lse and row weights of one query tile after another. The numbers of rows wait in
// registers until the tile before has been used.
template <class Tiles> struct QueryStream {
    using Real = typename Tiles::Real;
    using Shared = WeightSumsPlan<Tiles>;
    static constexpr int COUNT =
        (BLOCK_Q + Tiles::NUM_THREADS_OF_BLOCK - 1) / Tiles::NUM_THREADS_OF_BLOCK;

    const Arguments& args;
    Shared& shared;
    int batch, head;
    const Real *lse, *row_weights;                          // of the head's first query
    const u8* chosen;
    Real next_lse[COUNT], next_row_weight[COUNT];
    bool next_chosen[COUNT];

    QueryStream(const Arguments& args, Shared& shared, int batch, int head)
        : args(args), shared(shared), batch(batch), head(head) {
        const auto& arrays = arrays_of(args);
        lse = static_cast<const Real*>(arrays.lse) + index_of_query(args, batch, head, 0);
        const PairStrides& stride = arrays.row_weights_stride;
        row_weights = static_cast<const Real*>(arrays.row_weights)
                    + batch * stride.batch + head * stride.head;
        chosen = static_cast<const u8*>(arrays.chosen) + batch * arrays.chosen_stride.batch;
    }

    // Starts the loads of a tile.
    void load(int tile, int stage) {
        const auto& arrays = arrays_of(args);
        const Shape& shape = arrays.shape;
        const int start = tile * BLOCK_Q;
        Tiles::load(shared.q[stage], arrays.q, arrays.q_stride, batch, head, start, shape.seqlen_q,
                    shape.head_dim);
        Tiles::commit();
        #pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const int row = start + threadIdx.x + n * Tiles::NUM_THREADS_OF_BLOCK;
            const bool exists = row < shape.seqlen_q;
            next_lse[n] = exists ? lse[row] : -Real(infinity());
            if constexpr (ROW_WEIGHTS)
                next_row_weight[n] = exists
                    ? row_weights[row * arrays.row_weights_stride.query] : Real(1);
            if constexpr (CHOSEN)
                next_chosen[n] = exists && chosen[row * arrays.chosen_stride.token] != 0;
        }
    }
    // Its numbers of rows, to shared memory.
    void store_rows(int stage) const {
        #pragma unroll
        for (int n = 0; n < COUNT; ++n) {
            const int row = threadIdx.x + n * Tiles::NUM_THREADS_OF_BLOCK;
            if (row >= BLOCK_Q) break;
            const Real effective = effective_lse(next_lse[n]);
            shared.lse[stage][row] = effective;
            shared.lse_log2[stage][row] = effective * Real(LOG2_E);
            if constexpr (ROW_WEIGHTS) shared.row_weights[stage][row] = next_row_weight[n];
            if constexpr (CHOSEN) shared.chosen[stage][row] = next_chosen[n];
        }
    }
    // Of the tile whose numbers `store_rows` has stored: whether a row of this thread needs exact
    // weights; whether one is chosen, or is not.
    bool needs_exact() const {
        bool found = false;
        #pragma unroll
        for (int n = 0; n < COUNT; ++n) found |= needs_exact_weights(effective_lse(next_lse[n]));
        return found;
    }
    bool has(bool is_chosen) const {
        bool found = false;
        #pragma unroll
        for (int n = 0; n < COUNT; ++n)
            found |= threadIdx.x + n * Tiles::NUM_THREADS_OF_BLOCK < BLOCK_Q
                  && next_chosen[n] == is_chosen;
        return found;
    }
};

template <class Real>
using Reduction = typename ReduceChoice<Real, REDUCE_MAX, FINDS_QUERY>::type;

// Adds the pairs of a piece of a query tile to the thread's rows, keys. MASKED: some pairs are
// masked, or rows not chosen. FAST: log_weight.cuh.
template <bool MASKED, bool FAST, class Tiles>
__device__ __forceinline__ void add_piece(
    typename Reduction<typename Tiles::Real>::Total (&sums)[Tiles::OWN_ROWS], const Tiles& tiles,
    const WeightSumsPlan<Tiles>& shared, int stage, int piece, const ScoreTile& score_tile) {
    using Real = typename Tiles::Real;
    using Reduce = Reduction<Real>;
    typename Tiles::Scores s;
    tiles.products(s, shared.k, shared.q[stage], piece);
    typename Reduce::Total of_piece[Tiles::OWN_ROWS];
    #pragma unroll
    for (int i = 0; i < Tiles::OWN_ROWS; ++i) of_piece[i] = Reduce::nothing();
    const float scale_log2 = static_cast<float>(score_tile.score_mod.scale) * LOG2_E;
    constexpr int TOGETHER = Tiles::TOGETHER;
    #pragma unroll
    for (int first = 0; first < Tiles::OWN_COLUMNS; first += TOGETHER) {
        const int first_column = Tiles::column(piece, first);
        const auto lse = load_together<TOGETHER>(
            &(FAST ? shared.lse_log2 : shared.lse)[stage][first_column]);
        const auto r = load_together<TOGETHER>(&shared.row_weights[stage][first_column]);
        #pragma unroll
        for (int n = 0; n < TOGETHER; ++n) {
            const int column = first_column + n, query = score_tile.q_start + column;
            const QueryLse<Real> row(score_tile, query, lse.at[n]);
            #pragma unroll
            for (int i = 0; i < Tiles::OWN_ROWS; ++i) {
                const int key = score_tile.k_start + Tiles::row(i);
                const Real product = Tiles::at(s, i, first + n);
                Real p;
                if constexpr (FAST) p = exp2_approx(fmaf(product, scale_log2, -lse.at[n]));
                else p = Tiles::exponential(log_weight(score_tile, product, query, key, row));
                auto term = Reduce::term(ROW_WEIGHTS ? r.at[n] * p : p, query);
                if constexpr (MASKED) {
                    const bool is_out = CHOSEN && !shared.chosen[stage][column];
                    if (is_out || !sees(score_tile, query, key)) term = Reduce::nothing();
                }
                of_piece[i] = Reduce::of(of_piece[i], term);
            }
        }
    }
    #pragma unroll
    for (int i = 0; i < Tiles::OWN_ROWS; ++i) sums[i] = Reduce::of(sums[i], of_piece[i]);
}

// The same of all pieces. is_full: no pair is masked. is_fast: log_weight.cuh.
template <class Tiles>
__device__ __forceinline__ void add_tile(
    typename Reduction<typename Tiles::Real>::Total (&sums)[Tiles::OWN_ROWS], const Tiles& tiles,
    const WeightSumsPlan<Tiles>& shared, int stage, const ScoreTile& score_tile, bool is_full,
    bool is_fast) {
    #pragma unroll 1
    for (int piece = 0; piece < Tiles::PIECES; ++piece)
        if (is_full && is_fast)
            add_piece<false, HAS_FAST_WEIGHTS>(sums, tiles, shared, stage, piece, score_tile);
        else if (is_full) add_piece<false, false>(sums, tiles, shared, stage, piece, score_tile);
        else add_piece<true, false>(sums, tiles, shared, stage, piece, score_tile);
}

template <class Tiles>
__device__ __forceinline__ void weight_sums_of_keys(
    const Arguments& call_args, unsigned char* shared_bytes) {
    using Real = typename Tiles::Real;
    auto& shared = *reinterpret_cast<WeightSumsPlan<Tiles>*>(shared_bytes);
    using Reduce = Reduction<Real>;

    // Prologue: find the key tile, and the query tiles that see it.
    const Shape& call_shape = arrays_of(call_args).shape;
    TileCoord coord = tile_of_block(
        blockIdx.x, num_key_tiles(call_args, BLOCK_K), call_shape.num_heads_q, call_shape.batch,
        arrays_of(call_args).schedule);
    const auto sequence = sequence_of_block<true>(call_args, coord.tile, BLOCK_K, false);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const auto& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    ScoreTile score_tile(args, coord.batch, coord.tile);
    score_tile.set_head(args, coord.batch, coord.head);
    const QueryTiles tiles = score_tile.mask.query_tiles(score_tile.k_start, BLOCK_Q, BLOCK_K);
    const QueryOrder order(score_tile.pair_mask, tiles, coord.tile);

    typename Reduce::Total sums[Tiles::OWN_ROWS];
    #pragma unroll
    for (int i = 0; i < Tiles::OWN_ROWS; ++i) sums[i] = Reduce::nothing();
    Tiles keys;
    QueryStream<Tiles> stream(args, shared, coord.batch, coord.head);
    if (order.has(order.first)) {
        Tiles::load(shared.k, arrays.k, arrays.k_stride, coord.batch,
                    coord.head / (shape.num_heads_q / shape.num_heads_kv), score_tile.k_start,
                    shape.seqlen_k, shape.head_dim);
        stream.load(order.first, 0);
        stream.store_rows(0);
        Tiles::wait();
        __syncthreads();
        keys.take_rows(shared.k);
    }

    // Main loop, one query tile an iteration. It is on its way to `stage`; the other stage is free
    // once all threads are past the first barrier.
    int stage = 0;
    for (int tile = order.first; order.has(tile);) {
        const int next = order.after(tile);
        Tiles::wait();
        bool has_chosen = true, has_others = false, is_fast = false;
        if constexpr (CHOSEN) {
            has_chosen = __syncthreads_or(stream.has(true));
            has_others = __syncthreads_or(stream.has(false));
        }
        if constexpr (HAS_FAST_WEIGHTS) is_fast = !__syncthreads_or(stream.needs_exact());
        else __syncthreads();
        if (NUM_STAGES == 2 && order.has(next)) stream.load(next, stage ^ 1);
        score_tile.q_start = tile * BLOCK_Q;
        const bool is_full = !has_others && score_tile.full(tiles, tile);
        if (has_chosen) add_tile(sums, keys, shared, stage, score_tile, is_full, is_fast);
        if constexpr (NUM_STAGES == 2) {
            stage ^= 1;
        } else {
            __syncthreads();
            if (order.has(next)) stream.load(next, stage);
        }
        if (order.has(next)) stream.store_rows(stage);
        tile = next;
    }

    // Epilogue.
    const i64 first = first_key_of(args, coord.batch, coord.head) + sequence.first_k;
    reduce_rows<Reduce, Tiles>(sums, shared.k, [&](int row, typename Reduce::Total total) {
        const int key = score_tile.k_start + row;
        if (key >= shape.seqlen_k) return;
        if constexpr (FINDS_QUERY)
            arrays.maxima[first + key] = total.query < 0 ? -1 : total.query + sequence.first_q;
        else
            static_cast<Real*>(arrays.result)[first + key] = Reduce::value(total);
    });
}
