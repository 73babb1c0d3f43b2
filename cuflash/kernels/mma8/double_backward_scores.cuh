// mma8/double_backward.cu's tile of scores: shared memory, the loads of query tiles, and the
// weights of BLOCK_Q queries and BLOCK_K keys.
#pragma once
#include "mma8/tangent_matmuls.cuh"
#include "mma8/warp_grids.cuh"
#include "common/packed_sequences.cuh"
#include "common/scheduler.cuh"
#include "score/score_tile.cuh"
#include "score/tangents.cuh"

struct SharedWeights { WeightTile weights; };

struct SharedPlan {
    SmemTile<BLOCK_K, HEAD_DIM> k, k_dot;
    SmemTile<BLOCK_K, HEAD_DIM_V> v, v_dot;
    SmemTile<BLOCK_Q, HEAD_DIM> q, q_dot;
    SmemTile<BLOCK_Q, HEAD_DIM_V> dout;
    SharedWeights tx;                                       // T_X
    SharedWeights others;                                   // Z P (W - b), then g dS
    Element lse[BLOCK_Q], delta[BLOCK_Q], b[BLOCK_Q], delta_dot[BLOCK_Q];
};
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// Loads of one key tile, and of one query tile after another; each of a query tile is one cp.async
// group, which is empty after the last head. What does not move has no cotangent.
struct Loader {
    SharedPlan& shared;
    const Arguments& args;
    const BackwardArguments& arrays;
    TileCoord coord;
    int end_head;

    __device__ __forceinline__ void load_keys(int start) const {
        const TangentNumbers& moves = args.tangents;
        const int batch = coord.batch, head = coord.head, num_rows = arrays.shape.seqlen_k - start;
        const auto load = [&](auto& tile, const Element* rows, i64 step, int columns) {
            load_tile(tile, rows + start * step, step, num_rows, columns);
        };
        const int d = arrays.shape.head_dim, d_v = arrays.shape.head_dim_v;
        load(shared.k, head_start(arrays.k, arrays.k_stride, batch, head),
             arrays.k_stride.token, d);
        load(shared.v, head_start(arrays.v, arrays.v_stride, batch, head),
             arrays.v_stride.token, d_v);
        if constexpr (K_DOT)
            load(shared.k_dot, head_start(args.k_dot, moves.k_dot, 0, batch, head),
                 moves.k_dot.token, d);
        if constexpr (V_DOT)
            load(shared.v_dot, head_start(args.v_dot, moves.v_dot, 0, batch, head),
                 moves.v_dot.token, d_v);
    }

