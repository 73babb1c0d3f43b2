// Runs before the kernels of a double backward, after the JVP that computes ddO:
//
//     delta = rowsum(dO * O) - dlse,  delta_dot = rowsum(dO * ddO)
//
// in float, or in double for double elements. delta is as prepare/delta.cu has it. As there, the
// kernel also zeroes what the main kernel adds to.
//
// Block: NUM_THREADS threads; LANES of a warp share a row, column by column.
// Grid: blockIdx.x = row / (NUM_THREADS / LANES), rows being counted as in a contiguous array:
//     row = (batch * seqlen_q + query) * num_heads_q + head
// Constants: Element, NUM_THREADS, LANES, BLOCK_Q, DQ_COLUMNS (0: no sums), ADDS_TO_DQ, DLSE;
// Arguments, its argument's type, and PACKED. No shared memory.
//
// Bound by memory: O, dO and ddO read once.
#include "common/elements.cuh"
#include "prepare/clear_sums.cuh"
#include "prepare/token_rows.cuh"

using Real = Accumulator<Element>;

static_assert(32 % LANES == 0 && NUM_THREADS % 32 == 0, "a row's lanes are of one warp");

// The dot product of two rows, in each of their lanes. The order of additions is fixed.
inline Real row_product(const Element* a, const Element* b, int lane, int columns) {
    Real sum = 0;
    for (int d = lane; d < columns; d += LANES)
        sum = fma(to_accumulator(a[d]), to_accumulator(b[d]), sum);
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
    return sum;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS)
double_backward_delta(const __grid_constant__ Arguments args) {
    const BackwardArguments& arrays = arrays_of(args);
    if constexpr (DQ_COLUMNS > 0 || ADDS_TO_DQ) clear_sums(args);
    const Shape& shape = arrays.shape;
    const int lane = threadIdx.x % LANES;
    const auto [batch, query, head] = token_row(
        i64(blockIdx.x) * (NUM_THREADS / LANES) + threadIdx.x / LANES, shape);
    const bool exists = batch < shape.batch;                // no return: all lanes join the sums
    const int columns = exists ? shape.head_dim_v : 0;

    const Strides &dos = arrays.dout_stride, &os = arrays.out_stride;
    const DirectionStrides& ddos = args.tangents.out_dot;
    const Element* dout = static_cast<const Element*>(arrays.dout)
                        + batch * dos.batch + query * dos.token + head * dos.head;
    const Element* out = static_cast<const Element*>(arrays.out)
                       + batch * os.batch + query * os.token + head * os.head;
    const Element* ddout = static_cast<const Element*>(args.out_dot)
                         + batch * ddos.batch + query * ddos.token + head * ddos.head;
    Real delta = row_product(dout, out, lane, columns);
    const Real delta_dot = row_product(dout, ddout, lane, columns);
    if (!exists || lane != 0) return;
    const i64 i = (batch * shape.num_heads_q + head) * shape.seqlen_q + query;
    if constexpr (DLSE) delta -= static_cast<const Real*>(args.dlse)[i];
    static_cast<Real*>(arrays.delta)[i] = delta;
    static_cast<Real*>(args.delta_dot)[i] = delta_dot;
}
