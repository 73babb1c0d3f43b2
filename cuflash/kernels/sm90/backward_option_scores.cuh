// P and dS of a tile with options (docs/guide/options.md):
//
//     P = exp(score - lse),  dS = P (dP Z - delta) * d score / d (scale S)
//
// where score is scale S after the modifications, Z is dropout's factor (dV takes P Z), and P = 0
// at masked pairs.
//
// Constants: those of backward_constants.cuh, BLOCK_K.
#pragma once
#include "sm90/backward_score_mod.cuh"

struct OptionScores {
    const Arguments& args;
    const KeyTileMask& mask;
    const Dropout<float>& dropout;
    float scale_log2;
    LanePairs pairs;
    const QueryRows* rows;                  // the query tile's
    int first_column, query;                // the lane's first query, in rows and in the sequence
    bool is_cut, has_segment_boundary;
    float derivatives[S_REGS];              // of the scores, if DBIAS

    __device__ __forceinline__ OptionScores(
        const Arguments& args, const KeyTileMask& mask, const Dropout<float>& dropout,
        float scale_log2, int batch, int first_key)
        : args(args), mask(mask), dropout(dropout), scale_log2(scale_log2) {
        pairs.batch = batch;
        pairs.key = first_key;
    }

    // The lane's pairs with a query tile, then their bits and biases: while tensor cores compute
    // S and dP of that tile.
    __device__ __forceinline__ void locate_pairs(const QueryRows& tile_rows, int lane_column) {
        pairs.head = tile_rows.head;
        pairs.query = tile_rows.q_start + lane_column;
        pairs.distance = pairs.query + mask.bounds.seqlen_k - mask.bounds.seqlen_q - pairs.key;
    }
    __device__ __forceinline__ void compute_bits(const QueryRows& tile_rows, bool has_boundary) {
        ::compute_bits(pairs, args, dropout, PairMask(args, pairs.batch), mask.bounds, tile_rows,
                       mask.cuts(tile_rows.q_start), has_boundary);
    }
    __device__ __forceinline__ void load_biases() { ::load_biases(pairs, args); }

    // The query tile of compute_p() and compute_ds().
    __device__ __forceinline__ void set_query_tile(
        const QueryRows& tile_rows, int lane_column, bool has_boundary) {
        rows = &tile_rows;
        first_column = lane_column;
        query = tile_rows.q_start + lane_column;
        is_cut = mask.cuts(tile_rows.q_start);
        has_segment_boundary = has_boundary;
    }

    // S^T becomes the factor of dP^T Z^T - delta in dS^T: P^T or, with SOFTCAP, P^T times the
    // derivative of the score; DBIAS needs the two apart. p is P^T Z^T rounded.
    __device__ __forceinline__ void compute_p(float (&s)[S_REGS], u32 (&p)[S_REGS / 2]) {
        bool fits_poly4 = false;
        if constexpr (SOFTCAP) {
            ScoreMod<float> score_mod(args);
            fits_poly4 = score_mod.fits_tanh_poly4(s);
            if constexpr (!(BIAS || HAS_MASK || DROPOUT))
                if (fits_poly4 && !(is_cut || has_segment_boundary) && !rows->has_large_lse) {
                    score_mod.set_head(args, pairs.batch, pairs.head);
                    return compute_p_poly4(s, p, *rows, first_column, score_mod, pairs.distance);
                }
        }
        if constexpr (SOFTCAP && !DBIAS) {
            float weights[S_REGS];
            apply_score_mod(weights, s, s, args, pairs, fits_poly4);
            exponentiate(weights, *rows, first_column, scale_log2);
            zero_masked(weights);
            pack_kept(p, weights);
            #pragma unroll
            for (int i = 0; i < S_REGS; ++i) s[i] *= weights[i];
        } else {
            if constexpr (!LINEAR) apply_score_mod(s, derivatives, s, args, pairs, fits_poly4);
            exponentiate(s, *rows, first_column, scale_log2);
            zero_masked(s);
            pack_kept(p, s);
        }
    }

    // dP^T becomes dS^T.
    __device__ __forceinline__ void compute_ds(
        float (&dp)[S_REGS], const float (&p)[S_REGS], const u32 (&rounded_p)[S_REGS / 2]) {
        // Opaque: Z is recomputed from the bits instead of being kept since compute_p().
        if constexpr (DROPOUT)
            #pragma unroll
            for (u32& bits : pairs.kept) bits = opaque(bits);
        const u32 lane_delta = shared_address(rows->delta) + first_column * 4;
        #pragma unroll
        for (int j = 0; j < S_REGS / 4; ++j) {
            float delta[2];
            load_shared_floats(lane_delta + j * 32, delta[0], delta[1]);
            #pragma unroll
            for (int i = j * 4; i < j * 4 + 4; ++i)
                dp[i] = p_element(p, rounded_p, i)
                      * (apply_dropout(dp[i], i, pairs, dropout) - delta[i % 2]);
        }
        if (MASK_DS) zero_masked(dp);
        add_dbias(dp, derivatives, args, pairs);
    }

private:
    __device__ __forceinline__ void pack_kept(
        u32 (&p)[S_REGS / 2], const float (&weights)[S_REGS]) {
        float kept[S_REGS];
        #pragma unroll
        for (int i = 0; i < S_REGS; ++i) kept[i] = apply_dropout(weights[i], i, pairs, dropout);
        pack_pairs<Element>(p, kept);
    }
    __device__ __forceinline__ void zero_masked(float (&x)[S_REGS]) const {
        if (!VISIBILITY_BITS && is_cut) mask.zero_masked(x, query);
        if (HAS_MASK || needs_bits()) ::zero_masked(x, pairs);
    }
    // Whether a bit may be 0. sm90/backward.cu tests a window's bits lane by lane. Segments' bits
    // may come late: testing them costs as much as applying them.
    __device__ __forceinline__ bool needs_bits() const {
        if (SEGMENTS || BLOCK_K == 64) return is_cut || has_segment_boundary;
        return pairs.any_masked();
    }
};

template <bool> struct ScoresOf { using type = PlainScores; };
template <> struct ScoresOf<true> { using type = OptionScores; };
using Scores = ScoresOf<OPTIONS>::type;
