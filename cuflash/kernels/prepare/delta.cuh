// delta = rowsum(dO * O): LANES of a warp share a row of out, in chunks of up to 16 bytes.
#pragma once
#include "common/constants.cuh"
#include "common/elements.cuh"

using Real = Accumulator<Element>;

// layouts.py makes 16-bit rows 16-byte aligned; others are aligned as their elements are, or as the
// caller says.
constexpr int CHUNK = sizeof(Element) == 2 ? 8 : 1;
template <int N> struct alignas(N * sizeof(Element)) ChunkOf { Element x[N]; };
using Chunk = ChunkOf<CHUNK>;

static_assert(32 % LANES == 0 && NUM_THREADS % 32 == 0, "a row's lanes are of one warp");

// The sum over a row's lanes, in each of them. The order of additions is fixed.
inline Real row_sum(Real x) {
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
    return x;
}

// The lane's share of sum_d dout[d] * out[d], of rows aligned to N elements.
template <int N = CHUNK>
inline Real partial_product(const Element* dout, const Element* out, int lane, int columns) {
    using Part = ChunkOf<N>;
    Real sum = 0;
    for (int d = lane * N; d < columns; d += LANES * N) {
        if (d + N <= columns) {
            const Part a = *reinterpret_cast<const Part*>(dout + d);
            const Part b = *reinterpret_cast<const Part*>(out + d);
            for (int i = 0; i < N; ++i)
                sum = fma(to_accumulator(a.x[i]), to_accumulator(b.x[i]), sum);
        } else {
            for (int i = d; i < columns; ++i)
                sum = fma(to_accumulator(dout[i]), to_accumulator(out[i]), sum);
        }
    }
    return sum;
}
