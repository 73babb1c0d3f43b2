// Rotations of pairs of columns by the angle of a token's position, from tables.
#pragma once
#include "common/constants.cuh"
#include "common/elements.cuh"

using Real = Accumulator<Element>;

struct Rotation {
    Real cos, sin;
    Real first(Real a, Real b) const { return a * cos - b * sin; }
    Real second(Real a, Real b) const { return a * sin + b * cos; }
};

// Rows of cos and sin. A position outside them makes NaN.
struct RotaryTables {
    const void *cos, *sin;
    TableStrides cos_stride, sin_stride;
    i64 num_positions;

    static Real entry(const void* table, const TableStrides& stride, i64 position, int pair) {
        const i64 index = position * stride.position + pair * stride.column;
        return to_accumulator(static_cast<const Table*>(table)[index]);
    }
    Rotation rotation(i64 position, int pair, bool inverse = false) const {
        const Real nan = __int_as_float(0x7fffffff);
        if (position < 0 || position >= num_positions) return {nan, nan};
        const Real s = entry(sin, sin_stride, position, pair);
        return {entry(cos, cos_stride, position, pair), inverse ? -s : s};
    }
};

inline i64 row_offset(const ElementStrides& stride, i64 batch, i64 token, i64 head) {
    return batch * stride.batch + token * stride.token + head * stride.head;
}
