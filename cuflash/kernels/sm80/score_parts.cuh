// Scores that warps sum together. Of the WARPS_ACROSS warps that share rows each multiplies a part
// of head_dim's columns, for all keys; then all of them hold the sum. So a warp has P of its rows
// in registers, but only its columns of O.
#pragma once
#include "sm80/forward_softmax.cuh"

static_assert(SCORE_PARTS == 1 || SCORE_PARTS == WARPS_ACROSS, "each of the warps has a part");
static_assert(HEAD_DIM % (16 * SCORE_PARTS) == 0, "a part is whole blocks of 16 columns");

constexpr int PART_BLOCKS = HEAD_DIM / 16 / SCORE_PARTS;    // blocks of 16 columns of a part

// Operands A and B from their block `first` of the sum's indices on.
template <class Operand> struct PartOfA {
    Operand operand;
    int first;
    __device__ __forceinline__ void load(u32 (&a)[4], int m, int k) const {
        operand.load(a, m, first + k);
    }
};
template <class Operand> struct PartOfB {
    Operand operand;
    int first;
    __device__ __forceinline__ void load(u32 (&b)[4], int k, int n) const {
        operand.load(b, first + k, n);
    }
};

// What the warp reads of an operand.
template <class Operand> __device__ __forceinline__ auto part_of_a(const Operand& operand) {
    if constexpr (SCORE_PARTS == 1) return operand;
    else return PartOfA<Operand>{operand, warp_across() * PART_BLOCKS};
}
template <class Operand> __device__ __forceinline__ auto part_of_b(const Operand& operand) {
    if constexpr (SCORE_PARTS == 1) return operand;
    else return PartOfB<Operand>{operand, warp_across() * PART_BLOCKS};
}

// The parts of MATRICES tiles of scores in shared memory, as C fragments: 16 bytes of each lane.
template <int MATRICES, bool SHARED = (SCORE_PARTS > 1)> struct ScoreParts {
    alignas(1024) float parts[MATRICES][SCORE_PARTS][SCORE_WARPS_Q][M_TILES * S_TILES][32][4];

    // The warp's part of matrix n. A barrier follows before add_parts(), and another one before the
    // next part.
    __device__ __forceinline__ void store_part(int n, const Scores& s) const {
        #pragma unroll
        for (int i = 0; i < M_TILES * S_TILES; ++i) {
            const auto& x = s[i / S_TILES][i % S_TILES];
            store_shared_16(address(n, warp_across(), i), x[0], x[1], x[2], x[3]);
        }
    }
    // Their sum, in the same order in all warps.
    __device__ __forceinline__ void add_parts(int n, Scores& s) const {
        #pragma unroll
        for (int i = 0; i < M_TILES * S_TILES; ++i)
            #pragma unroll
            for (int part = 0; part < SCORE_PARTS; ++part) {
                const uint4 bits = load_shared_16(address(n, part, i));
                const float x[4] = {__uint_as_float(bits.x), __uint_as_float(bits.y),
                                    __uint_as_float(bits.z), __uint_as_float(bits.w)};
                #pragma unroll
                for (int c = 0; c < 4; ++c) {
                    float& sum = s[i / S_TILES][i % S_TILES][c];
                    sum = part == 0 ? x[c] : sum + x[c];
                }
            }
    }

private:
    __device__ __forceinline__ u32 address(int n, int part, int i) const {
        return shared_address(
            &parts[n][part][threadIdx.x / 32 % SCORE_WARPS_Q][i][threadIdx.x % 32]);
    }
};

// A warp has all columns.
template <int MATRICES> struct ScoreParts<MATRICES, false> {
    __device__ __forceinline__ void store_part(int, const Scores&) const {}
    __device__ __forceinline__ void add_parts(int, Scores&) const {}
};
