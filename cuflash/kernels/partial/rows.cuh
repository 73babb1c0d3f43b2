// Rows of partial results, which cuflash.distributed merges and adds: VECTOR elements a lane.
#pragma once
#include "common/constants.cuh"
#include "common/elements.cuh"

using Real = Accumulator<Element>;

constexpr int MOST_OTHERS = 3;                              // b0, b1, b2
static_assert(0 < COUNT && COUNT <= MOST_OTHERS, "a and up to three more arrays");

template <typename T> struct alignas(sizeof(T) * VECTOR) Elements { T values[VECTOR]; };

template <typename T> inline Elements<T> load(const T* row, int column) {
    return *reinterpret_cast<const Elements<T>*>(row + column);
}

// A token's row of an array whose tokens are contiguous.
template <typename T>
inline T* token_row(T* array, const TokenStrides& stride, i64 batch, i64 token) {
    return array + batch * stride.batch + token * stride.token;
}

// A token's rows of all arrays, from column `first` on.
struct Rows {
    const First* a;
    const Element* others[COUNT];
    Result* result;

    template <class Arguments>
    __device__ Rows(const Arguments& args, i64 batch, i64 token, int first = 0)
        : a(token_row(static_cast<const First*>(args.a), args.a_stride, batch, token) + first),
          result(token_row(static_cast<Result*>(args.result), args.result_stride, batch, token)
                 + first) {
        const void* const arrays[MOST_OTHERS] = {args.b0, args.b1, args.b2};
        const TokenStrides strides[MOST_OTHERS] = {args.b0_stride, args.b1_stride, args.b2_stride};
        #pragma unroll
        for (int i = 0; i < COUNT; ++i)
            others[i] =
                token_row(static_cast<const Element*>(arrays[i]), strides[i], batch, token) + first;
    }

    // Stores op(elements of a, b0, ...) for VECTOR columns. The result may be a.
    template <class Op> __device__ void combine(int column, Op op) const {
        const Elements<First> x = load(a, column);
        Elements<Element> y[COUNT];
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) y[i] = load(others[i], column);
        Elements<Result> z;
        #pragma unroll
        for (int j = 0; j < VECTOR; ++j) {
            Real elements[1 + COUNT] = {Real(to_accumulator(x.values[j]))};
            #pragma unroll
            for (int i = 0; i < COUNT; ++i) elements[1 + i] = Real(to_accumulator(y[i].values[j]));
            z.values[j] = from_accumulator<Result>(op(elements));
        }
        *reinterpret_cast<Elements<Result>*>(result + column) = z;
    }
};
