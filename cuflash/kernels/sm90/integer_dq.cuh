// Sums of dQ in integers (INTEGER_DQ): their additions may come in any order, so dQ has the same
// bits in every run. For deterministic calls whose key tiles are not consecutive at a query tile,
// with PACKED or SEGMENTS. Others add floats in turns, which is faster.
//
// Each row i of dQ / scale has a grid, a power of two g_i: a part x of the row, from one key tile,
// is added as the integer hi = rint(g_i x). No sum over key tiles exceeds the row's bound, by
// Cauchy-Schwarz and since weights P sum up to at most 1:
//
//     |dQ_ic| / scale <= sum_j P_ij |z_ij dP_ij - delta_i| |K_jc|
//                     <= (z |dO_i|_2 max_j |V_j|_2 + |delta_i|) max_jc |K_jc| = bound_i
//
// with z = 1 / (1 - dropout); softcap's derivative is at most 1. g_i bound_i is in [2^29, 2^30), of
// 2^31: twice the room that the roundings of P and dS need. The maxima are those of the key tiles
// that the query tile visits (KeyMaxima, from prepare/key_maxima.cu), so the grid of a row does not
// depend on other sequences.
//
// Wide tiles. Where a few keys are far larger than others, a row may be so much smaller than its
// bound that the grid is too coarse. Then a second sum holds what hi leaves over:
// lo = rint(2^16 (g_i x - hi)), at most 2^15 in magnitude: up to 2^16 key tiles cannot overflow it.
// is_wide() in prepare/row_stats.cu decides for all rows of a query tile.
//
// Rows without a grid. If bound_i is not finite there is none: parts count as 0, and finish/dq.cu
// computes the row from the definition (recompute.cuh). A float16 dS may become infinite though the
// bound is finite: rows of tiles that may_overflow() lose their grid when that happens.
#pragma once
#include "common/scheduler.cuh"
#include "common/packed_sequences.cuh"
#include "common/softmax.cuh"
#include "sm90/row_stats.cuh"

// The high sums of all query tiles, ordered by dq_accum.cuh, come first, then as many low sums.
constexpr int SUMS_OF_TILE = BLOCK_Q * HEAD_DIM;            // number of dQ sums per query tile
constexpr float LOW_STEPS = 65536.0f;                       // of lo in one of hi

// Whether rounding dS may make it infinite though dQ's bound is not.
template <class T> struct IsFloat16 { static constexpr bool value = false; };
template <> struct IsFloat16<float16> { static constexpr bool value = true; };
constexpr bool FLOAT16_DQ = INTEGER_DQ && IsFloat16<Element>::value;

// backward_wide.cu adds from registers, one element of each lane at a time. So that a warp adds to
// 128 contiguous bytes, the element i of lane l's C fragment is at 32 i + l among the fragment's
// sums instead of 4 l + i.
constexpr bool BY_LANES = BLOCK_K == 64;

// Of the keys of a key tile, or of several.
struct alignas(16) KeyMaxima {
    float k, v;                                 // max |K_jc| and max |V_j|^2; k = inf: or NaN
    float roots, keys;                          // sum of 1 / sqrt(|K_j| |V_j|), over so many keys
    void add(const KeyMaxima& other) {
        k = fmaxf(k, other.k);
        v = fmaxf(v, other.v);
        roots += other.roots;
        keys += other.keys;
    }
};

// A row's grid in 32 bits: those of the float g, whose fraction is 0, and two flags in its lowest
// bits, which are the same in all rows of a tile. g = 0: the row has no grid.
struct DqGrid {
    static constexpr u32 WIDE = 1, MAY_OVERFLOW = 2, FLAGS = 3, STEPS = 0x7F800000u;
    u32 bits;

    bool is_wide() const { return (bits & WIDE) != 0; }
    bool may_overflow() const { return (bits & MAY_OVERFLOW) != 0; }
    bool exists() const { return (bits & STEPS) != 0; }
    float steps() const { return __uint_as_float(bits & STEPS); }
    float inverse_steps() const { return __uint_as_float((254u << 23) - (bits & STEPS)); }

    // With g bound in [2^29, 2^30), as far as g has an exponent; none if bound is NaN or infinite.
    static u32 of(float bound) {
        const u32 exponent = __float_as_uint(bound) >> 23 & 255;
        return exponent == 255 ? 0 : min(283u - exponent, 253u) << 23;
    }
};

// Parts of dQ as integers; steps: of the grid.
__device__ __forceinline__ int high_limb(float part, float steps) {
    return __float2int_rn(part * steps);
}
__device__ __forceinline__ int low_limb(float part, float steps) {
    const float x = part * steps;
    return __float2int_rn((x - rintf(x)) * LOW_STEPS);      // exact but for the last rounding
}

// Offset from a high sum to its low sum.
__device__ __forceinline__ i64 low_sums_distance(const Arguments& args) {
    const Shape& shape = arrays_of(args).shape;
    return i64(shape.batch) * shape.num_heads_q * num_query_tiles(args, BLOCK_Q) * SUMS_OF_TILE;
}

// A row's dQ / scale.
__device__ __forceinline__ float sum_of_limbs(int high, int low, float inverse_steps) {
    return (static_cast<float>(high) + static_cast<float>(low) * (1 / LOW_STEPS)) * inverse_steps;
}

// KeyMaxima of all key tiles, packed ones by slots, follow the QueryRows of all query tiles.
__device__ __forceinline__ KeyMaxima* key_maxima(const Arguments& args, TileCoord key_tile) {
    const BackwardArguments& arrays = arrays_of(args);
    const Shape& shape = arrays.shape;
    const i64 query_tiles =
        i64(shape.batch) * shape.num_heads_q * num_query_tiles(args, BLOCK_Q);
    KeyMaxima* first =
        reinterpret_cast<KeyMaxima*>(static_cast<QueryRows*>(arrays.delta) + query_tiles);
    return first + (key_tile.batch * shape.num_heads_kv + key_tile.head)
                       * i64(num_key_tiles(args, BLOCK_K)) + key_tile.tile;
}
