// What the kernels of weights, weight_sums and entropy know of a pair: whether the query sees the
// key, and
//
//     log P = (x - lse) - rest
//
// for the score x of score_mod.cuh and the rest of lse_rest.cuh. P is exp of it, by each family's
// own exponential(). lse comes from the call: it need not be the one of these keys.
#pragma once
#include "common/constants.cuh"
#include "common/elements.cuh"
#include "common/packed_sequences.cuh"
#include "common/softmax.cuh"
#include "score/score_tile.cuh"

// A query's lse as P takes it (softmax.cuh), and what rounding took from it.
template <class Real> struct QueryLse {
    Real lse, rest;
    QueryLse() = default;
    QueryLse(const ScoreTile& score_tile, int query, Real effective)
        : lse(effective), rest(score_tile.rests.of(query, effective)) {}
};

// `product`: q k of the pair.
template <class Real>
inline Real log_weight(
    const ScoreTile& score_tile, Real product, int query, int key, const QueryLse<Real>& row) {
    if constexpr (LINEAR) {
        return rounded(product, score_tile.score_mod.scale) - row.lse;
    } else {
        const int shift = score_tile.mask.seqlen_k - score_tile.mask.seqlen_q;
        const Real distance = static_cast<Real>(query + shift - key);
        return score_tile.score_mod.score(product, distance, query, key) - row.lse - row.rest;
    }
}
// The same, and the derivatives of x.
template <class Real>
inline Real log_weight(
    const ScoreTile& score_tile, Real product, int query, int key, const QueryLse<Real>& row,
    Derivatives<Real>& derivatives) {
    if constexpr (!BENDS) {
        return log_weight(score_tile, product, query, key, row);
    } else {
        const int shift = score_tile.mask.seqlen_k - score_tile.mask.seqlen_q;
        const Real x = score_tile.score_mod.score(
            product, static_cast<Real>(query + shift - key), query, key, derivatives);
        return x - row.lse - row.rest;
    }
}

// The same to base 2 in one instruction, for tensor cores' scores of 16-bit elements, in which the
// other three show: log2 P = S scale_log2 - lse log2(e). Three roundings are larger than in P above
// by |lse| u, u = 2^-24, which the rounding of lse costs too; so only where no |lse| of the tile is
// above MOST_FAST_LSE: 3 MOST_FAST_LSE u = 2^-14 of P, less than S loses by its elements' rounding.
constexpr bool HAS_FAST_WEIGHTS = LINEAR && sizeof(Element) == 2;
constexpr float MOST_FAST_LSE = 0x1p8f;

// Of an effective lse; inf makes P = 0 in either way.
inline bool needs_exact_weights(float effective) {
    return fabsf(effective) > MOST_FAST_LSE && effective != infinity();
}

// Numbers of neighbouring columns, aligned to all of them.
template <class Number, int COUNT> struct alignas(COUNT * sizeof(Number)) Together {
    Number at[COUNT];
};
template <int COUNT, class Number>
inline Together<Number, COUNT> load_together(const Number* numbers) {
    return *reinterpret_cast<const Together<Number, COUNT>*>(numbers);
}

// No query past seqlen_q sees a key.
inline bool sees(const ScoreTile& score_tile, int query, int key) {
    const bool in_mask =
        query < score_tile.mask.seqlen_q && score_tile.mask.visible(query, key);
    if constexpr (PAIRWISE) return in_mask && score_tile.pair_mask.visible(query, key);
    else return in_mask;
}

// Where a head's numbers of keys begin; those of its queries: index_of_query().
template <class Arguments>
inline i64 first_key_of(const Arguments& args, int batch, int head) {
    const Shape& shape = arrays_of(args).shape;
    return (i64(batch) * shape.num_heads_q + head) * keys_of_head(args);
}
