// decode/forward_simt.cu's rows: the online softmax of a row tile over a warp's keys.
//
// All lanes have their columns of all rows of Q and acc (simt_keys.cuh). The scores of the warp's
// PAIRS pairs (row, key), in the order of rows, are spread over the lanes: each has OWN_PAIRS
// neighbours of one row; if there are fewer pairs than lanes, LANES_OF_PAIR lanes have the same.
#pragma once
#include "common/online_softmax.cuh"
#include "decode/row_tile.cuh"
#include "decode/simt_keys.cuh"
#include "score/head_options.cuh"

constexpr int PAIRS = BLOCK_Q * WARP_KEYS;
constexpr int OWN_PAIRS = PAIRS > 32 ? PAIRS / 32 : 1;
constexpr int LANES_OF_PAIR = PAIRS > 32 ? 1 : 32 / PAIRS, LANES_OF_ROW = 32 / BLOCK_Q;

static_assert((PAIRS & (PAIRS - 1)) == 0, "powers of two are halved");
static_assert(OWN_PAIRS <= WARP_KEYS, "a lane's pairs are of one row");

// Which lane has a pair.
constexpr int lane_of_pair(int pair) { return pair / OWN_PAIRS * LANES_OF_PAIR; }

// The rows of Q, and a warp's state of them after some of its keys. m is that of the lane's row; l
// the sum over the lane's own keys.
struct WarpRows {
    Real q[BLOCK_Q][KColumns::COUNT], acc[BLOCK_Q][VColumns::COUNT] = {};
    Real m = -Real(infinity()), l = 0;

    // Rows past the last become 0.
    __device__ __forceinline__ WarpRows(const ForwardArguments& arrays, const RowTile& rows) {
        #pragma unroll
        for (int r = 0; r < BLOCK_Q; ++r)
            #pragma unroll
            for (int i = 0; i < KColumns::COUNT; ++i) {
                const int column = KColumns::column(i);
                q[r][i] = 0;
                if (rows.exists(r) && column < arrays.shape.head_dim)
                    q[r][i] = to_accumulator(static_cast<const Element*>(arrays.q)[
                        rows.offset(arrays.q_stride, r) + column]);
            }
    }
};

// A lane's own pairs: their scores, later weights.
struct OwnPairs {
    Real x[OWN_PAIRS];
    bool sees[OWN_PAIRS];

    // The pair's key, of the warp's.
    static __device__ __forceinline__ int key_of(int n) {
        return threadIdx.x % LANES_OF_ROW / LANES_OF_PAIR * OWN_PAIRS + n;
    }
};

// Sums each of COUNT numbers over the lanes. Each step halves the numbers that a lane keeps: it
// sends one half to a lane that keeps that one. So COUNT numbers take about COUNT shuffles, and
// lane l ends up with the numbers of lane_of_pair() = l, first.
template <int COUNT, int DISTANCE = 16>
__device__ __forceinline__ void sum_over_lanes(Real (&x)[PAIRS]) {
    if constexpr (DISTANCE > 0) {
        constexpr int KEPT = COUNT > 1 ? COUNT / 2 : 1;
        const bool keeps_upper = COUNT > 1 && (threadIdx.x & DISTANCE) != 0;
        #pragma unroll
        for (int i = 0; i < KEPT; ++i) {
            const Real upper = x[COUNT > 1 ? i + KEPT : i];
            const Real sent = keeps_upper ? x[i] : upper, kept = keeps_upper ? upper : x[i];
            x[i] = (COUNT > 1 ? kept : x[i]) + __shfl_xor_sync(WHOLE_WARP, sent, DISTANCE);
        }
        sum_over_lanes<KEPT, DISTANCE / 2>(x);
    }
}

// S = Q K^T.
__device__ __forceinline__ void score_gemm(
    OwnPairs& own, const WarpRows& warp_rows, const WarpKeys& keys) {
    Real s[PAIRS] = {};
    #pragma unroll
    for (int j = 0; j < WARP_KEYS; ++j)
        #pragma unroll
        for (int i = 0; i < KColumns::COUNT; ++i) {
            const Real k = keys.k[j][i];
            #pragma unroll
            for (int r = 0; r < BLOCK_Q; ++r) {
                Real& sum = s[r * WARP_KEYS + j];
                sum = fma(warp_rows.q[r][i], k, sum);
            }
        }
    sum_over_lanes<PAIRS>(s);
    #pragma unroll
    for (int n = 0; n < OWN_PAIRS; ++n) own.x[n] = s[n];
}

// The row of a lane: which keys it sees, how its scores are made.
struct LaneRow {
    const Arguments& args;
    const Mask<CAUSAL, WINDOW> mask;
    const int kv_head, query;
    const Real k_scale;
    HeadOptions<Real> options;

    __device__ __forceinline__ LaneRow(const Arguments& args, const RowTile& rows)
        : args(args), mask(mask_of(args, rows.sequence)), kv_head(rows.kv_head),
          query(rows.query_of(row())), k_scale(k_scale_of_head(args, rows.kv_head)),
          options(args, rows.sequence.number) {
        const int head = rows.head_of(row());
        options.set_head(args, rows.sequence.number, head);
        rows.set_user(args, options.score_mod, options.pair_mask, head);
    }
    static __device__ __forceinline__ int row() { return threadIdx.x % 32 / LANES_OF_ROW; }

