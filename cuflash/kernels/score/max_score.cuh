// The largest score of each row, a result of forward calls that ask for it (MAX_SCORE): max_j x_ij
// over the visible keys, -inf without one. A sink is no key.
#pragma once
#include "common/constants.cuh"
#include "common/softmax.cuh"

// m: the row's largest score that is not NaN. l: its sum of exp(x - m), which is NaN if a score is,
// or if m overflows: then, as lse is inf (lse_of_row), the largest score is m, whatever else there
// is.
template <class Real> inline Real max_score_of_row(Real m, Real l) {
    const bool overflows = m * Real(1.4426950408889634) == Real(infinity());
    return l != l && !overflows ? Real(quiet_nan()) : m;
}

// A row's m in natural units: of S, or of scores if scale is 1. Without a key -inf, also times 0.
template <class Real> inline Real natural_max(Real m, Real scale) {
    return m == -Real(infinity()) ? m : m * scale;
}

// The result, of all rows as lse; null without MAX_SCORE.
template <class Real, class Arguments> inline Real* max_scores(const Arguments& args) {
    if constexpr (MAX_SCORE) return static_cast<Real*>(args.max_score);
    else return nullptr;
}

// row: a query's index in lse. m and l are those of its keys alone.
template <class Real, class Arguments>
inline void store_max_score(const Arguments& args, i64 row, Real m, Real scale, Real l) {
    max_scores<Real>(args)[row] = max_score_of_row(natural_max(m, scale), l);
}
