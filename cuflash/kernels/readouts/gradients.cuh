// The kernels of weights_backward, weight_sums_backward and entropy_backward: dK or dQ, and with dQ
// the gradients of numbers of rows.
//
//     dX = P r g,  dQ = scale dX' K,  dK = scale dX'^T Q,  dlse = -r rowsum(P g),  dr = rowsum(P g)
//
// where dX' is dX times the score's slope (score_mod.cuh), r a number of the query, and g
//
//     WEIGHTS_GRADIENT   dW_ij, of chosen queries i and keys j; a sum if one is chosen repeatedly
//     SUMS_GRADIENT      dc_j; REDUCE_MAX: 0 but for the query that has the maximum (`maxima`)
//     ENTROPY_GRADIENT   lse - x - 1 = -log P - 1, with r = dH
//
// A block has a tile of fixed rows of Tiles (a family's pair_tiles.cuh), whose sums are one tile of
// the result: OF_KEYS keys of one key head, for dK, else queries of one head, for dQ. It streams
// the others: queries of all heads of the group, or keys; of weights those that are chosen. No
// atomics, the same bits in every run. S and dX are computed twice, once for each result.
//
// DMOD, of the kernel for dQ: sums of dX f_a too, the gradients of the user's arrays
// (score/array_gradients.cuh), by atomics.
//
// Grid: tiles of rows of all (batch, head) pairs (scheduler.cuh).
#pragma once
#include "common/scheduler.cuh"
#include "readouts/chosen_rows.cuh"
#include "readouts/log_weight.cuh"
#include "readouts/row_sums.cuh"

template <class Tiles> struct GradientPlan {
    typename Tiles::RowTile rows;
    typename Tiles::ColumnTile columns[NUM_STAGES];
    typename Tiles::WeightTile weights;                     // dX'
    ChosenRows<Tiles::NUM_ROWS> chosen;
};

// What a query adds to all its pairs, and a key to its. token: of the sequence; negative: none.
template <class Real> struct QueryNumbers {
    int token;
    QueryLse<Real> lse;
    Real factor;                                            // r
};
template <class Real> struct KeyNumbers {
    int token, maximum;
    Real gradient;                                          // dc
};

// The numbers of one head, of the sequence whose first tokens are first_q and first_k.
template <class Real> struct HeadNumbers {
    const Arguments& args;
    i64 first_query, first_key;                             // where the head's numbers begin
    int batch, head, chosen_head, first_q, first_k;

    template <class Sequence>
    HeadNumbers(const Arguments& args, int batch, int head, int chosen_head,
                const Sequence& sequence)
        : args(args), first_query(index_of_query(args, batch, head, 0)),
          first_key(first_key_of(args, batch, head)), batch(batch), head(head),
          chosen_head(chosen_head), first_q(sequence.first_q), first_k(sequence.first_k) {}

    QueryNumbers<Real> query(const ScoreTile& score_tile, int token) const {
        const auto& arrays = arrays_of(args);
        QueryNumbers<Real> numbers = {-1, {}, 0};
        if (token < 0 || token >= arrays.shape.seqlen_q) return numbers;
        if constexpr (CHOSEN) {
            const TokenStrides& stride = arrays.chosen_stride;
            const u8* flags = static_cast<const u8*>(arrays.chosen);
            if (flags[batch * stride.batch + token * stride.token] == 0) return numbers;
        }
        const Real lse = static_cast<const Real*>(arrays.lse)[first_query + token];
        numbers = {token, QueryLse<Real>(score_tile, token, effective_lse(lse)), 1};
        if constexpr (ROW_WEIGHTS) {
            const PairStrides& stride = arrays.row_weights_stride;
            numbers.factor = static_cast<const Real*>(arrays.row_weights)[
                batch * stride.batch + head * stride.head + token * stride.query];
        }
        if constexpr (ENTROPY_GRADIENT)
            numbers.factor =
                static_cast<const Real*>(arrays.cotangent)[first_query + first_q + token];
        return numbers;
    }
    KeyNumbers<Real> key(int token) const {
        const auto& arrays = arrays_of(args);
        KeyNumbers<Real> numbers = {-1, -1, 0};
        if (token < 0 || token >= arrays.shape.seqlen_k) return numbers;
        numbers.token = token;
        if constexpr (SUMS_GRADIENT) {
            const i64 index = first_key + first_k + token;
            numbers.gradient = static_cast<const Real*>(arrays.cotangent)[index];
            if constexpr (REDUCE_MAX) numbers.maximum = arrays.maxima[index] - first_q;
        }
        return numbers;
    }
};

