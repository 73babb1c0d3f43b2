// backward_option_scores.cuh, and the two headers that it includes, for kernels of calls without
// options.
#pragma once
#include "sm90/backward_scores.cuh"

struct LanePairs {
    int batch, head, query, key, distance;
    bool any_masked() const { return false; }
};

inline void load_biases(LanePairs&, const Arguments&) {}
inline void compute_bits(
    LanePairs&, const Arguments&, const Dropout<float>&, const PairMask&,
    const Mask<CAUSAL, WINDOW>&, const QueryRows&, bool, bool) {}
inline void zero_masked(float (&)[S_REGS], const LanePairs&) {}
inline void add_dbias(
    float (&)[S_REGS], const float (&)[S_REGS], const Arguments&, const LanePairs&) {}

template <class Zero>
__device__ __forceinline__ void compute_p(
    float (&s)[S_REGS], float (&)[S_REGS], u32 (&p)[S_REGS / 2], const QueryRows& rows,
    int first_column, float scale_log2, const Arguments&, LanePairs&, const Dropout<float>&,
    Zero zero_invisible, bool) {
    exponentiate(s, rows, first_column, scale_log2);
    zero_invisible(s);
    pack_pairs<Element>(p, s);
}

__device__ __forceinline__ void compute_ds(
    float (&dp)[S_REGS], const float (&p)[S_REGS], const u32 (&rounded_p)[S_REGS / 2],
    const QueryRows& rows, int first_column, LanePairs&, const Dropout<float>&) {
    compute_ds(dp, p, rounded_p, rows, first_column);
}
