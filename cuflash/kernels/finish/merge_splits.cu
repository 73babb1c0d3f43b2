// Merges what the blocks of decode/forward.cu computed of the same row from parts of the keys, as
// merge.cu does with two:
//
//     m = max_i lse_i,  w_i = exp(lse_i - m),  out = sum_i w_i out_i / sum_i w_i,
//     lse = m + log(sum_i w_i)
//
// and adds the head's sink to the sum. A part with lse = inf makes the weights NaN and lse inf; one
// with lse = -inf has no visible key and takes no part.
//
// Grid: one block per row, rows counted as in lse:
//     blockIdx.x = (batch * num_heads_q + head) * seqlen_q + query
// Block: NUM_THREADS threads, at most MAX_SPLITS parts. Constants: Element, NUM_THREADS,
// MAX_SPLITS, SHARED_BYTES, SINK, PACKED; Arguments. Shared memory: the weights.
//
// Bound by latency: the parts are in L2. So a thread has its loads of several parts under way.
#include "common/softmax.cuh"
#include "common/elements.cuh"
#include "score/sink.cuh"

struct SharedPlan { float weights[MAX_SPLITS]; };
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

template <class Combine> __device__ __forceinline__ float warp_reduce(float x, Combine combine) {
    for (int distance = 16; distance > 0; distance /= 2)
        x = combine(x, __shfl_xor_sync(WHOLE_WARP, x, distance));
    return x;
}

// Each warp computes all weights: lane i those of parts i, i + 32, ... Returns m and their sum.
__device__ __forceinline__ WithSink<float> compute_weights(
    const Arguments& args, SharedPlan& shared, int head, i64 num_rows) {
    constexpr int OF_LANE = MAX_SPLITS / 32;
    const int lane = threadIdx.x % 32;
    float lse[OF_LANE], m = -infinity(), sum = 0.0f;
    #pragma unroll
    for (int i = 0; i < OF_LANE; ++i) {
        const int split = i * 32 + lane;
        lse[i] = split < args.num_splits ? args.split_lse[split * num_rows + blockIdx.x]
                                         : -infinity();
        m = fmaxf(m, lse[i]);
    }
    m = warp_reduce(m, [](float a, float b) { return fmaxf(a, b); });
    #pragma unroll
    for (int i = 0; i < OF_LANE; ++i) {
        const float weight = lse[i] == -infinity() ? 0.0f : expf(lse[i] - m);
        sum += weight;
        if (threadIdx.x < 32) shared.weights[i * 32 + lane] = weight;
    }
    sum = warp_reduce(sum, [](float a, float b) { return a + b; });
    return {m, sum, sink_of<float>(args, head)};
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
merge_splits(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    SharedPlan& shared = *reinterpret_cast<SharedPlan*>(shared_bytes);
    const ForwardArguments& arrays = args.arrays;
    const Shape& shape = arrays.shape;
    const int row = blockIdx.x;
    const int query = row % shape.seqlen_q, head = row / shape.seqlen_q % shape.num_heads_q;
    const i64 batch = row / shape.seqlen_q / shape.num_heads_q, num_rows = gridDim.x;

    const WithSink<float> merged = compute_weights(args, shared, head, num_rows);
    const float inverse = merged.sum == 0.0f ? 0.0f : merged.rescale / merged.sum;
    if (threadIdx.x == 0 && arrays.lse != nullptr)
        static_cast<float*>(arrays.lse)[row] = lse_of_row(merged.top, merged.sum);
    __syncthreads();                                        // all weights are written

    Element* out = static_cast<Element*>(arrays.out) + batch * arrays.out_stride.batch
                 + head * arrays.out_stride.head + query * arrays.out_stride.token;
    const i64 part_stride = num_rows * shape.head_dim_v;
    for (int column = threadIdx.x; column < shape.head_dim_v; column += NUM_THREADS) {
        const float* part = args.split_out + i64(row) * shape.head_dim_v + column;
        float sum = 0.0f;
        #pragma unroll 8
        for (int split = 0; split < args.num_splits; ++split) {
            const float x = part[split * part_stride], weight = shared.weights[split];
            sum += weight == 0.0f ? 0.0f : weight * x;
        }
        out[column] = from_accumulator<Element>(sum * inverse);
    }
}
