// Merges what the blocks of decode/forward.cu computed of the same row from parts of the keys, as
// merge.cu does with two:
//
//     m = max_i lse_i,  w_i = exp(lse_i - m),  out = sum_i w_i out_i / sum_i w_i,
//     lse = m + log(sum_i w_i)
//
// and adds the head's sink to the sum. A part with lse = inf makes the weights NaN and lse inf; one
// with lse = -inf has no visible key and takes no part.
//
// Grid: one warp per row, blockIdx.x = row / (NUM_THREADS / 32), the rows counted as in lse:
//     row = (batch * num_heads_q + head) * seqlen_q + query
// Block: NUM_THREADS threads. Constants: Element, NUM_THREADS, SINK, PACKED; Arguments. No shared
// memory.
//
// Bound by latency: the parts are in L2.
#include "common/softmax.cuh"
#include "common/elements.cuh"
#include "score/sink.cuh"

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
merge_splits(const __grid_constant__ Arguments args) {
    const ForwardArguments& arrays = args.arrays;
    const Shape& shape = arrays.shape;
    const int lane = threadIdx.x % 32;
    const i64 row = i64(blockIdx.x) * (NUM_THREADS / 32) + threadIdx.x / 32;
    const i64 num_rows = i64(shape.batch) * shape.num_heads_q * shape.seqlen_q;
    if (row >= num_rows) return;
    const int query = row % shape.seqlen_q, head = row / shape.seqlen_q % shape.num_heads_q;
    const i64 batch = row / shape.seqlen_q / shape.num_heads_q;
    const float* lse_parts = args.split_lse + row;

    float m = -infinity();
    for (int split = lane; split < args.num_splits; split += 32)
        m = fmaxf(m, lse_parts[split * num_rows]);
    for (int distance = 16; distance > 0; distance /= 2)
        m = fmaxf(m, __shfl_xor_sync(WHOLE_WARP, m, distance));

    // Weights are exp(lse_i - m), 0 without a key; where m is inf they are NaN.
    const auto weight_of = [&](int split) {
        const float lse = lse_parts[split * num_rows];
        return lse == -infinity() ? 0.0f : expf(lse - m);
    };
    float l = 0.0f;
    for (int split = lane; split < args.num_splits; split += 32) l += weight_of(split);
    for (int distance = 16; distance > 0; distance /= 2)
        l += __shfl_xor_sync(WHOLE_WARP, l, distance);
    const WithSink<float> with_sink(m, l, sink_of<float>(args, head));
    const float inverse = with_sink.sum == 0.0f ? 0.0f : with_sink.rescale / with_sink.sum;
    if (lane == 0 && arrays.lse != nullptr)
        static_cast<float*>(arrays.lse)[row] = lse_of_row(with_sink.top, with_sink.sum);

    Element* out = static_cast<Element*>(arrays.out) + batch * arrays.out_stride.batch
                 + head * arrays.out_stride.head + query * arrays.out_stride.token;
    const float* parts = args.split_out + row * shape.head_dim_v;
    for (int column = lane; column < shape.head_dim_v; column += 32) {
        float sum = 0.0f;
        for (int split = 0; split < args.num_splits; ++split) {
            const float weight = weight_of(split);
            if (weight != 0.0f) sum += weight * parts[split * num_rows * shape.head_dim_v + column];
        }
        out[column] = from_accumulator<Element>(sum * inverse);
    }
}
