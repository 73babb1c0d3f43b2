// Groups of warps that share a block's queries and take turns at its key tiles, each at its own
// pace: one group's matmuls run while another waits for its loads or computes weights. Their sums
// are added at the end.
//
// One group has buffers for K, K' and for V, V': each loads while the other is used. Of two, each
// has one buffer, for K, K' and then for V, V'.
#pragma once
#include "mma8/mma8.cuh"

// Warps that are more than 16-row tiles of queries are another group's.
constexpr int GROUPS = NUM_WARPS * 16 > BLOCK_Q ? NUM_WARPS * 16 / BLOCK_Q : 1;
constexpr int GROUP_WARPS = NUM_WARPS / GROUPS, GROUP_THREADS = GROUP_WARPS * 32;
constexpr int GROUP_BARRIER = 1;                            // and the next: of each group

// The threads of the calling thread's group.
struct GroupThreads {
    static constexpr int COUNT = GROUP_THREADS;
    static __device__ __forceinline__ int rank() {
        return GROUPS == 1 ? threadIdx.x : threadIdx.x % GROUP_THREADS;
    }
};

static_assert(GROUPS == 1 || GROUPS == 2, "a group's sums are added to one other group's");
static_assert(BLOCK_Q % (GROUP_WARPS * 16) == 0, "a warp needs whole 16-row tiles of queries");

struct KeyTile { SmemTile<BLOCK_K, HEAD_DIM> k, k_dot; };
struct ValueTile { SmemTile<BLOCK_K, HEAD_DIM_V, VALUES_PAD> v, v_dot; };

// found: each warp's vote in sync_or().
template <int COUNT> struct TilesOf {
    union { KeyTile keys; ValueTile values; };
    alignas(16) int found[GROUP_WARPS];
};
template <> struct TilesOf<1> { KeyTile keys; ValueTile values; };

// The calling thread's group, of COUNT.
template <int COUNT> struct GroupOf {
    TilesOf<COUNT>& tiles;
    const int index;

    __device__ __forceinline__ explicit GroupOf(TilesOf<COUNT> (&tiles)[COUNT])
        : tiles(tiles[COUNT == 1 ? 0 : threadIdx.x / GROUP_THREADS]),
          index(COUNT == 1 ? 0 : threadIdx.x / GROUP_THREADS) {}

    // A barrier of the group.
    __device__ __forceinline__ void sync() const {
        if constexpr (COUNT == 1) __syncthreads();
        else barrier_sync(GROUP_BARRIER + index, GROUP_THREADS);
    }
    // The same, and whether any thread of the group says so. Needs another between two calls.
    __device__ __forceinline__ bool sync_or(bool says) const {
        if constexpr (COUNT == 1) {
            return __syncthreads_or(says);
        } else {
            const bool any = __ballot_sync(WHOLE_WARP, says) != 0;
            return or_over_warps(
                tiles.found, GroupThreads::rank() / 32, any, [&] { sync(); });
        }
    }
};
using Group = GroupOf<GROUPS>;

// The first group's d and e += the second's, lane by lane, by `sums`, shared memory with room for
// sizeof(d) + sizeof(e) of each thread of a group. Whole block; nobody uses `sums` any more.
template <int M, int N>
__device__ __forceinline__ void add_groups(
    Element (&d)[M][N][4], Element (&e)[M][2], Element* sums, const Group& group) {
    const auto for_each = [&](auto visit) {
        Element* sum = sums + GroupThreads::rank();
        #pragma unroll
        for (int m = 0; m < M; ++m) {
            #pragma unroll
            for (int n = 0; n < N; ++n)
                #pragma unroll
                for (int x = 0; x < 4; ++x)
                    visit(d[m][n][x], sum[((m * N + n) * 4 + x) * GROUP_THREADS]);
            #pragma unroll
            for (int x = 0; x < 2; ++x)
                visit(e[m][x], sum[(M * N * 4 + m * 2 + x) * GROUP_THREADS]);
        }
    };
    __syncthreads();
    if (group.index == 1) for_each([](Element number, Element& sum) { sum = number; });
    __syncthreads();
    if (group.index == 0) for_each([](Element& number, Element sum) { number += sum; });
}