    // S, times the scale of K if there is one, becomes scores.
    __device__ __forceinline__ void apply_scales_and_score_mod(
        OwnPairs& own, const WarpKeys& keys, int first_key) const {
        const int shift = mask.seqlen_k - mask.seqlen_q;
        #pragma unroll
        for (int n = 0; n < OWN_PAIRS; ++n) {
            const int key = first_key + OwnPairs::key_of(n);
            if constexpr (SCALES == SCALES_OF_HEADS) own.x[n] *= k_scale;
            if constexpr (SCALES == SCALES_OF_PAGES) own.x[n] *= k_scale_of_page(args, keys, n);
            own.x[n] =
                options.score_mod.score(own.x[n], Real(query + shift - key), query, key);
        }
    }

    __device__ __forceinline__ void apply_mask(
        OwnPairs& own, bool is_masked, int first_key) const {
        #pragma unroll
        for (int n = 0; n < OWN_PAIRS; ++n) {
            const int key = first_key + OwnPairs::key_of(n);
            own.sees[n] = !is_masked || mask.visible(query, key);
            if constexpr (PAIRWISE)
                if (is_masked && own.sees[n] && query < mask.seqlen_q)
                    own.sees[n] = options.pair_mask.visible(query, key);
        }
    }

    // P becomes the factors of V: times Z of dropout and the scales of pages.
    __device__ __forceinline__ void apply_to_weights(
        OwnPairs& own, const WarpKeys& keys, int first_key) const {
        #pragma unroll
        for (int n = 0; n < OWN_PAIRS; ++n) {
            if constexpr (DROPOUT)
                own.x[n] *= options.dropout.z(query, first_key + OwnPairs::key_of(n));
            if constexpr (SCALES == SCALES_OF_PAGES) own.x[n] *= v_scale_of_page(args, keys, n);
        }
    }

private:
    template <class Arguments>
    __device__ __forceinline__ Real k_scale_of_page(
        const Arguments& args, const WarpKeys& keys, int n) const {
        return scale_of_page(args.k_scale, args.cache.k_scale_stride, keys, n);
    }
    template <class Arguments>
    __device__ __forceinline__ Real v_scale_of_page(
        const Arguments& args, const WarpKeys& keys, int n) const {
        return scale_of_page(args.v_scale, args.cache.v_scale_stride, keys, n);
    }
    // 0 for a key without a page.
    __device__ __forceinline__ Real scale_of_page(
        const float* scales, const HeadStrides& stride, const WarpKeys& keys, int n) const {
        const int page = page_of_key(keys.page, OwnPairs::key_of(n));
        return page >= 0 ? scale_of(scales, stride, page, kv_head) : 0.0f;
    }
};

// The step of online_softmax.cuh over the visible keys, as simt/forward.cu: x becomes P.
__device__ __forceinline__ void softmax_step(OwnPairs& own, WarpRows& rows) {
    Real m = rows.m;
    #pragma unroll
    for (int n = 0; n < OWN_PAIRS; ++n)
        if (own.sees[n]) m = own.x[n] > m ? own.x[n] : m;   // skips NaN
    #pragma unroll
    for (int distance = LANES_OF_PAIR; distance < LANES_OF_ROW; distance *= 2) {
        const Real other = __shfl_xor_sync(WHOLE_WARP, m, distance);
        m = other > m ? other : m;
    }
    const NaturalExp<Real> exp;
    Real factor;
    const Real reference =
        raise_max(exp, rows.m, rows.l, m, [&](Real own_factor) { factor = own_factor; });
    #pragma unroll
    for (int n = 0; n < OWN_PAIRS; ++n) {
        own.x[n] = own.sees[n] ? exp(own.x[n], reference) : Real(0);
        rows.l += own.x[n];
    }
    #pragma unroll
    for (int r = 0; r < BLOCK_Q; ++r) {
        const Real of_row = __shfl_sync(WHOLE_WARP, factor, r * LANES_OF_ROW);
        #pragma unroll
        for (int i = 0; i < VColumns::COUNT; ++i) rows.acc[r][i] *= of_row;
    }
}

// acc += P V, over the visible keys only: 0 * NaN is NaN, so that the others cannot take part.
__device__ __forceinline__ void accumulate(
    WarpRows& rows, const OwnPairs& own, const WarpKeys& keys) {
    u32 seen[OWN_PAIRS];
    #pragma unroll
    for (int n = 0; n < OWN_PAIRS; ++n) seen[n] = __ballot_sync(WHOLE_WARP, own.sees[n]);
    #pragma unroll
    for (int j = 0; j < WARP_KEYS; ++j)
        #pragma unroll
        for (int r = 0; r < BLOCK_Q; ++r) {
            const int pair = r * WARP_KEYS + j, n = pair % OWN_PAIRS, lane = lane_of_pair(pair);
            const Real p = __shfl_sync(WHOLE_WARP, own.x[n], lane);
            if (seen[n] >> lane & 1)
                #pragma unroll
                for (int i = 0; i < VColumns::COUNT; ++i)
                    rows.acc[r][i] = fma(p, keys.v[j][i], rows.acc[r][i]);
        }
}
