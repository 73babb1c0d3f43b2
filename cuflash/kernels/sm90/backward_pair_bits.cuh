// What options say about each pair of a lane's fragment, as bits: which pairs are visible (WINDOW,
// SEGMENTS, HAS_MASK, MASK_MOD) and which of them dropout keeps. The bits are computed while the
// tensor cores compute S and dP, as they come from memory or take many instructions.
#pragma once
#include "sm90/backward_scores.cuh"

// Bit i of words of 32 belongs to x[i] of the lane's fragment (backward_scores.cuh).
struct LanePairs {
    static constexpr int WORDS = (S_REGS + 31) / 32;
    // With 128 queries there is room for the biases of 64 at a time, of floats for 32.
    static constexpr bool FLOATS = BIAS && sizeof(Bias) > 2;
    static constexpr int BIAS_PARTS = !BIAS || FLOAT_P ? 1 : FLOATS ? 8 : 2;
    int batch;                                              // with PACKED the sequence
    int head, query, key;                                   // the first query and key
    int distance;                                           // positions from that key to that query
    int seqlen_q, seqlen_k;
    u32 visible[VISIBILITY_BITS ? WORDS : 1];
    u32 kept[DROPOUT ? WORDS : 1];
    u32 biases[BIAS ? S_REGS / 2 / BIAS_PARTS : 1];         // two 16-bit biases each: load_biases()
    float floats[2][FLOATS ? S_REGS / BIAS_PARTS : 1];      // of two parts: load_biases()

    __device__ __forceinline__ bool any_masked() const {
        u32 all = ~0u;
        if constexpr (VISIBILITY_BITS)
            #pragma unroll
            for (u32 bits : visible) all &= bits;
        return all != ~0u;
    }
};

__device__ __forceinline__ bool has_bit(const u32* words, int i) {
    return (words[i / 32] >> i % 32 & 1) != 0;
}

// The lane's bits, from those of four keys at a time: bit n of four_bits(query, key) belongs to
// key + n, where key is a multiple of 4. Element x[4 j + 2 h + b] of the fragment
// (backward_scores.cuh) has query b and key half h. The four lanes whose keys are such a four have
// the same queries: for each j, each of them computes one of the four combinations of b and h, and
// they exchange the results. Called by a whole warp. UNROLL: how many calls are in flight.
template <int UNROLL, int WORDS, class F>
__device__ __forceinline__ void gather_bits(
    u32 (&bits)[WORDS], const LanePairs& pairs, F four_bits) {
    const int lane = threadIdx.x % 32, rank = lane / 4 % 4; // key % 4
    const int query = pairs.query + rank % 2, key = pairs.key - rank + rank / 2 * 8;
    #pragma unroll
    for (int word = 0; word < WORDS; ++word) {
        u32 computed = 0;
        #pragma unroll UNROLL
        for (int j = 0; j < 8; ++j)
            computed |= four_bits(query + (word * 8 + j) * 8, key) << j * 4;
        bits[word] = 0;
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 received = __shfl_sync(WHOLE_WARP, computed, (lane & ~12) + i * 4);
            bits[word] |= (received >> rank & 0x11111111u) << i;
        }
    }
}

// One key's bits in a word, which has the lane's 16 of 64 queries: set for queries before `end`.
__device__ __forceinline__ u32 bits_before(int end) {
    const int queries = min(max(end, 0), 64), bits = queries / 8 * 4 + min(queries % 8, 2);
    return static_cast<u32>((u64{1} << bits) - 1) & 0x33333333u;
}

__device__ __forceinline__ void clear_out_of_bounds(
    LanePairs& pairs, const Mask<CAUSAL, WINDOW>& bounds) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int open_first = bounds.open_first_query(pairs.key + half * 8);
        const int first = open_first - pairs.query;
        const int end = bounds.end_after(open_first) - pairs.query;
        #pragma unroll
        for (int word = 0; word < LanePairs::WORDS; ++word) {
            const u32 bits = bits_before(end - word * 64) & ~bits_before(first - word * 64);
            pairs.visible[word] &= bits << half * 2 | 0xCCCCCCCCu >> half * 2;
        }
    }
}

