// The gradient of a head's sink, a logit without a value that all rows of the head share:
//
//     dsink = - sum exp(sink - lse) delta          over the head's rows of all batches
//
// since dS = P (dP - delta), and dP of a sink is 0. delta = rowsum(dO * O) - dlse comes from
// prepare/delta.cu. The order of additions is fixed. A row may have a rest (lse_rest.cuh).
//
// In a double backward, with the gradient s' of a loss by dsink, what the sink moves is T
// (simt/double_backward.cuh):
//
//     d2sink = - sum exp(sink - lse) (delta (s' - b) + delta_dot)
//
// Grid: one block a head. Block: NUM_THREADS threads, thread t having the rows t, t + NUM_THREADS
// and so on of each batch.
// A row whose lse is -inf belongs to no sequence: others have at least the sink's weight.
// Constants: Arguments, its argument's type; Element, PACKED, ALIBI, BIAS, NUM_THREADS,
// SHARED_BYTES; IN_TILES:
// delta stands in QueryRows (row_stats.cuh) of BLOCK_Q queries; a warp then takes packed sequences
// slot by slot. Shared memory: a double for each thread.
//
// Bound by memory: lse and delta read once.
#include "common/elements.cuh"
#include "score/lse_rest.cuh"
#include "sm90/row_stats.cuh"
#include "common/packed_sequences.cuh"

using Real = Accumulator<Element>;

struct SharedPlan { double sums[NUM_THREADS]; };
static_assert(sizeof(SharedPlan) == SHARED_BYTES, "the plan and the kernel disagree");

// delta of a row of a (batch, head), `pair` being batch * num_heads_q + head.
template <class Arguments> inline Real row_delta(const Arguments& args, i64 pair, int row) {
    const BackwardArguments& arguments = args.arrays;
    const int length = arguments.shape.seqlen_q;
    if constexpr (IN_TILES) {
        const i64 tile = pair * ((length + BLOCK_Q - 1) / BLOCK_Q) + row / BLOCK_Q;
        return static_cast<const QueryRows*>(arguments.delta)[tile].delta[row % BLOCK_Q];
    } else {
        return static_cast<const Real*>(arguments.delta)[pair * length + row];
    }
}

// The factor that takes its place in a double backward.
template <class Arguments> inline Real second_delta(const Arguments& args, i64 pair, int row) {
    const BackwardArguments& arguments = args.arrays;
    const i64 index = pair * arguments.shape.seqlen_q + row;
    const int head = pair % arguments.shape.num_heads_q;
    const Real sink_dot = args.sink_dot == nullptr
        ? Real(0) : static_cast<const Real*>(args.sink_dot)[head * args.tangents.sink_dot];
    const Real b = static_cast<const Real*>(args.lse_dot)[index];
    const Real delta = static_cast<const Real*>(arguments.delta)[index];
    return fma(delta, sink_dot - b, static_cast<const Real*>(args.delta_dot)[index]);
}
inline Real row_delta(const DoubleBackwardOptionsArguments& args, i64 pair, int row) {
    return second_delta(args, pair, row);
}
inline Real row_delta(const DoubleBackwardExpressionArguments& args, i64 pair, int row) {
    return second_delta(args, pair, row);
}

// The thread's part of the sum over packed sequences, a slot a warp.
inline double sum_of_slots(const Arguments& args, int head, Real sink) {
    const BackwardArguments& arguments = args.arrays;
    const int slots = num_query_tiles(args, BLOCK_Q);
    double sum = 0;
    for (int slot = threadIdx.x / 32; slot < slots; slot += NUM_THREADS / 32) {
        int tile = slot;
        const auto sequence = sequence_of_tile<false>(args, tile, BLOCK_Q);
        const int end = min(seqlen_q_of(args, sequence), (tile + 1) * BLOCK_Q);
        const QueryRows& rows =
            static_cast<const QueryRows*>(arguments.delta)[i64(head) * slots + slot];
        const Real* lse = static_cast<const Real*>(arguments.lse)
                        + i64(head) * rows_of_head(args) + sequence.first_q;
        LseRests<Real> rests;
        rests.set_head(args, 0, head);
        for (int row = tile * BLOCK_Q + threadIdx.x % 32; row < end; row += 32)
            if (lse[row] != -Real(__int_as_float(0x7F800000)))
                sum -= exp(sink - lse[row] - rests.of(sequence.first_q + row, lse[row]))
                     * rows.delta[row % BLOCK_Q];
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
backward_sink(const __grid_constant__ Arguments args) {
    extern __shared__ __align__(16) unsigned char shared_bytes[];
    double (&sums)[NUM_THREADS] = reinterpret_cast<SharedPlan*>(shared_bytes)->sums;
    const BackwardArguments& arguments = args.arrays;
    const Shape& shape = arguments.shape;
    const int head = blockIdx.x, thread = threadIdx.x;
    const Real sink = static_cast<const Real*>(args.sink)[head * args.options.sink_stride];
    const Real infinite = static_cast<Real>(__int_as_float(0x7F800000));
    const bool has_no_weight = sink == -infinite;

    double sum = 0;
    if (PACKED && IN_TILES && !has_no_weight) sum = sum_of_slots(args, head, sink);
    for (int batch = 0; !(PACKED && IN_TILES) && batch < shape.batch; ++batch) {
        const i64 pair = i64(batch) * shape.num_heads_q + head;
        const Real* lse = static_cast<const Real*>(arguments.lse) + pair * shape.seqlen_q;
        LseRests<Real> rests;
        rests.set_head(args, batch, head);
        for (int row = thread; row < shape.seqlen_q; row += NUM_THREADS)
            if (!has_no_weight && !(PACKED && lse[row] == -infinite))
                sum -= exp(sink - lse[row] - rests.of(row, lse[row])) * row_delta(args, pair, row);
    }
    sums[thread] = sum;
    for (int half = NUM_THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (thread < half) sums[thread] += sums[thread + half];
    }
    if (thread == 0) static_cast<Real*>(args.dsink)[head] = static_cast<Real>(sums[0]);
}
