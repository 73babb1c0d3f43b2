// The kernels of weights: the rows of P of chosen queries and heads, all keys or chosen ones.
//
//     P_rc = exp(x_ij - lse_i),  i = queries[r], j = keys[c]    0 where query i does not see key j
//
// An index may count from the end; where one is out of range, P is 0. Without `queries` (`keys`,
// `heads`) r = i (c = j; all heads).
//
// A block has BLOCK_Q chosen queries of one head, fixed rows of Tiles (a family's pair_tiles.cuh),
// and streams every splits-th tile of BLOCK_K chosen keys.
//
// Grid, with as many splits as it has blocks for:
//     blockIdx.x = (pair * splits + split) * row_tiles + row_tile, pair = batch * num_heads + head
// PACKED: times the sequences and the extra one of packed_sequences.cuh, the sequence last; a block
// writes the rows of its sequence's queries.
//
// Bad at: masks that hide whole tiles, whose zeros are found pair by pair; segment ids and boolean
// masks, which are read for each pair.
#pragma once
#include "readouts/chosen.cuh"
#include "readouts/log_weight.cuh"

template <class Tiles> struct WeightsPlan {
    typename Tiles::RowTile q;
    typename Tiles::ColumnTile k[NUM_STAGES];
    int queries[BLOCK_Q];                                   // of the sequence, OUT_OF_RANGE or:
};
constexpr int NOT_OURS = -2;                                // of another sequence, or no row at all

// Where a block is in its grid.
struct WeightsPlace {
    int row_tile, split, splits, head, batch, sequence;
    bool is_last;                                           // of the sequences

    template <class Arguments> explicit WeightsPlace(const Arguments& args) {
        const auto& arrays = arrays_of(args);
        const int row_tiles = (arrays.num_queries + BLOCK_Q - 1) / BLOCK_Q;
        int sequences = 1;
        if constexpr (PACKED) sequences = args.options.num_sequences + 1;
        const int pairs = arrays.shape.batch * arrays.num_heads;
        splits = gridDim.x / (row_tiles * pairs * sequences);
        const int rest = blockIdx.x / row_tiles, pair = rest / splits % pairs;
        row_tile = blockIdx.x % row_tiles;
        split = rest % splits;
        sequence = rest / splits / pairs;
        is_last = sequence == sequences - 1;
        head = pair % arrays.num_heads;
        batch = pair / arrays.num_heads;
    }
};

// The queries of a row tile as tokens of the sequence whose first is first_q, to shared memory.
// None if `head` is out of range. Whether the block has a row to write, the same in all threads.
template <class Tiles>
inline bool find_queries(
    WeightsPlan<Tiles>& shared, const Arguments& args, const WeightsPlace& place, int first_q,
    int head) {
    const auto& arrays = arrays_of(args);
    bool any = false;
    for (int i = threadIdx.x; i < BLOCK_Q; i += Tiles::NUM_THREADS_OF_BLOCK) {
        const int row = place.row_tile * BLOCK_Q + i;
        int query = NOT_OURS;
        if (row < arrays.num_queries) {
            const int token = chosen_query(args, place.batch, row);
            const int own = token - first_q;
            if (token == OUT_OF_RANGE || head == OUT_OF_RANGE) {
                if (place.is_last) query = OUT_OF_RANGE;
            } else if (own >= 0 && own < arrays.shape.seqlen_q) {
                query = own;
            }
        }
        shared.queries[i] = query;
        any |= query != NOT_OURS;
    }
    return __syncthreads_or(any);
}

// The weight of a pair, whose product is s; 0 where one of the two is out of range.
template <class Tiles>
__device__ __forceinline__ typename Tiles::Real weight_of_pair(
    const ScoreTile& score_tile, typename Tiles::Real s, int query, int key,
    const QueryLse<typename Tiles::Real>& row) {
    using Real = typename Tiles::Real;
    if (query < 0 || key < 0 || !sees(score_tile, query, key)) return 0;
    return Tiles::exponential(log_weight(score_tile, s, query, key, row));
}