__device__ __forceinline__ void clear_other_segments(
    LanePairs& pairs, const QueryRows& rows, const PairMask& pair_mask, int num_keys) {
    if constexpr (SEGMENTS) {
        const int row = pairs.query - rows.q_start;
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int id = pair_mask.id_of_key(min(pairs.key + half * 8, num_keys - 1));
            #pragma unroll
            for (int i = 0; i < S_REGS / 2; ++i) {
                const int bit = i / 2 * 4 + half * 2 + i % 2;
                if (rows.id(row + i / 2 * 8 + i % 2) != id)
                    pairs.visible[bit / 32] &= ~(1u << bit % 32);
            }
        }
    }
}

// The pairs that the user's mask hides.
__device__ __forceinline__ void clear_hidden(LanePairs& pairs, const Arguments& args) {
    if constexpr (MASK_BITS) {
        u32 bits[LanePairs::WORDS];
        load_mask_bits(bits, args, pairs.batch, pairs.query / BLOCK_Q, pairs.key / BLOCK_K,
                       pairs.key % BLOCK_K);
        #pragma unroll
        for (int word = 0; word < LanePairs::WORDS; ++word) pairs.visible[word] &= bits[word];
    } else if constexpr (MASK_MOD) {
        MaskExpression user;
        user.set_head(args, pairs.batch, pairs.head, pairs.seqlen_q, pairs.seqlen_k);
        #pragma unroll
        for (int word = 0; word < LanePairs::WORDS; ++word) {
            u32 bits = 0;
            #pragma unroll
            for (int j = 0; j < 8; ++j)
                #pragma unroll
                for (int n = 0; n < 4; ++n) {
                    const int query = pairs.query + (word * 8 + j) * 8 + n % 2;
                    if (user.visible(query, pairs.key + n / 2 * 8)) bits |= 1u << (j * 4 + n);
                }
            pairs.visible[word] &= bits;
        }
    }
}

__device__ __forceinline__ void clear_masked(LanePairs& pairs, PairMask pair_mask) {
    pair_mask.set_head(pairs.head);
    u32 unmasked[LanePairs::WORDS];
    if (pair_mask.has_words(pairs.key - threadIdx.x % 32 / 4 + 16))
        gather_bits<8>(unmasked, pairs, [&](int query, int key) {
            return pair_mask.keeps_of_four<true>(query, key);
        });
    else
        gather_bits<1>(unmasked, pairs, [&](int query, int key) {
            return pair_mask.keeps_of_four<false>(query, key);
        });
    #pragma unroll
    for (int word = 0; word < LanePairs::WORDS; ++word) pairs.visible[word] &= unmasked[word];
}

// is_cut: the causal mask or window masks pairs of the tile; has_boundary: segments or the user's
// mask do.
__device__ __forceinline__ void compute_bits(
    LanePairs& pairs, const Arguments& args, const Dropout<float>& dropout,
    const PairMask& pair_mask, const Mask<CAUSAL, WINDOW>& bounds, const QueryRows& rows,
    bool is_cut, bool has_boundary) {
    if constexpr (VISIBILITY_BITS) {
        #pragma unroll
        for (u32& bits : pairs.visible) bits = ~0u;
        // The bits of a user's mask are of pairs within bounds.
        if (is_cut && !(MASK_BITS && has_boundary)) clear_out_of_bounds(pairs, bounds);
        if (SEGMENTS && has_boundary)
            clear_other_segments(pairs, rows, pair_mask, bounds.seqlen_k);
        if (MASK_MOD && has_boundary) clear_hidden(pairs, args);
    }
    if constexpr (HAS_MASK) clear_masked(pairs, pair_mask);
    if constexpr (DROPOUT) {
        Dropout<float> head_dropout = dropout;
        head_dropout.set_head(pairs.batch, pairs.head);
        gather_bits<2>(pairs.kept, pairs, [&](int query, int key) {
            return head_dropout.kept_of_four(query, key);
        });
    }
}

// Zeroes x at pairs that the bits say are masked, whatever x was there.
__device__ __forceinline__ void zero_masked(float (&x)[S_REGS], const LanePairs& pairs) {
    if constexpr (VISIBILITY_BITS)
        #pragma unroll
        for (int i = 0; i < S_REGS; ++i)
            if (!has_bit(pairs.visible, i)) x[i] = 0.0f;
}

// x Z, x being element i of P or dP.
__device__ __forceinline__ float apply_dropout(
    float x, int i, const LanePairs& pairs, const Dropout<float>& dropout) {
    if constexpr (DROPOUT) return x * (has_bit(pairs.kept, i) ? dropout.factor : 0.0f);
    else return x;
}
