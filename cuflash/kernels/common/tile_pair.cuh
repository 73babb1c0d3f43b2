// The pairs of a tile of queries and a tile of keys, as backward kernels for float and double ask
// about them: which of them see each other, and what the options of a call (docs/guide/options.md)
// do to them.
//
// Constants: Element, CAUSAL, BLOCK_Q, BLOCK_K; Arguments and the options. infinity():
// score_mod.cuh.
#pragma once
#include "score/dbias.cuh"
#include "score/dropout.cuh"
#include "common/mask.cuh"
#include "score/pair_mask.cuh"
#include "score/score_mod.cuh"

struct TilePair {
    using Real = Accumulator<Element>;
    Mask<CAUSAL, WINDOW> mask;
    int q_start, k_start;
    ScoreMod<Real> steps;
    Pairs pairs;
    Dropout<Real> dropout;
    BiasGradient dbias;

    // Of a key tile; set_head() and q_start say the rest.
    __device__ __forceinline__ TilePair(const Arguments& args, int batch, int k_tile)
        : mask{arrays_of(args).shape.seqlen_q, arrays_of(args).shape.seqlen_k,
               window_of<WINDOW>(args)},
          q_start(0), k_start(k_tile * BLOCK_K), steps(args), pairs(args, batch), dropout(args) {}

    __device__ __forceinline__ void set_head(const Arguments& args, int batch, int head) {
        steps.set_head(args, batch, head);
        pairs.set_head(head);
        dropout.set_head(batch, head);
        dbias.set_head(args, batch, head);
    }

    // Query i and key j of the tiles; a query past the end is none.
    __device__ __forceinline__ bool visible(int i, int j) const {
        const bool bounds =
            q_start + i < mask.seqlen_q && mask.visible(q_start + i, k_start + j);
        if constexpr (PAIRWISE) return bounds && pairs.visible(q_start + i, k_start + j);
        else return bounds;
    }
    // Whether the key tile has no pair with a query tile that is hidden.
    __device__ __forceinline__ bool full(QueryTiles tiles, int q_tile) const {
        return tiles.full(q_tile) && pairs.sees_all(q_tile, k_start / BLOCK_K);
    }

    // How far key j stands before query i.
    __device__ __forceinline__ Real past(int i, int j) const {
        return static_cast<Real>(q_start + i + (mask.seqlen_k - mask.seqlen_q) - (k_start + j));
    }
};
