// sm80/backward.cu's gradients: matmuls that keep NaN and infinity of masked pairs out, and the way
// of dQ, dK and dV to global memory.
#pragma once
#include "common/dq_semaphore.cuh"
#include "score/query_order.cuh"
#include "common/head_rows.cuh"
#include "common/packed_sequences.cuh"
#include "common/scheduler.cuh"
#include "sm80/backward_scores.cuh"

// Tiles of 8 columns of dQ that a warp computes at once: all its columns, or half of them where
// they would take more than 32 floats a thread.
constexpr int DQ_SLICE = QueryGrid::M_TILES * QueryGrid::N_TILES > 8 && QueryGrid::N_TILES % 4 == 0
                       ? QueryGrid::N_TILES / 2 : QueryGrid::N_TILES;

// All key tiles of a head visit the same query tiles, or, if CAUSAL, those after their first one.
constexpr bool AHEAD = DETERMINISTIC && !(WINDOW || SKIPS_TILES || PACKED);
constexpr bool IN_SECTIONS = AHEAD && CAUSAL;
using BackwardOrder = QueryOrder<IN_SECTIONS>;
using BackwardSemaphore = DqSemaphore<WholeBlock, AHEAD>;

// The place of the block's addition to query tile q_tile.
__device__ __forceinline__ DqPlace dq_place(
    const ScoreTile& score_tile, const BackwardOrder& order, int q_tile, int num_q_tiles) {
    if constexpr (!AHEAD) {
        const int rank = score_tile.dq_rank(q_tile, order.k_tile);
        return {rank, rank > 0};
    }
    DqPlace place = {order.k_tile, order.k_tile > 0, q_tile == order.first,
                     order.descends ? q_tile : num_q_tiles - 1 - q_tile};
    if (IN_SECTIONS && !order.descends) {                   // from the last keys on
        const auto& mask = score_tile.mask;
        const int start_before = (order.k_tile + 1) * BLOCK_K;
        place.rank = (mask.seqlen_k - 1) / BLOCK_K - order.k_tile;
        place.has_predecessor =
            place.rank > 0 && q_tile >= mask.query_tiles(start_before, BLOCK_Q, BLOCK_K).first;
    }
    return place;
}

// D += A B over the queries or keys of a tile, for the warp's rows and columns of D. A is P^T or
// dS^T and B is dO or Q; with QUERY_ROWS, A is dS and B is K. A's keys begin at column A_COLUMN of
// its tile. A NaN or an infinity in B would spread, as 0 * NaN, to rows of D that do not see B's
// row. If there is one, this multiplies only finite values, and add_nonfinite_terms() adds the
// rest.
template <bool QUERY_ROWS, int B_ROWS, bool MASKED, int A_COLUMN = 0, int M_TILES, int N_TILES>
__device__ __forceinline__ void gradient_gemm(
    float (&d)[M_TILES][N_TILES][4], u32 a_tile, u32 b_tile, int first_row, int first_column,
    bool nonfinite) {
    using A = OperandA<BLOCK_Q, QUERY_ROWS ? Stored::AS_NAMED : Stored::TRANSPOSED, M_TILES,
                       QUERY_ROWS ? A_COLUMN : 0>;
    using B = OperandB<B_ROWS, Stored::AS_NAMED, N_TILES / 2>;
    const A a(a_tile, QUERY_ROWS ? first_row : A_COLUMN + first_row);
    const B b(b_tile, first_column);
    if (MASKED && nonfinite) gemm<Element, B_ROWS / 16>(d, a, Sanitized<Element, B>{b});
    else gemm<Element, B_ROWS / 16>(d, a, b);
}

// dV += P^T dO and dK += dS^T Q.
template <bool MASKED>
__device__ __forceinline__ void add_dv(
    ValueGrid::Fragments& dv, u32 p_smem, u32 dout_smem, bool nonfinite) {
    gradient_gemm<false, BLOCK_Q, MASKED>(
        dv, p_smem, dout_smem, ValueGrid::first_row(), ValueGrid::first_column(), nonfinite);
}
template <bool MASKED>
__device__ __forceinline__ void add_dk(
    KeyGrid::Fragments& dk, u32 ds_smem, u32 q_smem, bool nonfinite) {
    gradient_gemm<false, BLOCK_Q, MASKED, DS_COLUMN>(
        dk, ds_smem, q_smem, KeyGrid::first_row(), KeyGrid::first_column(), nonfinite);
}

// dQ = dS K of query tile q_tile, added to its float sums, DQ_SLICE tiles of columns at a time.
template <bool MASKED>
__device__ __forceinline__ void add_dq(
    BackwardSemaphore& dq_semaphore, const BackwardArguments& arrays, const ScoreTile& score_tile,
    const BackwardOrder& order, TileCoord coord, int head, int q_tile, int num_q_tiles,
    u32 ds_smem, u32 k_smem, bool k_nonfinite) {
    const i64 index = query_tile_index(arrays, coord.batch, head, num_q_tiles, q_tile);
    int* semaphore = arrays.dq_semaphores + index;
    float* sum = dq_sum_tile(arrays.dq_sum, index) + dq_sum_first(threadIdx.x);
    #pragma unroll
    for (int first = 0; first < QueryGrid::N_TILES; first += DQ_SLICE) {
        float dq[QueryGrid::M_TILES][DQ_SLICE][4];
        set_zero(dq);
        gradient_gemm<true, BLOCK_K, MASKED, DS_COLUMN>(
            dq, ds_smem, k_smem, QueryGrid::first_row(), QueryGrid::first_column() + first * 8,
            k_nonfinite);
        if (first == 0)
            dq_semaphore.wait(semaphore, dq_place(score_tile, order, q_tile, num_q_tiles));
        #pragma unroll
        for (int m = 0; m < QueryGrid::M_TILES; ++m)
            #pragma unroll
            for (int n = 0; n < DQ_SLICE; ++n)
                reduce_add_4(sum + dq_sum_step(m, first + n), dq[m][n]);
    }
}

