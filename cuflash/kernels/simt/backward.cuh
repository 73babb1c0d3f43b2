// Shared by the two backward kernels on CUDA cores: P of a pair and its gradient.
//
//     S = Q K^T,  P = exp(scale S - lse),  dP = dO V^T,  D = rowsum(dO O),  dS = P (dP - D)
//
// (FlashAttention-2, arXiv:2307.08691, Alg. 2.) With options (docs/guide/options.md) scale S stands
// for the score of score_mod.cuh, and dS for the gradient by scale S. P comes from lse alone; S is
// computed in the order of simt/forward.cu. P of rows with a rest (lse_rest.cuh) is divided by its
// exponential. The mask alone says which pairs take part: one that is
// visible does so where P = 0 too, and 0 * inf and 0 * NaN are NaN.
#pragma once
#include "common/types.cuh"
#include "common/mask.cuh"
#include "simt/simt.cuh"
#include "simt/tiles.cuh"
#include "score/head_options.cuh"
#include "score/lse_rest.cuh"

constexpr int WIDEST = HEAD_DIM > HEAD_DIM_V ? HEAD_DIM : HEAD_DIM_V;

struct Query { Real lse, delta; };

// ds_score: the gradient of the score, before its own derivatives.
struct Weight {
    Real p, ds, ds_score;
    Derivatives<Real> derivatives;
};

inline bool is_masked(const HeadOptions<Real>& options, int query, int key) {
    return PAIRWISE && !options.pair_mask.visible(query, key);
}

// P and dS of query i and key j: s = products of q and k, dp = products of dO and v, shift =
// seqlen_k - seqlen_q. With dropout, p is what dV takes.
inline Weight weight_of(
    Real s, Real dp, const Query& query, const LseRests<Real>& rests,
    const HeadOptions<Real>& options, int i, int j, int shift) {
    Derivatives<Real> derivatives;
    const Real x = options.score_mod.score(s, Real(i + shift - j), i, j, derivatives);
    const Real p = exp(x - query.lse - rests.of(i, query.lse));
    const Real z = options.dropout.z(i, j);
    const Real dx = p * ((DROPOUT ? z * dp : dp) - query.delta);
    return {DROPOUT ? p * z : p, BENDS ? dx * derivatives.by_product : dx, dx, derivatives};
}

// One head's pieces of all arrays.
struct Head {
    const Element *dout, *q, *k, *v;
    const Real *lse, *delta;
    LseRests<Real> rests;

    template <class Arguments> Head(const Arguments& args, int batch, int head) {
        const BackwardArguments& a = arrays_of(args);
        const int kv_head = head / (a.shape.num_heads_q / a.shape.num_heads_kv);
        dout = head_start(a.dout, a.dout_stride, batch, head);
        q = head_start(a.q, a.q_stride, batch, head);
        k = head_start(a.k, a.k_stride, batch, kv_head);
        v = head_start(a.v, a.v_stride, batch, kv_head);
        const i64 row = (i64(batch) * a.shape.num_heads_q + head) * rows_of_head(args);
        lse = static_cast<const Real*>(a.lse) + row;
        delta = static_cast<const Real*>(a.delta) + row;
        rests.set_head(args, batch, head);
    }

    Query query(int i) const { return {effective_lse(lse[i]), delta[i]}; }
};

// A row of a gradient: scale times this thread's columns of the sum.
template <int N>
inline void store_row(
    Element* row, const Real (&sum)[N], Real scale, int thread_of_row, int step, int columns) {
    for (int n = 0; n < N; ++n) {
        const int column = thread_of_row + n * step;
        if (column < columns) row[column] = from_accumulator<Element>(sum[n] * scale);
    }
}