// The thread's pairs of a piece of a key tile to `result`, its first row and chosen key `start`.
template <class Tiles>
__device__ __forceinline__ void store_piece(
    Result* result, const Tiles& tiles, const WeightsPlan<Tiles>& shared, const Arguments& args,
    const ScoreTile& score_tile, int stage, int piece, int start, int first_k,
    const QueryLse<typename Tiles::Real> (&rows)[Tiles::OWN_ROWS]) {
    constexpr int TOGETHER = Tiles::TOGETHER;
    const auto& arrays = arrays_of(args);
    const int num_keys = arrays.num_keys, num_columns = num_keys - start;
    typename Tiles::Scores s;
    tiles.products(s, shared.q, shared.k[stage], piece);
    #pragma unroll
    for (int j = 0; j < Tiles::OWN_COLUMNS; j += TOGETHER) {
        const int column = Tiles::column(piece, j);
        int keys[TOGETHER];
        #pragma unroll
        for (int n = 0; n < TOGETHER; ++n)
            keys[n] = column + n < num_columns
                ? chosen_key(args, start + column + n) : OUT_OF_RANGE;
        #pragma unroll
        for (int i = 0; i < Tiles::OWN_ROWS; ++i) {
            const int row = Tiles::row(i), query = shared.queries[row];
            if (query == NOT_OURS) continue;
            Together<Result, TOGETHER> p;
            #pragma unroll
            for (int n = 0; n < TOGETHER; ++n)
                p.at[n] = from_accumulator<Result>(weight_of_pair<Tiles>(
                    score_tile, Tiles::at(s, i, j + n), query, keys[n] - first_k, rows[i]));
            Result* to = result + i64(row) * num_keys + column;
            if (num_keys % TOGETHER == 0 && column + TOGETHER <= num_columns) {
                *reinterpret_cast<Together<Result, TOGETHER>*>(to) = p;
                continue;
            }
            #pragma unroll
            for (int n = 0; n < TOGETHER; ++n)
                if (column + n < num_columns) to[n] = p.at[n];
        }
    }
}

template <class Tiles>
__device__ __forceinline__ void weights_of_queries(
    const Arguments& call_args, unsigned char* shared_bytes) {
    using Real = typename Tiles::Real;
    auto& shared = *reinterpret_cast<WeightsPlan<Tiles>*>(shared_bytes);

    // Prologue: find the chosen queries, of one sequence.
    const WeightsPlace place(call_args);
    const auto sequence = sequence_of_number(call_args, place.sequence);
    const Arguments& args = sequence_arguments(call_args, sequence, BLOCK_Q);
    const auto& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const int head = chosen_head(args, place.head);
    if (!find_queries(shared, args, place, sequence.first_q, head)) return;
    const int own_head = max(head, 0);
    const int kv_head = own_head / (shape.num_heads_q / shape.num_heads_kv);
    ScoreTile score_tile(args, place.batch, 0);
    score_tile.set_head(args, place.batch, own_head);
    const i64 first_query = index_of_query(args, place.batch, own_head, 0);

    Tiles queries;
    Tiles::gather(shared.q, arrays.q, arrays.q_stride, place.batch, own_head, shape.head_dim,
                  [&](int row) { return shared.queries[row]; });
    const auto load_keys = [&](int tile, int stage) {
        const int start = tile * BLOCK_K;
        const auto& all = arrays_of(call_args);
        if (all.keys == nullptr)
            Tiles::load(shared.k[stage], all.k, all.k_stride, place.batch, kv_head, start,
                        all.num_keys, shape.head_dim);
        else
            Tiles::gather(shared.k[stage], all.k, all.k_stride, place.batch, kv_head,
                          shape.head_dim, [&](int row) {
                return start + row < all.num_keys
                    ? chosen_key(args, start + row) : OUT_OF_RANGE;
            });
        Tiles::commit();
    };
    const int num_tiles = (arrays.num_keys + BLOCK_K - 1) / BLOCK_K;
    if (place.split < num_tiles) load_keys(place.split, 0);
    QueryLse<Real> rows[Tiles::OWN_ROWS];
    #pragma unroll
    for (int i = 0; i < Tiles::OWN_ROWS; ++i) {
        const int query = shared.queries[Tiles::row(i)];
        const Real own =
            query < 0 ? Real(0) : static_cast<const Real*>(arrays.lse)[first_query + query];
        rows[i] = QueryLse<Real>(score_tile, query, effective_lse(own));
    }
    Tiles::wait();
    __syncthreads();
    queries.take_rows(shared.q);

    // Main loop, one key tile an iteration; stages as in entropy.cuh.
    Result* result = static_cast<Result*>(arrays.result)
                   + ((i64(place.batch) * arrays.num_heads + place.head) * arrays.num_queries
                      + place.row_tile * BLOCK_Q) * arrays.num_keys;
    for (int tile = place.split, stage = 0; tile < num_tiles; tile += place.splits) {
        const int next = tile + place.splits;
        Tiles::wait();
        __syncthreads();
        if (NUM_STAGES == 2 && next < num_tiles) load_keys(next, stage ^ 1);
        #pragma unroll 1
        for (int piece = 0; piece < Tiles::PIECES; ++piece)
            store_piece(result + tile * BLOCK_K, queries, shared, args, score_tile, stage, piece,
                        tile * BLOCK_K, sequence.first_k, rows);
        if constexpr (NUM_STAGES == 2) {
            stage ^= 1;
        } else {
            __syncthreads();
            if (next < num_tiles) load_keys(next, stage);
        }
    }
}
