// Tiles of pairs in which the user's score is affine in the key (ScoreExpression::AFFINE):
//
//     f(x) = x + g(query, key),   g(query, key) = g(query, k) + step (key - k)  for any key k
//
// g may have kinks, as abs(query - key) has one on the diagonal. Each kink is where a function, its
// edge, is 0. Edges are affine in the query and in the key: one that is positive in all corners of
// a tile is positive in the whole tile, and one that is negative, negative.
#pragma once
#include "score/expression.cuh"

// Whether the function, of one head, is affine in the key for queries [first_query, last_query] and
// keys [first_key, last_key]. Not if its step is so large that products with it may overflow.
template <class Real, class User>
__device__ __forceinline__ bool is_affine(
    const User& user, int first_query, int last_query, int first_key, int last_key) {
    if constexpr (User::AFFINE) {
        Real corners[4][User::EDGES];
        #pragma unroll
        for (int i = 0; i < 4; ++i)
            user.edges(corners[i], i % 2 ? last_query : first_query, i / 2 ? last_key : first_key);
        bool found = fabs(user.step(first_query, first_key)) < Real(0x1p100);
        #pragma unroll
        for (int i = 0; i < User::EDGES; ++i) {
            bool above = true, below = true;
            #pragma unroll
            for (int corner = 0; corner < 4; ++corner) {
                above &= corners[corner][i] > 0;
                below &= corners[corner][i] < 0;
            }
            found &= above || below;
        }
        return found;
    } else {
        return false;
    }
}
