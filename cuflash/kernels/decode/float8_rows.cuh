// The steps of a key tile whose keys and values are float8 numbers (rows.cuh has the others).
//
// ldmatrix loads pairs of bytes where it would load elements of 16 bits, so each word of a fragment
// has two elements more: its even bytes are one operand register, its odd bytes another. That puts
// columns in another order: `arrange_queries` gives Q the same, and output_column says which column
// of O a lane has.
#pragma once
#include "decode/float8.cuh"
#include "decode/rows.cuh"

// Puts the columns of Q in the order of K's operands: of 16 columns, a lane's word has 4t to
// 4t + 3, t = lane % 4; the even ones are the operand's rows 2t and 2t + 1, the odd ones its rows
// 2t + 8 and 2t + 9. Called by the block, between barriers.
__device__ __forceinline__ void arrange_queries(u32 q_smem) {
    constexpr int GROUPS = HEAD_DIM / 16;
    for (int i = threadIdx.x; i < BLOCK_Q * GROUPS; i += THREADS) {
        const int row = i / GROUPS, column = i % GROUPS * 16;
        const u32 chunks[2] = {q_smem + tile_offset<BLOCK_Q>(row, column),
                               q_smem + tile_offset<BLOCK_Q>(row, column + CHUNK_ELEMENTS)};
        const uint4 first = load_shared_16(chunks[0]), last = load_shared_16(chunks[1]);
        const u32 pairs[8] = {first.x, first.y, first.z, first.w, last.x, last.y, last.z, last.w};
        float even[4], odd[4];
        #pragma unroll
        for (int t = 0; t < 4; ++t) {
            const u32 a = pairs[t * 2], b = pairs[t * 2 + 1];
            even[t] = __uint_as_float((a & 0xFFFFu) | b << 16);
            odd[t] = __uint_as_float(a >> 16 | (b & 0xFFFF0000u));
        }
        store_shared_16(chunks[0], even[0], even[1], even[2], even[3]);
        store_shared_16(chunks[1], odd[0], odd[1], odd[2], odd[3]);
    }
}

// S = NaN for each key with a NaN: `carries[j]` are those of the lane's bytes of key
// 8 j + lane / 4 (nan_carries).
__device__ __forceinline__ void set_scores_nan(Scores& s, const u32 (&carries)[S_TILES]) {
    #pragma unroll
    for (int j = 0; j < S_TILES; ++j) {
        const u32 lanes = __ballot_sync(WHOLE_WARP, (carries[j] & BYTE_SIGNS) != 0);
        if (lanes == 0) continue;                           // rare otherwise
        #pragma unroll
        for (int i = 0; i < M_TILES; ++i)
            #pragma unroll
            for (int x = 0; x < 4; ++x)
                if (lanes >> (threadIdx.x % 4 * 2 + x % 2) * 4 & 0xF) s[i][j][x] = quiet_nan();
    }
}

// S = Q K^T, or its negative; Q by arrange_queries.
__device__ __forceinline__ void score_gemm_float8(Scores& s, u32 q_smem, u32 k_smem) {
    set_zero(s);
    const OperandA<BLOCK_Q, Stored::AS_NAMED, M_TILES> queries(q_smem, 0);
    const OperandB<WARP_KEYS, Stored::TRANSPOSED, 1> keys(k_smem, 0);
    u32 carries[S_TILES] = {};
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
                const u32 word = words[j * 2 + half];
                const u32 even = even_elements<Element>(word), odd = odd_elements<Element>(word);
                carries[j] |= nan_carries(word);
                #pragma unroll
                for (int i = 0; i < M_TILES; ++i) mma_16x8x16(s[i][j], a[i], even, odd, Element{});
            }
        }
    }
    negate_if_needed(s);
    set_scores_nan(s, carries);
}

// O = NaN where a row sees a key whose value is NaN. `seen`: bit (i S_TILES + j) 4 + x for the
// lane's visible[i][j][x]. Slow, rare.
__device__ __forceinline__ void set_output_nan(Output& acc, u32 seen, u32 v_smem) {
    const int lane = threadIdx.x % 32;
    #pragma unroll 1
    for (int key = 0; key < WARP_KEYS; ++key) {
        const u32 by_row = __shfl_sync(WHOLE_WARP, seen, lane / 4 * 4 + key % 8 / 2)
                           >> (key / 8 * 4 + key % 2);
        #pragma unroll
        for (int j = 0; j < O_TILES; ++j) {
            const u32 carries = nan_carries(__float_as_uint(load_shared_float(
                v_smem + tile_offset<WARP_KEYS>(key, output_column(j / 2 * 2, 0) / 2))));
            #pragma unroll
            for (int i = 0; i < M_TILES; ++i)
                #pragma unroll
                for (int x = 0; x < 4; ++x)
                    if ((by_row >> (i * S_TILES * 4 + x / 2 * 2) & 1) != 0
                        && (carries >> (x % 2 * 16 + j % 2 * 8 + 7) & 1) != 0)
                        acc[i][j][x] = quiet_nan();
        }
    }
}

// acc += P V.
__device__ __forceinline__ void accumulate_float8(
    Output& acc, const Scores& p, const Visible& visible, bool is_masked, u32 v_smem) {
    const RegisterA<Element, M_TILES, S_TILES> weights(p);
    const OperandB<WARP_KEYS, Stored::AS_NAMED, O_TILES / 4> values(v_smem, 0);
    u32 carries = 0;
    #pragma unroll
    for (int block = 0; block < O_TILES / 4; ++block) {     // of 16 pairs of columns
        u32 words[4];                                       // 8 keys x 16 columns each
        values.load(words, 0, block);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32 first = words[half * 2], last = words[half * 2 + 1];
            carries |= nan_carries(first) | nan_carries(last);
            const u32 even[2] = {even_elements<Element>(first), even_elements<Element>(last)};
            const u32 odd[2] = {odd_elements<Element>(first), odd_elements<Element>(last)};
            #pragma unroll
            for (int i = 0; i < M_TILES; ++i) {
                float(*const columns)[4] = acc[i] + block * 4 + half * 2;
                mma_16x8x16(columns[0], weights.fragment[i][0], even[0], even[1], Element{});
                mma_16x8x16(columns[1], weights.fragment[i][0], odd[0], odd[1], Element{});
            }
        }
    }
    if (__ballot_sync(WHOLE_WARP, (carries & BYTE_SIGNS) != 0) == 0) return;
    u32 seen = 0;
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i)
        #pragma unroll
        for (int j = 0; j < S_TILES; ++j)
            #pragma unroll
            for (int x = 0; x < 4; ++x)
                if (!is_masked || visible[i][j][x]) seen |= 1u << ((i * S_TILES + j) * 4 + x);
    set_output_nan(acc, seen, v_smem);
}
