// The steps of a key tile whose keys and values are float8 numbers (rows.cuh has the others).
//
// ldmatrix loads pairs of bytes where it would load elements of 16 bits, so each word of a fragment
// has four numbers, two registers of operands. That puts columns in another order:
// `arrange_queries` gives Q the same, and output_column says which column of O a lane has.
#pragma once
#include "decode/float8.cuh"
#include "decode/rows.cuh"

// Puts the columns of Q in the order of K's operands: of 16 columns, a lane's word has 4t to
// 4t + 3, t = lane % 4, which are the operand's rows 2t, 2t + 1, 2t + 8 and 2t + 9. Called by the
// block, between barriers.
__device__ __forceinline__ void arrange_queries(u32 q_smem) {
    constexpr int GROUPS = HEAD_DIM / 16;
    for (int i = threadIdx.x; i < BLOCK_Q * GROUPS; i += THREADS) {
        const int row = i / GROUPS, column = i % GROUPS * 16;
        const u32 chunks[2] = {q_smem + tile_offset<BLOCK_Q>(row, column),
                               q_smem + tile_offset<BLOCK_Q>(row, column + CHUNK_ELEMENTS)};
        const uint4 a = load_shared_16(chunks[0]), b = load_shared_16(chunks[1]);
        store_shared_16(chunks[0], __uint_as_float(a.x), __uint_as_float(a.z),
                        __uint_as_float(b.x), __uint_as_float(b.z));
        store_shared_16(chunks[1], __uint_as_float(a.y), __uint_as_float(a.w),
                        __uint_as_float(b.y), __uint_as_float(b.w));
    }
}

// S = Q K^T, or its negative; Q by arrange_queries.
__device__ __forceinline__ void score_gemm_float8(Scores& s, u32 q_smem, u32 k_smem) {
    set_zero(s);
    const OperandA<BLOCK_Q, Stored::AS_NAMED, M_TILES> queries(q_smem, 0);
    const OperandB<WARP_KEYS, Stored::TRANSPOSED, 1> keys(k_smem, 0);
    #pragma unroll
    for (int block = 0; block < HEAD_DIM / 32; ++block) {   // of 16 pairs of columns
        u32 words[4];                                       // 8 keys x 16 columns each
        keys.load(words, block, 0);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 a[M_TILES][4];
            #pragma unroll
            for (int i = 0; i < M_TILES; ++i) queries.load(a[i], i, block * 2 + half);
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j) {
                u32 pairs[2];
                float8_to_float16(pairs, words[j * 2 + half]);
                const u32 b[2] = {to_elements<Element>(pairs[0]), to_elements<Element>(pairs[1])};
                #pragma unroll
                for (int i = 0; i < M_TILES; ++i) mma_16x8x16(s[i][j], a[i], b[0], b[1], Element{});
            }
        }
    }
    negate_if_needed(s);
}

// acc += P V, each word of V mapped by `f` before.
template <class F>
__device__ __forceinline__ void accumulate_words(Output& acc, const Scores& p, u32 v_smem, F f) {
    const RegisterA<Weight, M_TILES, S_TILES> weights(p);
    const OperandB<WARP_KEYS, Stored::AS_NAMED, O_TILES / 4> values(v_smem, 0);
    #pragma unroll
    for (int block = 0; block < O_TILES / 4; ++block) {     // of 16 pairs of columns
        u32 words[4];                                       // 8 keys x 16 columns each
        values.load(words, 0, block);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 b[2][2];                                    // of even columns, of odd ones
            #pragma unroll
            for (int keys = 0; keys < 2; ++keys) {
                u32 pairs[2];                               // of columns; two keys each
                float8_to_float16(pairs, __byte_perm(f(words[half * 2 + keys]), 0, 0x3120));
                b[0][keys] = to_elements<Weight>(pairs[0]);
                b[1][keys] = to_elements<Weight>(pairs[1]);
            }
            #pragma unroll
            for (int i = 0; i < M_TILES; ++i)
                #pragma unroll
                for (int odd = 0; odd < 2; ++odd)
                    mma_16x8x16(acc[i][block * 4 + half * 2 + odd], weights.fragment[i][0],
                                b[odd][0], b[odd][1], Weight{});
        }
    }
}

// acc += P V.
__device__ __forceinline__ void accumulate_float8(Output& acc, const Scores& p, u32 v_smem) {
    accumulate_words(acc, p, v_smem, [](u32 word) { return word; });
}

// Whether the warp's tile of V holds a NaN.
__device__ __forceinline__ bool holds_nan(u32 v_smem) {
    u32 found = 0;
    for_each_float8_chunk<WARP_KEYS, HEAD_DIM_V>([&](int row, int column) {
        const uint4 x = load_shared_16(v_smem + tile_offset<WARP_KEYS>(row, column));
        found |= nan_signs(x.x) | nan_signs(x.y) | nan_signs(x.z) | nan_signs(x.w);
    });
    return __ballot_sync(WHOLE_WARP, found != 0) != 0;
}

// O = NaN where a row sees a key whose value is NaN. `seen`: bit (i S_TILES + j) 4 + x for the
// lane's visible[i][j][x].
__device__ __forceinline__ void set_output_nan(Output& acc, u32 seen, u32 v_smem) {
    const int lane = threadIdx.x % 32;
    #pragma unroll 1
    for (int key = 0; key < WARP_KEYS; ++key) {
        const u32 by_row = __shfl_sync(WHOLE_WARP, seen, lane / 4 * 4 + key % 8 / 2)
                           >> (key / 8 * 4 + key % 2);
        #pragma unroll
        for (int j = 0; j < O_TILES; ++j) {
            const u32 nan = nan_signs(__float_as_uint(load_shared_float(
                v_smem + tile_offset<WARP_KEYS>(key, output_column(j / 2 * 2, 0) / 2))));
            #pragma unroll
            for (int i = 0; i < M_TILES; ++i)
                #pragma unroll
                for (int x = 0; x < 4; ++x)
                    if ((by_row >> (i * S_TILES * 4 + x / 2 * 2) & 1) != 0
                        && (nan >> (x % 2 * 16 + j % 2 * 8 + 7) & 1) != 0)
                        acc[i][j][x] = quiet_nan();
        }
    }
}

// The same where V holds a NaN, which must not reach rows that do not see its key, as 0 * NaN: the
// product takes 0 in its place. Slow, rare.
__device__ __forceinline__ void accumulate_visible_float8(
    Output& acc, const Scores& p, const Visible& visible, u32 v_smem) {
    const auto without_nan = [](u32 word) { return word & ~(nan_signs(word) / 128 * 255); };
    accumulate_words(acc, p, v_smem, without_nan);
    u32 seen = 0;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int j = 0; j < S_TILES; ++j)
            #pragma unroll
            for (int x = 0; x < 4; ++x)
                if (visible[i][j][x]) seen |= 1u << ((i * S_TILES + j) * 4 + x);
    set_output_nan(acc, seen, v_smem);
}
