// A BLOCK_Q x BLOCK_K tile of scores, as backward kernels visit them: which (query, key) pairs are
// visible, and how the options of a call (docs/guide/options.md) make scores and gradients of them.
//
// infinity(): score_mod.cuh.
#pragma once
#include "score/dbias.cuh"
#include "score/dropout.cuh"
#include "score/lane_grid.cuh"
#include "score/lse_rest.cuh"
#include "common/mask.cuh"
#include "score/pair_mask.cuh"
#include "score/score_mod.cuh"

// Whether the gradients of scores are summed for more than dQ, dK and dV.
constexpr bool SUMS_SCORES = DBIAS || DMOD;

struct ScoreTile {
    using Real = Accumulator<Element>;
    Mask<CAUSAL, WINDOW> mask;
    int q_start, k_start;
    ScoreMod<Real> score_mod;
    PairMask pair_mask;
    Dropout<Real> dropout;
    BiasGradient dbias;
    LseRests<Real> rests;

    // Of a key tile. The caller then sets each head and q_start.
    __device__ __forceinline__ ScoreTile(const Arguments& args, int batch, int k_tile)
        : mask{arrays_of(args).shape.seqlen_q, arrays_of(args).shape.seqlen_k,
               window_of<WINDOW>(args)},
          q_start(0), k_start(k_tile * BLOCK_K), score_mod(args), pair_mask(args, batch),
          dropout(args) {}

    __device__ __forceinline__ void set_head(const Arguments& args, int batch, int head) {
        score_mod.set_head(args, batch, head);
        pair_mask.set_head(head);
        dropout.set_head(batch, head);
        dbias.set_head(args, batch, head);
        rests.set_head(args, batch, head);
    }

    // Before the first head is set: which tiles the heads of a group visit.
    __device__ __forceinline__ void set_group(int first_head) {
        if constexpr (MASK_MOD) pair_mask.set_head(first_head);
    }

    // Adds ds, the gradient of a pair's score, to the sums of dbias. It is 0 of a masked pair.
    __device__ __forceinline__ void add_dbias(
        const Derivatives<Real>& derivatives, Real ds, int query, int key) const {
        if constexpr (DBIAS) dbias.add(query, key, SCORE_MOD ? ds * derivatives.by_bias : ds);
    }

    // Row i is a query of the tile, column j a key. No row past seqlen_q is visible.
    __device__ __forceinline__ bool visible(int i, int j) const {
        const bool in_mask =
            q_start + i < mask.seqlen_q && mask.visible(q_start + i, k_start + j);
        if constexpr (PAIRWISE) return in_mask && pair_mask.visible(q_start + i, k_start + j);
        else return in_mask;
    }
    // Whether every pair of the key tile and query tile q_tile is visible.
    __device__ __forceinline__ bool full(QueryTiles tiles, int q_tile) const {
        return tiles.full(q_tile) && pair_mask.sees_all(q_tile, k_start / BLOCK_K);
    }

    // The rank of key tile k_tile among those that add to dQ of query tile q_tile, which its
    // semaphore counts from the first one that visits it. Whole warp.
    __device__ __forceinline__ int dq_rank(int q_tile, int k_tile) const {
        if constexpr (DETERMINISTIC && (WINDOW || SKIPS_TILES))
            return pair_mask.key_tiles_before(
                q_tile, k_tile, mask.first_key(q_tile * BLOCK_Q) / BLOCK_K);
        else
            return k_tile;
    }

    // Of row i, whose lse is `lse`.
    __device__ __forceinline__ Real rest(int i, Real lse) const {
        return rests.of(q_start + i, lse);
    }

    // By how many tokens key j precedes query i.
    __device__ __forceinline__ Real distance(int i, int j) const {
        return static_cast<Real>(q_start + i + (mask.seqlen_k - mask.seqlen_q) - (k_start + j));
    }
};
