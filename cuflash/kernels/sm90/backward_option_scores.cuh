// P and dS of a tile with options (docs/guide/options.md):
//
//     P = exp(score - lse),  dS = P (dP Z - delta) * d score / d (scale S)
//
// where score is scale S after the modifications, Z is dropout's factor (dV takes P Z), and P = 0
// at masked pairs. dbias and the user's arrays take P (dP Z - delta), times the derivative of the
// score by them.
#pragma once
#include "sm90/backward_score_mod.cuh"

// Zeroes a lane's fragment of a query tile at masked pairs. TEST_BITS: a lane first tests whether
// its bits mask any pair. Not where flags of tiles tell, as the bits may not have arrived yet: then
// the test costs as much as applying them.
template <bool TEST_BITS> struct ZeroMasked {
    const Mask<CAUSAL, WINDOW>& mask;
    const MaskBounds& bounds;
    const LanePairs& pairs;
    const int &q_start, &first_column;                      // whose sum is the lane's first query
    const bool &is_cut, &has_boundary;                      // by the mask; by segments, the user

    __device__ __forceinline__ void operator()(float (&x)[S_REGS]) const {
        if (!VISIBILITY_BITS && is_cut) zero_masked(x, mask, bounds, q_start + first_column);
        const bool has_masked =
            TEST_BITS && !SKIPS_TILES ? pairs.any_masked() : is_cut || has_boundary;
        if (HAS_MASK || has_masked) zero_masked(x, pairs);
    }
};

// S^T becomes the factor of dP^T Z^T - delta in dS^T: P^T or, where SCORES_BEND, P^T times the
// derivative of the score, which DBIAS keeps apart in `derivatives`. SCORES_TWICE: S^T stays.
// p is P^T Z^T rounded. zero_masked(x): x = 0 at masked pairs. has_masked: there may be some.
template <class Rows, class Zero>
__device__ __forceinline__ void compute_p(
    float (&s)[S_REGS], float (&derivatives)[S_REGS], u32 (&p)[S_REGS / 2], const Rows& rows,
    float scale_log2, const Arguments& args, LanePairs& pairs, const Dropout<float>& dropout,
    Zero zero_masked, bool has_masked) {
    bool fits_poly4 = false;
    if constexpr (SOFTCAP) {
        ScoreMod<float> score_mod(args);
        fits_poly4 = score_mod.fits_tanh_poly4(s);
        if constexpr (!(BIAS || HAS_MASK || DROPOUT || SCORE_MOD))
            if (fits_poly4 && !has_masked && !rows.has_large_lse()) {
                score_mod.set_head(args, pairs.batch, pairs.head);
                score_mod.set_sequence(args, pairs.batch, pairs.head);
                return compute_p_poly4(s, p, rows, score_mod, pairs.distance);
            }
    }
    if constexpr (SCORES_BEND && !SOFTCAP && !ALIBI && !BIAS && !DROPOUT && !SCORES_TWICE)
        if (!HAS_MASK && !has_masked && !rows.has_large_lse()) {
            ScoreMod<float> score_mod(args);
            score_mod.set_head(args, pairs.batch, pairs.head);
            score_mod.set_user(args, pairs.batch, pairs.head, pairs.seqlen_q, pairs.seqlen_k);
            return compute_p_of_user(s, p, rows, score_mod, pairs.query, pairs.key);
        }
    const auto pack_kept = [&](const float (&weights)[S_REGS]) {
        float kept[S_REGS];
        #pragma unroll
        for (int i = 0; i < S_REGS; ++i) kept[i] = apply_dropout(weights[i], i, pairs, dropout);
        pack_pairs<Element>(p, kept);
    };
    if constexpr (SCORES_TWICE) {
        float weights[S_REGS];
        scores_and_derivatives(weights, derivatives, s, args, pairs, fits_poly4);
        exponentiate(weights, rows, scale_log2);
        zero_masked(weights);
        pack_kept(weights);
    } else if constexpr (SCORES_BEND && !DBIAS) {
        float weights[S_REGS];
        scores_and_derivatives(weights, s, s, args, pairs, fits_poly4);
        exponentiate(weights, rows, scale_log2);
        zero_masked(weights);
        pack_kept(weights);
        #pragma unroll
        for (int i = 0; i < S_REGS; ++i) s[i] *= weights[i];
    } else {
        if constexpr (!LINEAR) scores_and_derivatives(s, derivatives, s, args, pairs, fits_poly4);
        exponentiate(s, rows, scale_log2);
        zero_masked(s);
        pack_kept(s);
    }
}

