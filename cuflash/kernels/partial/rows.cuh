// Rows of partial results, which cuflash.distributed merges and adds: VECTOR elements a lane.
//
// Constants: Element, of the second array; First and Result, of the first array and of the result,
// each Element or its Accumulator.
#pragma once
#include "common/types.cuh"
#include "common/elements.cuh"

using Real = Accumulator<Element>;

template <typename T> struct alignas(sizeof(T) * VECTOR) Elements { T values[VECTOR]; };

template <typename T> inline Elements<T> load(const T* row, int column) {
    return *reinterpret_cast<const Elements<T>*>(row + column);
}

// Stores op(a, b) of VECTOR elements of two rows.
template <class Op>
inline void combine(const First* a, const Element* b, Result* result, int column, Op op) {
    const Elements<First> x = load(a, column);
    const Elements<Element> y = load(b, column);
    Elements<Result> z;
    #pragma unroll
    for (int i = 0; i < VECTOR; ++i)
        z.values[i] = from_accumulator<Result>(
            op(Real(to_accumulator(x.values[i])), Real(to_accumulator(y.values[i]))));
    *reinterpret_cast<Elements<Result>*>(result + column) = z;
}

// A token's row of an array whose tokens are contiguous.
template <typename T>
inline T* token_row(T* array, const TokenStrides& stride, i64 batch, i64 token) {
    return array + batch * stride.batch + token * stride.token;
}