    // dO, and the rows' numbers.
    __device__ __forceinline__ void load_dout(int head, int tile) const {
        if (head < end_head) {
            const Shape& shape = arrays.shape;
            const int start = tile * BLOCK_Q, num_rows = shape.seqlen_q - start;
            const i64 step = arrays.dout_stride.token;
            load_tile(shared.dout,
                      head_start(arrays.dout, arrays.dout_stride, coord.batch, head)
                          + start * step,
                      step, num_rows, shape.head_dim_v);
            const i64 row =
                (static_cast<i64>(coord.batch) * shape.num_heads_q + head) * rows_of_head(args)
                + start;
            load_numbers(shared.lse, arrays.lse, row, num_rows);
            load_numbers(shared.delta, arrays.delta, row, num_rows);
            load_numbers(shared.b, args.lse_dot, row, num_rows);
            load_numbers(shared.delta_dot, args.delta_dot, row, num_rows);
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void load_numbers(
        Element (&numbers)[BLOCK_Q], const void* rows, i64 row, int num_rows) const {
        constexpr int WORDS = sizeof(Element) / 4;          // cp.async copies 4 bytes
        const u32* target = reinterpret_cast<const u32*>(numbers);
        for (int i = threadIdx.x; i < BLOCK_Q * WORDS; i += THREADS)
            cp_async_4(shared_address(target + i),
                       static_cast<const u32*>(rows) + row * WORDS + i,
                       i / WORDS < num_rows ? 4 : 0);
    }

    // Q and ddQ.
    __device__ __forceinline__ void load_q(int head, int tile) const {
        if (head < end_head) {
            const int start = tile * BLOCK_Q, num_rows = arrays.shape.seqlen_q - start;
            const i64 step = arrays.q_stride.token, dot_step = args.tangents.q_dot.token;
            load_tile(shared.q,
                      head_start(arrays.q, arrays.q_stride, coord.batch, head) + start * step,
                      step, num_rows, arrays.shape.head_dim);
            if constexpr (Q_DOT)
                load_tile(shared.q_dot,
                          head_start(args.q_dot, args.tangents.q_dot, 0, coord.batch, head)
                              + start * dot_step,
                          dot_step, num_rows, arrays.shape.head_dim);
        }
        cp_async_commit();
    }
};

// What a warp knows of its pairs: in turn S, then Z P (W - b); X' / scale, then T_X; dP, then g dS;
// U. T_X and g dS come with the factor scale of d2Q and d2K.
struct Weights { Scores p_dot, tx, ds, u; };

// The weights of the equations of double_backward.cu, 0 for masked pairs, from their products.
// lse = -inf means that all scores of the query are -inf: P is 0.
template <bool MASKED>
__device__ __forceinline__ void compute_weights(
    Weights& x, const SharedPlan& shared, const ScoreTile& score_tile,
    const BiasTangent<Element>& bias_tangent) {
    const ScoreMod<Element>& score_mod = score_tile.score_mod;
    const int first_key = ScoreGrid::first_column() + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int m = 0; m < ScoreGrid::M_TILES; ++m)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = ScoreGrid::first_row() + m * 16 + query_row(half);
            const int i = score_tile.q_start + row;
            const Element lse = effective_lse(shared.lse[row]), delta = shared.delta[row];
            const Element b = shared.b[row], delta_dot = shared.delta_dot[row];
            u32 kept = 0;
            if constexpr (DROPOUT)
                kept = score_tile.dropout.kept_bits<ScoreGrid::N_TILES>(
                    i, score_tile.k_start + first_key);
            #pragma unroll
            for (int n = 0; n < ScoreGrid::N_TILES; ++n)
                #pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const int key = first_key + n * 8 + c, j = score_tile.k_start + key;
                    Element &s = x.p_dot[m][n][half * 2 + c], &w = x.tx[m][n][half * 2 + c];
                    Element &dp = x.ds[m][n][half * 2 + c], z = 1, slope;
                    const Element u = x.u[m][n][half * 2 + c];
                    if constexpr (DROPOUT)
                        z = (kept >> (n * 2 + c)) & 1 ? score_tile.dropout.factor : Element(0);
                    const Element score = score_mod.score(
                        s, score_tile.distance(row, key), score_mod.bias_of(i, j), slope);
                    const Element p = exponential(score - lse), x_dot = score_mod.scale * w;
                    const Element relative =                // W - b
                        (SOFTCAP ? slope * x_dot : x_dot) + bias_tangent.at(i, j) - b;
                    const Element ds = p * ((DROPOUT ? z * dp : dp) - delta);
                    const Element t = ds * relative + p * ((DROPOUT ? z * u : u) - delta_dot);
                    const bool visible = !MASKED || score_tile.visible(row, key);
                    if constexpr (DBIAS) if (visible) score_tile.dbias.add(i, j, t);
                    Element tx = t;
                    if constexpr (SOFTCAP) tx = slope * t + score_mod.curvature(s) * ds * x_dot;
                    s = visible ? (DROPOUT ? z * p : p) * relative : 0;
                    w = visible ? tx * score_mod.scale : 0;
                    dp = visible ? (SOFTCAP ? ds * slope : ds) * score_mod.scale : 0;
                }
        }
}
