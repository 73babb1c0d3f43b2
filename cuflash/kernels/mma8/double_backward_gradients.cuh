// Gradients of mma8's double backward kernels: matmuls of weights and of rows with a cotangent, all
// in shared memory.
#pragma once
#include "mma8/backward_gradients.cuh"
#include "mma8/double_backward_scores.cuh"

// Which tiles contain a NaN or an infinity, the same in all threads that add gradients. Asked of K
// and ddK, and of query tiles that are partly masked.
struct Nonfinite { bool k = false, k_dot = false, q = false, q_dot = false, dout = false; };

// d2Q = T_X K + (g dS) ddK of a query tile. `keys` holds K and ddK.
template <bool MASKED, class Keys>
__device__ __forceinline__ void compute_d2q(
    QueryGrid::Sums& d2q, const SharedWeights& tx, const SharedWeights& ds, const Keys& keys,
    const ScoreTile& score_tile, const Nonfinite& nonfinite) {
    set_zero<QueryGrid::M_TILES, QueryGrid::N_TILES>(d2q);
    gradient_gemm<QueryGrid, false, MASKED>(d2q, tx, keys.k, score_tile, nonfinite.k);
    if constexpr (K_DOT) gradient_gemm<QueryGrid, false, MASKED>(
        d2q, ds, keys.k_dot, score_tile, nonfinite.k_dot);
}

// d2K += T_X^T Q + (g dS)^T ddQ. `queries` holds Q and ddQ.
template <bool MASKED, class Queries>
__device__ __forceinline__ void add_to_d2k(
    KeyGrid::Sums& d2k, const SharedWeights& tx, const SharedWeights& ds, const Queries& queries,
    const ScoreTile& score_tile, const Nonfinite& nonfinite) {
    gradient_gemm<KeyGrid, true, MASKED>(d2k, tx, queries.q, score_tile, nonfinite.q);
    if constexpr (Q_DOT) gradient_gemm<KeyGrid, true, MASKED>(
        d2k, ds, queries.q_dot, score_tile, nonfinite.q_dot);
}
