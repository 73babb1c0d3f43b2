// backward_option_scores.cuh, and the two headers that it includes, for kernels of calls without
// options.
#pragma once
#include "sm90/backward_scores.cuh"

struct LanePairs { int batch, head, query, key, distance, seqlen_q, seqlen_k; };

inline void load_biases(LanePairs&, const Arguments&) {}
inline u32 read_tile(const LanePairs&, const Arguments&) { return 0; }
inline void compute_bits(
    LanePairs&, const Arguments&, const Dropout<float>&, const PairMask&,
    const Mask<CAUSAL, WINDOW>&, const QueryRows&, bool, bool) {}

template <bool> struct ZeroMasked {
    const Mask<CAUSAL, WINDOW>& mask;
    const MaskBounds& bounds;
    const LanePairs& pairs;
    const int &q_start, &first_column;
    const bool &is_cut, &has_boundary;

    __device__ __forceinline__ void operator()(float (&x)[S_REGS]) const {
        if (is_cut) zero_masked(x, mask, bounds, q_start + first_column);
    }
};

template <class Rows, class Zero>
__device__ __forceinline__ void compute_p(
    float (&s)[S_REGS], float (&)[S_REGS], u32 (&p)[S_REGS / 2], const Rows& rows,
    float scale_log2, const Arguments&, LanePairs&, const Dropout<float>&, Zero zero_masked,
    bool) {
    exponentiate(s, rows, scale_log2);
    zero_masked(s);
    pack_pairs<Element>(p, s);
}

template <class Rows, class Zero>
__device__ __forceinline__ void compute_ds(
    u32 (&ds)[S_REGS / 2], float (&dp)[S_REGS], const float (&)[S_REGS], const float (&p)[S_REGS],
    const u32 (&rounded_p)[S_REGS / 2], const Rows& rows, const Arguments&, LanePairs&,
    const Dropout<float>&, Zero zero_masked) {
    const u32 lane_delta = rows.delta.address();
    #pragma unroll
    for (int j = 0; j < S_REGS / 4; ++j) {
        float delta[2];
        rows.delta.read(lane_delta, j, delta);
        #pragma unroll
        for (int i = j * 4; i < j * 4 + 4; ++i)
            dp[i] = p_element(p, rounded_p, i) * (dp[i] - delta[i % 2]);
    }
    if (MASK_DS) zero_masked(dp);
    pack_pairs<Element>(ds, dp);
}