// dP^T becomes dS^T = P^T (dP^T Z^T - delta), without the derivative of the score if DBIAS.
template <class Rows>
__device__ __forceinline__ void multiply_by_p(
    float (&dp)[S_REGS], const float (&p)[S_REGS], const u32 (&rounded_p)[S_REGS / 2],
    const Rows& rows, LanePairs& pairs, const Dropout<float>& dropout) {
    const u32 lane_delta = rows.delta.address();
    // Opaque: Z is recomputed from the bits instead of being kept since compute_p().
    if constexpr (DROPOUT)
        #pragma unroll
        for (u32& bits : pairs.kept) bits = opaque(bits);
    #pragma unroll
    for (int j = 0; j < S_REGS / 4; ++j) {
        float delta[2];
        rows.delta.read(lane_delta, j, delta);
        #pragma unroll
        for (int i = j * 4; i < j * 4 + 4; ++i)
            dp[i] = p_element(p, rounded_p, i)
                  * (apply_dropout(dp[i], i, pairs, dropout) - delta[i % 2]);
    }
}

// SCORES_TWICE: dP^T becomes dS^T, from the products S^T. Adds the gradients of scores to the sums
// of dbias and of the user's arrays.
template <class Rows, class Zero>
__device__ __forceinline__ void compute_ds_of_products(
    float (&dp)[S_REGS], const float (&products)[S_REGS], const Rows& rows, const Arguments& args,
    LanePairs& pairs, const Dropout<float>& dropout, Zero zero_masked) {
    ScoreMod<float> score_mod(args);
    score_mod.set_head(args, pairs.batch, pairs.head);
    score_mod.set_sequence(args, pairs.batch, pairs.head);
    score_mod.set_user(args, pairs.batch, pairs.head, pairs.seqlen_q, pairs.seqlen_k);
    BiasGradient dbias;
    dbias.set_head(args, pairs.batch, pairs.head);
    const u32 lane_lse = rows.lse.address(), lane_delta = rows.delta.address();
    const bool has_large_lse = rows.has_large_lse();
    if constexpr (DROPOUT)
        #pragma unroll
        for (u32& bits : pairs.kept) bits = opaque(bits);
    const auto derivatives_of = [&](int i, Derivatives<float>& derivatives) {
        const int query = i / 4 * 8 + i % 2, key = i / 2 % 2 * 8;
        // Opaque: computed anew for each use, not kept for all pairs.
        const float product = __uint_as_float(opaque(__float_as_uint(products[i])));
        return score_mod.score(
            product, static_cast<float>(pairs.distance) + static_cast<float>(query - key),
            pairs.query + query, pairs.key + key, derivatives);
    };
    #pragma unroll
    for (int j = 0; j < S_REGS / 4; ++j) {
        float lse[2], delta[2], rest[2];
        rows.lse.read(lane_lse, j, lse);
        rows.delta.read(lane_delta, j, delta);
        rows.read_rests(j, rest);
        #pragma unroll
        for (int i = j * 4; i < j * 4 + 4; ++i) {
            Derivatives<float> derivatives;
            const float score = derivatives_of(i, derivatives);
            const float weight =
                has_large_lse ? weight_beside(rest[i % 2], score, lse[i % 2])
                              : exp2_approx(fmaf(score, LOG2_E, -lse[i % 2]));
            dp[i] = weight * (apply_dropout(dp[i], i, pairs, dropout) - delta[i % 2]);
        }
    }
    zero_masked(dp);
    const FragmentPairs grid{pairs.query, pairs.key};
    ScoreMod<float>::ArraySums<FragmentPairs> sums;
    #pragma unroll
    for (int i = 0; i < S_REGS; ++i) {
        const int query = pairs.query + i / 4 * 8 + i % 2, key = pairs.key + i / 2 % 2 * 8;
        Derivatives<float> derivatives;
        derivatives_of(i, derivatives);
        score_mod.add_gradients(sums, grid, query_of(i), key_of(i), derivatives, dp[i]);
        if (dp[i] == 0.0f) continue;
        if constexpr (DBIAS) dbias.add(query, key, dp[i] * derivatives.by_bias);
        dp[i] *= derivatives.by_product;
    }
    score_mod.finish_gradients(sums, grid);
}

// ds = dS^T rounded, from dP^T, which is overwritten, and what compute_p() left.
template <class Rows, class Zero>
__device__ __forceinline__ void compute_ds(
    u32 (&ds)[S_REGS / 2], float (&dp)[S_REGS], const float (&derivatives)[S_REGS],
    const float (&p)[S_REGS], const u32 (&rounded_p)[S_REGS / 2], const Rows& rows,
    const Arguments& args, LanePairs& pairs, const Dropout<float>& dropout, Zero zero_masked) {
    if constexpr (SCORES_TWICE) {
        compute_ds_of_products(dp, p, rows, args, pairs, dropout, zero_masked);
    } else {
        multiply_by_p(dp, p, rounded_p, rows, pairs, dropout);
        if (MASK_DS) zero_masked(dp);
        add_dmods(dp, args, pairs);
        add_dbias(dp, derivatives, args, pairs);
    }
    pack_pairs<Element>(ds, dp);
}
