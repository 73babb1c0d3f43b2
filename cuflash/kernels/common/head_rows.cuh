// Rows of an array, read by one warp element by element, for the few rows of gradients that are
// recomputed. Slow.
#pragma once
#include "common/constants.cuh"
#include "common/softmax.cuh"

// One head's rows of an array, by token.
struct HeadRows {
    const Element* first;
    i64 stride;
    __device__ __forceinline__ HeadRows(const void* array, Strides stride, int batch, int head)
        : first(static_cast<const Element*>(array) + batch * stride.batch + head * stride.head),
          stride(stride.token) {}
    __device__ __forceinline__ float at(int token, int column) const {
        return to_float(first[token * stride + column]);
    }
};

__device__ __forceinline__ bool is_nonfinite(float x) { return !(fabsf(x) < infinity()); }

// The dot product of two rows, in every lane of the warp.
__device__ __forceinline__ float row_product(
    const HeadRows& a, int i, const HeadRows& b, int j, int columns) {
    float sum = 0.0f;
    for (int d = threadIdx.x % 32; d < columns; d += 32) sum += a.at(i, d) * b.at(j, d);
    for (int distance = 16; distance > 0; distance /= 2)
        sum += __shfl_xor_sync(WHOLE_WARP, sum, distance);
    return sum;
}
