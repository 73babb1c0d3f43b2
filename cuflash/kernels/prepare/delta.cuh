// delta = rowsum(dO * O): LANES of a warp share a row of out, in chunks of up to 16 bytes.
#pragma once
#include "common/constants.cuh"
#include "common/elements.cuh"

using Real = Accumulator<Element>;

// layouts.py makes 16-bit rows 16-byte aligned; others are aligned as their elements are.
constexpr int CHUNK = sizeof(Element) == 2 ? 8 : 1;
struct alignas(CHUNK * sizeof(Element)) Chunk { Element x[CHUNK]; };

static_assert(32 % LANES == 0 && NUM_THREADS % 32 == 0, "a row's lanes are of one warp");

// The sum over a row's lanes, in each of them. The order of additions is fixed.
inline Real row_sum(Real x) {
    for (int distance = LANES / 2; distance > 0; distance /= 2)
        x += __shfl_xor_sync(0xFFFFFFFFu, x, distance);
    return x;
}

// The lane's share of sum_d dout[d] * out[d].
inline Real partial_product(const Element* dout, const Element* out, int lane, int columns) {
    Real sum = 0;
    for (int d = lane * CHUNK; d < columns; d += LANES * CHUNK) {
        if (d + CHUNK <= columns) {
            const Chunk a = *reinterpret_cast<const Chunk*>(dout + d);
            const Chunk b = *reinterpret_cast<const Chunk*>(out + d);
            for (int i = 0; i < CHUNK; ++i)
                sum = fma(to_accumulator(a.x[i]), to_accumulator(b.x[i]), sum);
        } else {
            for (int i = d; i < columns; ++i)
                sum = fma(to_accumulator(dout[i]), to_accumulator(out[i]), sum);
        }
    }
    return sum;
}