// P g of a pair, and the derivatives of its score.
template <class Real> struct PairGradient {
    Real of_weight;
    Derivatives<Real> derivatives;
};

template <class Tiles, class Real, class Dweight>
__device__ __forceinline__ PairGradient<Real> pair_gradient(
    const ScoreTile& score_tile, Real product, const QueryNumbers<Real>& query,
    const KeyNumbers<Real>& key, Dweight dweight) {
    Derivatives<Real> derivatives;
    const Real log_p =
        log_weight(score_tile, product, query.token, key.token, query.lse, derivatives);
    const Real p = Tiles::exponential(log_p);
    Real g = 0;
    if constexpr (ENTROPY_GRADIENT) g = p == 0 ? Real(0) : -log_p - 1;
    else if constexpr (WEIGHTS_GRADIENT) g = dweight();
    else g = key.gradient;
    return {p * g, derivatives};
}

// The columns that a block streams, in tiles: all of the sequence that are visited, or chosen ones.
template <class Tiles> struct Columns {
    static constexpr int COUNT = Tiles::NUM_COLUMNS;
    const PairMask& pair_mask;
    QueryTiles query_tiles;
    KeyTiles key_tiles;
    int row_tile, first, end;

    __device__ __forceinline__ Columns(
        const ScoreTile& score_tile, const Arguments& args, int row_tile)
        : pair_mask(score_tile.pair_mask), row_tile(row_tile) {
        const auto& arrays = arrays_of(args);
        if constexpr (WEIGHTS_GRADIENT) {
            first = 0;
            end = ((OF_KEYS ? arrays.num_queries : arrays.num_keys) + COUNT - 1) / COUNT;
        } else if constexpr (OF_KEYS) {
            query_tiles = score_tile.mask.query_tiles(row_tile * BLOCK_K, BLOCK_Q, BLOCK_K);
            first = after(query_tiles.first - 1, end = query_tiles.end);
        } else {
            key_tiles = score_tile.mask.key_tiles(row_tile * BLOCK_Q, BLOCK_Q, BLOCK_K);
            first = after(key_tiles.first - 1, end = key_tiles.num_visited);
        }
    }
    __device__ __forceinline__ int after(int tile) const { return after(tile, end); }
    __device__ __forceinline__ bool full(int tile) const {
        if (WEIGHTS_GRADIENT || CHOSEN || REDUCE_MAX) return false;     // not all pairs count
        if (OF_KEYS) return query_tiles.full(tile) && pair_mask.sees_all(tile, row_tile);
        return key_tiles.full(tile) && pair_mask.sees_all(row_tile, tile);
    }

private:
    __device__ __forceinline__ int after(int tile, int last) const {
        if constexpr (SKIPS_TILES && !WEIGHTS_GRADIENT)
            return PairMask::first_tile(tile + 1, last, [&](int other) {
                return OF_KEYS ? !pair_mask.skips(other, row_tile)
                               : !pair_mask.skips(row_tile, other);
            });
        else
            return tile + 1;
    }
};

