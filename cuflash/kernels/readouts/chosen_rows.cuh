// Gradients of weights: which of the chosen queries or, OF_KEYS, keys a block's fixed rows are.
#pragma once
#include "common/constants.cuh"
#include "common/elements.cuh"
#include "readouts/chosen.cuh"

// Of each row: the first choice of it, and how many there are.
template <int ROWS> struct ChosenRows { int first[ROWS], count[ROWS]; };

template <class Arguments> inline int chosen_row(const Arguments& args, int batch, int r) {
    return OF_KEYS ? chosen_key(args, r) : chosen_query(args, batch, r);
}

// Of the rows from token `start` of the call on, to shared memory. Whether any is chosen, the same
// in all threads. Whole block, of `threads`.
template <int ROWS, class Arguments>
inline bool find_chosen_rows(
    ChosenRows<ROWS>& found, const Arguments& args, int batch, int start, int threads) {
    const auto& arrays = arrays_of(args);
    const int choices = OF_KEYS ? arrays.num_keys : arrays.num_queries;
    const bool all = (OF_KEYS ? arrays.keys : arrays.queries) == nullptr;
    bool any = false;
    for (int i = threadIdx.x; i < ROWS; i += threads) {
        int first = start + i, count = first < choices ? 1 : 0;
        if (!all) {
            count = 0;
            for (int r = choices - 1; r >= 0; --r)
                if (chosen_row(args, batch, r) == start + i) {
                    first = r;
                    ++count;
                }
        }
        found.first[i] = first;
        found.count[i] = count;
        any |= count > 0;
    }
    return __syncthreads_or(any);
}

// dW of row `row` and the column that is chosen c-th, for the n-th chosen head: the sum over all
// choices of the row.
template <class Real, int ROWS, class Arguments>
inline Real sum_of_dweights(
    const Arguments& args, const ChosenRows<ROWS>& rows, int batch, int n, int row, int c) {
    const auto& arrays = arrays_of(args);
    const Result* dweights = static_cast<const Result*>(arrays.cotangent)
        + (i64(batch) * arrays.num_heads + n) * arrays.num_queries * i64(arrays.num_keys);
    const i64 stride = OF_KEYS ? 1 : arrays.num_keys, from = c * i64(OF_KEYS ? arrays.num_keys : 1);
    Real sum = 0;
    const int first = rows.first[row];
    int left = rows.count[row], token = 0;
    for (int r = first; left > 0; ++r) {
        if (r == first) {
            if (left > 1) token = chosen_row(args, batch, r);
        } else if (chosen_row(args, batch, r) != token) {
            continue;
        }
        sum += static_cast<Real>(to_accumulator(dweights[from + r * stride]));
        --left;
    }
    return sum;
}