// Scales a gradient, rounds it and stores it through a tile of shared memory. Whole block.
template <class Grid, int COLUMNS, int M_TILES, int N_TILES>
__device__ __forceinline__ void store_gradient(
    float (&gradient)[M_TILES][N_TILES][4], float scale, u32 smem, void* target, Strides stride,
    TileCoord coord, int num_rows, int num_columns) {
    #pragma unroll
    for (int m = 0; m < M_TILES; ++m)
        #pragma unroll
        for (int n = 0; n < N_TILES; ++n)
            #pragma unroll
            for (int x = 0; x < 4; ++x) gradient[m][n][x] *= scale;
    Packed<M_TILES, N_TILES> packed;
    pack_fragments<Element>(packed, gradient);
    store_fragments<BLOCK_K>(smem, packed, Grid::first_row(), Grid::first_column());
    __syncthreads();
    const i64 first_row = static_cast<i64>(coord.tile) * BLOCK_K;
    u16* rows = static_cast<u16*>(target)
              + coord.batch * stride.batch + coord.head * stride.head + first_row * stride.token;
    store_tile<BLOCK_K, COLUMNS, THREADS, BLOCK_K>(
        smem, 0, rows, stride.token, num_rows, num_columns, rows_aligned(target, stride),
        threadIdx.x);
}

// x += weight * value if the value is NaN or infinite.
__device__ __forceinline__ void add_if_nonfinite(Element& x, float weight, float value) {
    if (is_nonfinite(value))
        x = low_half<Element>(pack<Element>(to_float(x) + weight * value, 0.0f));
}

// Adds what gradient_gemm() left out: the terms of dV, dK and dQ with a NaN or an infinity of dO, Q
// or K, for the visible pairs of partly masked tiles. One warp takes a key and its queries one
// after another, so no two warps write the same row of dV or dK. Slow, rare.
__device__ __forceinline__ void add_nonfinite_terms(
    const Arguments& args, TileCoord coord, ScoreTile score_tile, QueryTiles tiles) {
    const BackwardArguments& arrays = arrays_of(args);
    const auto& mask = score_tile.mask;
    const Shape& shape = arrays.shape;
    const int lane = threadIdx.x % 32, group_size = shape.num_heads_q / shape.num_heads_kv;
    const int num_q_tiles = num_query_tiles(args, BLOCK_Q);
    const float scale = static_cast<float>(arrays.scale);
    const HeadRows k(arrays.k, arrays.k_stride, coord.batch, coord.head);
    const HeadRows v(arrays.v, arrays.v_stride, coord.batch, coord.head);
    const Strides dks = arrays.dk_stride, dvs = arrays.dv_stride;
    __syncthreads();                                        // the block has stored dK and dV
    for (int j = threadIdx.x / 32; j < BLOCK_K; j += NUM_WARPS) {
        const int key = coord.tile * BLOCK_K + j;
        if (key >= shape.seqlen_k) return;
        Element* dk = static_cast<Element*>(arrays.dk)
                    + coord.batch * dks.batch + coord.head * dks.head + key * dks.token;
        Element* dv = static_cast<Element*>(arrays.dv)
                    + coord.batch * dvs.batch + coord.head * dvs.head + key * dvs.token;
        for (int head = coord.head * group_size; head < (coord.head + 1) * group_size; ++head) {
            const HeadRows q(arrays.q, arrays.q_stride, coord.batch, head);
            const HeadRows dout(arrays.dout, arrays.dout_stride, coord.batch, head);
            const i64 pair = static_cast<i64>(coord.batch) * shape.num_heads_q + head;
            score_tile.set_head(args, coord.batch, head);
            for (int query = mask.first_query(key); query < mask.end_query(key); ++query) {
                if (score_tile.full(tiles, query / BLOCK_Q)) continue;
                if (PAIRWISE && !score_tile.pair_mask.visible(query, key)) continue;
                const float lse =
                    static_cast<const float*>(arrays.lse)[pair * rows_of_head(args) + query];
                const float delta =
                    static_cast<const float*>(arrays.delta)[pair * rows_of_head(args) + query];
                const float s = row_product(q, query, k, key, shape.head_dim);
                Derivatives<float> derivatives;
                const float distance =
                    static_cast<float>(query + (shape.seqlen_k - shape.seqlen_q) - key);
                const float p = LINEAR
                    ? weight(s, scale, effective_lse(lse))
                    : weight_beside(
                          score_tile.rests.of(query, lse),
                          score_tile.score_mod.score(
                              s, distance, query, key, derivatives),
                          effective_lse(lse));
                const float z = score_tile.dropout.z(query, key);
                const float dp = row_product(dout, query, v, key, shape.head_dim_v);
                const float ds = p * ((DROPOUT ? z * dp : dp) - delta)
                               * derivatives.by_product;
                for (int d = lane; d < shape.head_dim_v; d += 32)
                    add_if_nonfinite(dv[d], DROPOUT ? z * p : p, dout.at(query, d));
                for (int d = lane; d < shape.head_dim; d += 32) {
                    add_if_nonfinite(dk[d], ds * scale, q.at(query, d));
                    const float value = k.at(key, d);
                    float* sum =
                        dq_sum_tile(arrays.dq_sum, pair * num_q_tiles + query / BLOCK_Q);
                    if (is_nonfinite(value))
                        atomicAdd(sum + dq_sum_offset(query % BLOCK_Q, d), ds * value);
                }
            }
        }
    }
}