// One block. `tile`: of rows, `start` their first token.
template <class Tiles> struct GradientBlock {
    using Real = typename Tiles::Real;
    using Shared = GradientPlan<Tiles>;
    // Sums of a tile's pairs for the user's arrays. Chosen keys are no grid: theirs are empty.
    using Pairs = typename Tiles::Pairs;
    using OnePair = LaneGrid<LaneAxis<1, 1, 1, 0>, LaneAxis<1, 1, 1, 0>>;
    template <class Grid> using ArraySums = typename ScoreMod<Real>::template ArraySums<Grid>;

    const Arguments& args;                                  // of the sequence
    Shared& shared;
    ScoreTile& score_tile;
    int batch, kv_head, start, first_q, first_k;
    typename Tiles::Sums sums;
    Real row_sums[Tiles::OWN_ROWS];                         // of P g
    QueryNumbers<Real> own_queries[OF_KEYS ? 1 : Tiles::OWN_ROWS];
    KeyNumbers<Real> own_keys[OF_KEYS ? Tiles::OWN_ROWS : 1];

    template <class Sequence>
    __device__ __forceinline__ GradientBlock(
        const Arguments& args, Shared& shared, ScoreTile& score_tile, TileCoord coord,
        int group_size, const Sequence& sequence)
        : args(args), shared(shared), score_tile(score_tile), batch(coord.batch),
          kv_head(OF_KEYS ? coord.head : coord.head / group_size),
          start(coord.tile * Tiles::NUM_ROWS), first_q(sequence.first_q),
          first_k(sequence.first_k) {
        Tiles::clear(sums);
        #pragma unroll
        for (int i = 0; i < Tiles::OWN_ROWS; ++i) row_sums[i] = 0;
    }

    __device__ __forceinline__ void set_rows(const HeadNumbers<Real>& head) {
        #pragma unroll
        for (int i = 0; i < Tiles::OWN_ROWS; ++i) {
            const int token = start + Tiles::row(i);
            if constexpr (OF_KEYS) own_keys[i] = head.key(token);
            else own_queries[i] = head.query(score_tile, token);
        }
    }

    // The token of column c of all chosen, or of the sequence.
    __device__ __forceinline__ int token_of(int c) const {
        const auto& arrays = arrays_of(args);
        if constexpr (!WEIGHTS_GRADIENT) return c;
        if (c >= (OF_KEYS ? arrays.num_queries : arrays.num_keys)) return -1;
        return OF_KEYS ? chosen_query(args, batch, c) - first_q : chosen_key(args, c) - first_k;
    }
    __device__ __forceinline__ void load(int head, int tile, int stage) const {
        const auto& arrays = arrays_of(args);
        const Shape& shape = arrays.shape;
        const void* array = OF_KEYS ? arrays.q : arrays.k;
        const Strides& stride = OF_KEYS ? arrays.q_stride : arrays.k_stride;
        const int seqlen = OF_KEYS ? shape.seqlen_q : shape.seqlen_k;
        const int first = tile * Tiles::NUM_COLUMNS, from = OF_KEYS ? head : kv_head;
        if constexpr (WEIGHTS_GRADIENT)
            Tiles::gather(shared.columns[stage], array, stride, batch, from, shape.head_dim,
                          [&](int c) {
                const int token = token_of(first + c);
                return token < seqlen ? token : -1;
            });
        else
            Tiles::load(shared.columns[stage], array, stride, batch, from, first, seqlen,
                        shape.head_dim);
        Tiles::commit();
    }

    // Whether a pair of fixed row `row` counts: its tokens exist and are chosen, the query sees the
    // key, and of maxima has the key's. Of others nothing is read, not even NaN.
    __device__ __forceinline__ bool counts(
        const QueryNumbers<Real>& query, const KeyNumbers<Real>& key, int row) const {
        if (query.token < 0 || key.token < 0) return false;
        if (REDUCE_MAX && key.maximum != query.token) return false;
        if (WEIGHTS_GRADIENT && shared.chosen.count[row] == 0) return false;
        return sees(score_tile, query.token, key.token);
    }

    // The gradients of the user's arrays by pair (i, j) of a tile: dx f_a.
    __device__ __forceinline__ void add_to_arrays(
        ArraySums<Pairs>& sums, const Pairs& pairs, int i, int j, int query, int key,
        const Derivatives<Real>& derivatives, Real dx) const {
        if constexpr (KEYS_IN_ORDER) {
            score_tile.score_mod.add_gradients(sums, pairs, i, j, derivatives, dx);
        } else {
            ArraySums<OnePair> none;
            score_tile.score_mod.add_gradients(
                none, OnePair{query, key}, 0, 0, derivatives, dx);
        }
    }

    // Adds the pairs of a tile of columns. MASKED: some do not count. nonfinite: a masked tile of
    // columns has a NaN or an infinity, the same in all threads.
    template <bool MASKED>
    __device__ __forceinline__ void add(
        const Tiles& tiles, const HeadNumbers<Real>& head, int tile, int stage, bool nonfinite) {
        typename Tiles::Scores s;
        tiles.products(s, shared.rows, shared.columns[stage], 0);
        const int first = tile * Tiles::NUM_COLUMNS;
        Pairs pairs{};
        if constexpr (DMOD)
            pairs = {start + Tiles::row(0),
                     first + Tiles::column(0, 0) - (WEIGHTS_GRADIENT ? first_k : 0)};
        ArraySums<Pairs> array_sums;
        #pragma unroll
        for (int j = 0; j < Tiles::OWN_COLUMNS; ++j) {
            const int c = first + Tiles::column(0, j), token = token_of(c);
            QueryNumbers<Real> query;
            KeyNumbers<Real> key;
            if constexpr (OF_KEYS) query = head.query(score_tile, token);
            else key = head.key(token);
            #pragma unroll
            for (int i = 0; i < Tiles::OWN_ROWS; ++i) {
                if constexpr (OF_KEYS) key = own_keys[i];
                else query = own_queries[i];
                Real& x = Tiles::at(s, i, j);
                if (MASKED && !counts(query, key, Tiles::row(i))) {
                    x = 0;
                    continue;
                }
                const PairGradient<Real> pair = pair_gradient<Tiles>(
                    score_tile, x, query, key, [&] {
                        return sum_of_dweights<Real>(
                            args, shared.chosen, batch, head.chosen_head, Tiles::row(i), c);
                    });
                row_sums[i] += pair.of_weight;
                const Real dx = query.factor * pair.of_weight;
                if constexpr (DMOD)
                    add_to_arrays(array_sums, pairs, i, j, query.token, key.token,
                                  pair.derivatives, dx);
                x = dx * pair.derivatives.by_product;
            }
        }
        score_tile.score_mod.finish_gradients(array_sums, pairs);
        if (MASKED && nonfinite) add_counted(head, s, first, stage);
        else Tiles::accumulate(sums, s, shared.weights, shared.columns[stage]);
    }

    // sums += dX' columns over pairs that count alone, as 0 * NaN is NaN. Slow, rare. Whole block.
    __device__ __forceinline__ void add_counted(
        const HeadNumbers<Real>& head, typename Tiles::Scores& s, int first, int stage) {
        #pragma unroll
        for (int i = 0; i < Tiles::OWN_ROWS; ++i)
            #pragma unroll
            for (int j = 0; j < Tiles::OWN_COLUMNS; ++j)
                shared.weights.at[Tiles::row(i)][Tiles::column(0, j)] = Tiles::at(s, i, j);
        __syncthreads();
        #pragma unroll 1
        for (int c = 0; c < Tiles::NUM_COLUMNS; ++c) {
            const int token = token_of(first + c);
            QueryNumbers<Real> query;
            KeyNumbers<Real> key;
            if constexpr (OF_KEYS) query = head.query(score_tile, token);
            else key = head.key(token);
            #pragma unroll
            for (int i = 0; i < Tiles::OWN_ROWS; ++i) {
                const int row = Tiles::row(i);
                if constexpr (OF_KEYS) key = head.key(start + row);
                else query = head.query(score_tile, start + row);
                if (!counts(query, key, row)) continue;
                const Real weight = shared.weights.at[row][c];
                #pragma unroll
                for (int n = 0; n < Tiles::OWN_SUMS; ++n) {
                    Real& sum = Tiles::sum_at(sums, i, n);
                    sum = fma(weight, Tiles::element(shared.columns[stage], c,
                                                     Tiles::sum_column(n)), sum);
                }
            }
        }
        __syncthreads();                                    // the weights are done with
    }

    // All tiles of columns of one head; the rows are in shared memory.
    __device__ __forceinline__ void add_head(
        const Tiles& tiles, const HeadNumbers<Real>& head, const Columns<Tiles>& columns) {
        if (columns.first >= columns.end) return;
        load(head.head, columns.first, 0);
        for (int tile = columns.first, stage = 0; tile < columns.end;) {
            const int next = columns.after(tile);
            const bool full = columns.full(tile);
            Tiles::wait();
            const bool nonfinite =
                __syncthreads_or(!full && Tiles::nonfinite(shared.columns[stage]));
            if (NUM_STAGES == 2 && next < columns.end) load(head.head, next, stage ^ 1);
            if constexpr (OF_KEYS) score_tile.q_start = tile * BLOCK_Q;
            else score_tile.k_start = tile * BLOCK_K;
            if (full) add<false>(tiles, head, tile, stage, false);
            else add<true>(tiles, head, tile, stage, nonfinite);
            if constexpr (NUM_STAGES == 2) {
                stage ^= 1;
            } else {
                __syncthreads();
                if (next < columns.end) load(head.head, next, stage);
            }
            tile = next;
        }
        __syncthreads();                                    // the columns are done with
    }

    // scale times the sums, as elements of dq or dk.
    __device__ __forceinline__ void store(int head, Real scale) {
        const auto& arrays = arrays_of(args);
        const Shape& shape = arrays.shape;
        const Strides& stride = OF_KEYS ? arrays.dk_stride : arrays.dq_stride;
        Element* to = static_cast<Element*>(OF_KEYS ? arrays.dk : arrays.dq)
                    + batch * stride.batch + head * stride.head;
        const int seqlen = OF_KEYS ? shape.seqlen_k : shape.seqlen_q;
        #pragma unroll
        for (int i = 0; i < Tiles::OWN_ROWS; ++i) {
            const int token = start + Tiles::row(i);
            if (token >= seqlen) continue;
            #pragma unroll
            for (int n = 0; n < Tiles::OWN_SUMS; ++n) {
                const int column = Tiles::sum_column(n);
                if (column < shape.head_dim)
                    to[token * stride.token + column] =
                        from_accumulator<Element>(Tiles::sum_at(sums, i, n) * scale);
            }
        }
    }
    // dlse and dr of the rows, which are queries.
    __device__ __forceinline__ void store_rows(const HeadNumbers<Real>& head) {
        const auto& arrays = arrays_of(args);
        reduce_rows<Sum<Real>, Tiles>(row_sums, shared.rows, [&](int row, Real sum) {
            const int token = start + row;
            if (token >= arrays.shape.seqlen_q) return;
            const QueryNumbers<Real> query = head.query(score_tile, token);
            const i64 index = head.first_query + first_q + token;
            static_cast<Real*>(arrays.dlse)[index] = query.token < 0 ? 0 : -query.factor * sum;
            if (arrays.drow_weights != nullptr)
                static_cast<Real*>(arrays.drow_weights)[index] = sum;
        });
    }
};

