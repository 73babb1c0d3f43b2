// sm80/forward.cu's epilogue: O and lse to global memory, and what NaN and infinity in V add to O.
#pragma once
#include "sm80/forward_softmax.cuh"
#include "common/packed_sequences.cuh"
#include "score/max_score.cuh"
#include "score/sink.cuh"

// O = acc / l and lse = |scale| m + log(l); 0 and -inf for rows without a visible key. A sink takes
// part in l. Each warp stores its own rows. O goes through the tile of Q, whose rows no other warp
// reads.
__device__ __forceinline__ void store(
    const Arguments& args, TileCoord coord, u32 out_smem, Output& acc, SoftmaxState& softmax) {
    const ForwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const int lane = threadIdx.x % 32, own_row = warp_row();
    const int first_row = coord.tile * BLOCK_Q + own_row;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = first_row + i * 16 + half * 8 + lane / 4;
            float m = softmax.m[i][half], l = quad_sum(softmax.l[i][half]);
            float rescale = 1.0f;
            if (MAX_SCORE && lane % 4 == 0 && row < shape.seqlen_q)
                store_max_score(args, index_of_query(args, coord.batch, coord.head, row), m,
                                LINEAR ? fabsf(static_cast<float>(arrays.scale)) : 1.0f, l);
            if constexpr (SINK) {
                const float scale = LINEAR ? fabsf(static_cast<float>(arrays.scale)) : 1.0f;
                const WithSink<float> row_with_sink(
                    m == -infinity() ? m : m * scale, l, sink_of<float>(args, coord.head));
                m = row_with_sink.top;
                l = row_with_sink.sum;
                rescale = row_with_sink.rescale;
            }
            const float inverse = l == 0.0f ? 0.0f : rescale / l;
            #pragma unroll
            for (int j = 0; j < O_TILES; ++j) {
                acc[i][j][half * 2] *= inverse;
                acc[i][j][half * 2 + 1] *= inverse;
            }
            if (arrays.lse != nullptr && lane % 4 == 0 && row < shape.seqlen_q
                && warp_across() == 0) {
                const float scale =
                    LINEAR && !SINK ? fabsf(static_cast<float>(arrays.scale)) : 1.0f;
                const i64 head = static_cast<i64>(coord.batch) * shape.num_heads_q + coord.head;
                static_cast<float*>(arrays.lse)[head * rows_of_head(args) + row] =
                    lse_of_row(m * scale, l);
            }
        }
    Packed<M_TILES, O_TILES> out;
    pack_fragments<Element>(out, acc);
    store_fragments<BLOCK_Q>(out_smem, out, own_row, warp_column());
    if constexpr (WARPS_ACROSS > 1) __syncthreads();
    else __syncwarp();
    const Strides stride = arrays.out_stride;
    const int stored_row = WARPS_ACROSS > 1 ? coord.tile * BLOCK_Q : first_row;
    u16* rows = static_cast<u16*>(arrays.out)
              + coord.batch * stride.batch + coord.head * stride.head + stored_row * stride.token;
    constexpr bool BY_BLOCK = WARPS_ACROSS > 1;
    store_tile<BY_BLOCK ? BLOCK_Q : WARP_ROWS, HEAD_DIM_V, BY_BLOCK ? THREADS : 32, BLOCK_Q>(
        out_smem, BY_BLOCK ? 0 : own_row, rows, stride.token, shape.seqlen_q - stored_row,
        shape.head_dim_v, rows_aligned(arrays.out, stride), BY_BLOCK ? threadIdx.x : lane);
}

// The maxima of all rows, to shared memory. Whole block. lane_row: the lane's first row.
__device__ __forceinline__ void share_maxima(
    float* row_max, const SoftmaxState& softmax, int lane_row) {
    // A quad's lanes have the same m, and so have warps that share rows.
    if (threadIdx.x % 4 == 0 && warp_across() == 0)
        for (int i = 0; i < M_TILES; ++i)
            for (int half = 0; half < 2; ++half)
                row_max[lane_row + i * 16 + half * 8] = softmax.m[i][half];
    __syncthreads();
}

// Adds to O what accumulate() left out: the NaNs and infinities of V in partly masked tiles, for
// the queries that see their keys, times P. Only whether P is 0 matters: 0 * inf is NaN. row_max:
// the rows' maxima, in shared memory. Whole block; slow, rare.
__device__ __forceinline__ void add_nonfinite_terms(
    const Arguments& args, TileCoord coord, const QueryTile& query_tile, const float* row_max) {
    const ForwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const auto& mask = query_tile.mask;
    const float scale_log2 = query_tile.scale_log2;
    const Strides qs = arrays.q_stride, ks = arrays.k_stride;
    const Strides vs = arrays.v_stride, os = arrays.out_stride;
    const int q_start = coord.tile * BLOCK_Q;
    const int kv_head = coord.head / (shape.num_heads_q / shape.num_heads_kv);
    const Element* q = static_cast<const Element*>(arrays.q)
                     + coord.batch * qs.batch + coord.head * qs.head;
    const Element* k = static_cast<const Element*>(arrays.k)
                     + coord.batch * ks.batch + kv_head * ks.head;
    const Element* v = static_cast<const Element*>(arrays.v)
                     + coord.batch * vs.batch + kv_head * vs.head;
    Element* out = static_cast<Element*>(arrays.out)
                 + coord.batch * os.batch + coord.head * os.head;
    const KeyTiles tiles = mask.key_tiles(q_start, BLOCK_Q, BLOCK_K);
    const int first_partial_key = tiles.num_full * BLOCK_K;
    for (int i = threadIdx.x; i < BLOCK_Q * shape.head_dim_v; i += THREADS) {
        const int row = i / shape.head_dim_v, column = i % shape.head_dim_v;
        const int query = q_start + row;
        if (query >= shape.seqlen_q) return;
        Element& x = out[query * os.token + column];
        for (int key = WINDOW || PAIRWISE ? mask.first_key(query) : first_partial_key;
             key < mask.num_keys(query); ++key) {
            if ((WINDOW || PAIRWISE) && tiles.full(key / BLOCK_K)
                && query_tile.pair_mask.sees_all(coord.tile, key / BLOCK_K)) continue;
            if (PAIRWISE && !query_tile.pair_mask.visible(query, key)) continue;
            const float value = to_float(v[key * vs.token + column]);
            if (fabsf(value) < infinity()) continue;
            float score = 0.0f;
            for (int d = 0; d < shape.head_dim; ++d)
                score += to_float(q[query * qs.token + d]) * to_float(k[key * ks.token + d]);
            if (NEGATE_SCORES) score = -score;
            if (!LINEAR)
                score = query_tile.score_mod.score(
                    score, static_cast<float>(query + (shape.seqlen_k - shape.seqlen_q) - key),
                    query, key);
            float weight = row_max[row] == -infinity()
                ? 0.0f
                : exp2_of_product(score, scale_log2, finite_reference(row_max[row], scale_log2));
            if (DROPOUT) weight *= query_tile.dropout.z(query, key);
            x = low_half<Element>(pack<Element>(to_float(x) + weight * value, 0.0f));
        }
    }
}
