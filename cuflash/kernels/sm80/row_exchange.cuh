// What warps that share rows of sm80/forward.cu exchange through shared memory.
//
// A warp has the scores of WARP_KEYS keys of its rows, and WARP_COLUMNS columns of their O: all or,
// if WARPS_ACROSS > 1, a part. Then maxima and sums of its rows come from several warps, and so
// does P, an operand of each. Warps that share a row all hold its m, and each a part of its l.
#pragma once
#include "sm80/forward_softmax.cuh"

template <bool SHARED> struct RowExchange {
    static constexpr int KEY_BLOCKS = BLOCK_K / 16;
    // P as A fragments of 16 x 16 pairs, row by row: 16 bytes of each lane.
    static constexpr int LANE_BYTES = 16, FRAGMENT_BYTES = 32 * LANE_BYTES;
    alignas(1024) unsigned char weights[BLOCK_Q * BLOCK_K * 2];
    float rows[WARPS_ACROSS][BLOCK_Q];                      // maxima; in the epilogue sums

    // Before a barrier, after which softmax_step() reads them.
    __device__ __forceinline__ void share_maxima(const Scores& s) {
        share([&](int i, int half) { return row_max(s[i], half); });
    }

    __device__ __forceinline__ void softmax_step(
        Scores& s, SoftmaxState& softmax, Output& acc, float scale_log2) const {
        ::softmax_step<false>(s, softmax, acc, scale_log2, [&](int i, int half) {
            return combined(i, half, [](float x, float y) { return fmaxf(x, y); });
        });
    }

    // acc += P V, after a barrier inside. The caller has another one before the next P.
    template <bool MASKED>
    __device__ __forceinline__ void accumulate(
        Output& acc, const Scores& p, u32 v_smem, bool nonfinite) {
        store_weights(p);
        __syncthreads();
        ::accumulate<MASKED>(acc, SharedWeights{row_weights()}, v_smem, nonfinite);
    }

    // l becomes the lane's part of the row's sum over all warps. A barrier inside.
    __device__ __forceinline__ void share_sums(SoftmaxState& softmax) {
        share([&](int i, int half) { return quad_sum(softmax.l[i][half]); });
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < M_TILES; ++i)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float sum = combined(i, half, [](float x, float y) { return x + y; });
                softmax.l[i][half] = threadIdx.x % 4 == 0 ? sum : 0.0f;
            }
    }

private:
    // Operand A: P of the warp's rows and all keys.
    struct SharedWeights {
        u32 lane_address;
        __device__ __forceinline__ void load(u32 (&a)[4], int m, int k) const {
            const uint4 x = load_shared_16(lane_address + (m * KEY_BLOCKS + k) * FRAGMENT_BYTES);
            a[0] = x.x, a[1] = x.y, a[2] = x.z, a[3] = x.w;
        }
    };
    __device__ __forceinline__ u32 row_weights() const {
        return shared_address(weights) + warp_row() / 16 * KEY_BLOCKS * FRAGMENT_BYTES
             + threadIdx.x % 32 * LANE_BYTES;
    }

    // P of the warp's keys, rounded to Element. A C fragment has half of the keys of an A fragment.
    __device__ __forceinline__ void store_weights(const Scores& p) const {
        Packed<M_TILES, S_TILES> packed;
        pack_fragments<Element>(packed, p);
        const u32 to = row_weights();
        #pragma unroll
        for (int m = 0; m < M_TILES; ++m)
            #pragma unroll
            for (int j = 0; j < S_TILES; ++j) {
                const int n = warp_key() / 8 + j;
                const u32 pair = to + (m * KEY_BLOCKS + n / 2) * FRAGMENT_BYTES + n % 2 * 8;
                store_shared(pair, packed[m][j][0]);
                store_shared(pair + 4, packed[m][j][1]);
            }
    }

    static __device__ __forceinline__ int lane_row(int i, int half) {
        return warp_row() + i * 16 + half * 8 + threadIdx.x % 32 / 4;
    }
    // Stores a number of each of the warp's rows, the same in a quad's lanes.
    template <class RowOf> __device__ __forceinline__ void share(RowOf of) {
        #pragma unroll
        for (int i = 0; i < M_TILES; ++i)
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float x = of(i, half);
                if (threadIdx.x % 4 == 0) rows[warp_across()][lane_row(i, half)] = x;
            }
    }
    // Such numbers of a row, of all warps that share it, in an order that is the same in each.
    template <class Combine>
    __device__ __forceinline__ float combined(int i, int half, Combine combine) const {
        float x = rows[0][lane_row(i, half)];
        #pragma unroll
        for (int warp = 1; warp < WARPS_ACROSS; ++warp)
            x = combine(x, rows[warp][lane_row(i, half)]);
        return x;
    }
};

// A warp has its rows alone.
template <> struct RowExchange<false> {
    __device__ __forceinline__ void share_maxima(const Scores&) {}
    __device__ __forceinline__ void softmax_step(
        Scores& s, SoftmaxState& softmax, Output& acc, float scale_log2) const {
        ::softmax_step(s, softmax, acc, scale_log2);
    }
    template <bool MASKED>
    __device__ __forceinline__ void accumulate(
        Output& acc, const Scores& p, u32 v_smem, bool nonfinite) {
        const RegisterA<Element, M_TILES, S_TILES> weights(p);
        ::accumulate<MASKED>(acc, weights, v_smem, nonfinite);
    }
    __device__ __forceinline__ void share_sums(SoftmaxState&) {}
};