template <class Tiles>
__device__ __forceinline__ void gradients_of_rows(
    const Arguments& call_args, unsigned char* shared_bytes) {
    using Real = typename Tiles::Real;
    auto& shared = *reinterpret_cast<GradientPlan<Tiles>*>(shared_bytes);

    // Prologue: find the rows.
    const Shape& call_shape = arrays_of(call_args).shape;
    constexpr int ROWS = Tiles::NUM_ROWS;
    TileCoord coord = tile_of_block(
        blockIdx.x,
        OF_KEYS ? num_key_tiles(call_args, BLOCK_K) : num_query_tiles(call_args, BLOCK_Q),
        OF_KEYS ? call_shape.num_heads_kv : call_shape.num_heads_q, call_shape.batch,
        arrays_of(call_args).schedule);
    const auto sequence = sequence_of_block<OF_KEYS>(call_args, coord.tile, ROWS, false);
    if (!sequence.has_tile) return;
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const auto& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const int group_size = shape.num_heads_q / shape.num_heads_kv;
    ScoreTile score_tile(args, coord.batch, OF_KEYS ? coord.tile : 0);
    if (!OF_KEYS) score_tile.q_start = coord.tile * BLOCK_Q;
    const int first_head = OF_KEYS ? coord.head * group_size : coord.head;
    const int end_head = OF_KEYS ? first_head + group_size : first_head + 1;
    score_tile.set_head(args, coord.batch, first_head);

    GradientBlock<Tiles> block(args, shared, score_tile, coord, group_size, sequence);
    bool has_rows = true;
    if constexpr (WEIGHTS_GRADIENT)
        has_rows = find_chosen_rows(
            shared.chosen, args, coord.batch,
            block.start + (OF_KEYS ? sequence.first_k : sequence.first_q),
            Tiles::NUM_THREADS_OF_BLOCK);
    Tiles tiles;
    const Columns<Tiles> columns(score_tile, args, coord.tile);
    if (has_rows && columns.first < columns.end) {
        Tiles::load(shared.rows, OF_KEYS ? arrays.k : arrays.q,
                    OF_KEYS ? arrays.k_stride : arrays.q_stride, coord.batch, coord.head,
                    block.start, OF_KEYS ? shape.seqlen_k : shape.seqlen_q, shape.head_dim);
        Tiles::commit();
        Tiles::wait();
        __syncthreads();
        tiles.take_rows(shared.rows);
        const int num_heads = WEIGHTS_GRADIENT ? arrays.num_heads : end_head - first_head;
        for (int n = 0; n < num_heads; ++n) {
            const int head = WEIGHTS_GRADIENT ? chosen_head(args, n) : first_head + n;
            if (head < first_head || head >= end_head) continue;
            score_tile.set_head(args, coord.batch, head);
            const HeadNumbers<Real> numbers(args, coord.batch, head, n, sequence);
            block.set_rows(numbers);
            block.add_head(tiles, numbers, columns);
        }
    }

    // Epilogue.
    block.store(coord.head, static_cast<Real>(arrays.scale));
    if constexpr (!OF_KEYS)
        block.store_rows(HeadNumbers<Real>(args, coord.batch, coord.head, 0, sequence));
}
