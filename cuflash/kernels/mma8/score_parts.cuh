// Scores of wide heads, which SCORE_PARTS warps sum together: each over as many of head_dim's
// columns, one part after another. Then all of them have the sum. Forward and backward have the
// same parts, and so the same scores to the last bit.
#pragma once
#include "mma8/mma8.cuh"

// The parts of a tile of scores in shared memory, as C fragments: GROUPS of warps have M x N each.
template <int PARTS, int GROUPS, int M, int N> struct ScoreParts {
    alignas(16) Element parts[PARTS][GROUPS][M * N][32][4];

    // s becomes the sum of all parts, in the same order in each warp. Between the two a barrier,
    // and before the next store_part() another one.
    __device__ __forceinline__ void store_part(int part, int group, const Fragments<M, N>& s) {
        #pragma unroll
        for (int i = 0; i < M * N; ++i)
            #pragma unroll
            for (int x = 0; x < 4; x += 2)
                *reinterpret_cast<Pair*>(&parts[part][group][i][threadIdx.x % 32][x]) =
                    Pair{s[i / N][i % N][x], s[i / N][i % N][x + 1]};
    }
    __device__ __forceinline__ void add_parts(int group, Fragments<M, N>& s) const {
        #pragma unroll
        for (int i = 0; i < M * N; ++i)
            #pragma unroll
            for (int x = 0; x < 4; x += 2) {
                Pair sum = pair_at(&parts[0][group][i][threadIdx.x % 32][x]);
                #pragma unroll
                for (int part = 1; part < PARTS; ++part) {
                    const Pair other = pair_at(&parts[part][group][i][threadIdx.x % 32][x]);
                    sum.x += other.x;
                    sum.y += other.y;
                }
                s[i / N][i % N][x] = sum.x;
                s[i / N][i % N][x + 1] = sum.y;
            }
    }
};

// A warp has whole sums.
template <int GROUPS, int M, int N> struct ScoreParts<1, GROUPS, M, N> {
    __device__ __forceinline__ void store_part(int, int, const Fragments<M, N>&) {}
    __device__ __forceinline__ void add_parts(int, Fragments<M, N>&) const {}
};
