// What the rounding of a row's lse takes from it. Where a bias, slopes or score_mod add a large
// number to all scores of a row, lse = m + log l has lost digits of log l, and exp(S - lse) is off
// by one factor in all pairs of the row. So prepare/lse_rests.cu finds the rest
//
//     rest = (m - lse) + log l,   P = exp((S - lse) - rest)
//
// where S and m are rounded as lse is, and their differences from lse are exact. Without these the
// scores are as large as lse is: their own roundings are no smaller
// (docs/guide/accuracy.md).
#pragma once
#include "common/packed_sequences.cuh"

constexpr bool HAS_LSE_RESTS = ALIBI || BIAS || SCORE_MOD;

// Up to this |lse| rests are left out. The rounding of lse changes P by |lse| u at most, u = 2^-24
// (2^-53) being the unit roundoff of lse: by no more than rounding P to Element does, 2^-12 of it
// (bfloat16: 2^-9); in float32 and float64 by what a sum of 4,096 weights may lose (the nu of
// accuracy.md).
template <class> constexpr float MOST_ROUNDED_LSE = 0x1p12f;
template <> constexpr float MOST_ROUNDED_LSE<bfloat16> = 0x1p15f;

template <class Real> inline bool has_rest(Real lse) {
    return fabs(lse) > Real(MOST_ROUNDED_LSE<Element>) && lse - lse == 0;   // not inf, not NaN
}

// The rests of a head's rows. Those without one are not in memory.
template <class Real> struct LseRests {
    const Real* first = nullptr;

    template <class Arguments> void set_head(const Arguments& args, int batch, int head) {
        if constexpr (HAS_LSE_RESTS)
            first = static_cast<const Real*>(args.lse_rests)
                  + (i64(batch) * arrays_of(args).shape.num_heads_q + head) * rows_of_head(args);
    }
    // Of a query with that lse.
    Real of(int query, Real lse) const {
        if constexpr (HAS_LSE_RESTS)
            if (has_rest(lse)) return first[query];
        return 0;
    }
};
