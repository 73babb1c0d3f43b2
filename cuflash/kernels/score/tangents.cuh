// Tangents of the scores: how they change in one direction, in which q, k, bias and sink may move
// with the velocities Q', K', B' and s' (docs/guide/derivatives.md).
//
//     X' = scale (Q' K^T + Q K'^T),  W = g X' + B',  g = dx / d(scale S): score_mod.cuh
#pragma once
#include "common/constants.cuh"
#include "common/elements.cuh"

constexpr bool SCORES_MOVE = Q_DOT || K_DOT || BIAS_DOT;

// Where one head of a direction's tangents (directions, batch, seqlen, heads, columns) begins.
inline const Element* head_start(
    const void* array, const DirectionStrides& stride, int direction, int batch, int head) {
    return static_cast<const Element*>(array)
         + direction * stride.direction + batch * stride.batch + head * stride.head;
}

// B' of one head in one direction. As in bias.cuh, pairs past the arrays' ends read the last row's
// or column's.
template <class Real> struct BiasTangent {
    const Bias* first;
    i64 stride_q, stride_k, stride_direction;
    int last_query, last_key;

    template <class Arguments>
    BiasTangent(const Arguments& args, int direction, int batch, int head) {
        if constexpr (BIAS_DOT) {
            const PairStrides& stride = args.tangents.bias_dot;
            first = static_cast<const Bias*>(args.bias_dot)
                  + direction * args.tangents.bias_dot_direction
                  + batch * stride.batch + head * stride.head;
            stride_q = stride.query;
            stride_k = stride.key;
            stride_direction = args.tangents.bias_dot_direction;
            last_query = arrays_of(args).shape.seqlen_q - 1;
            last_key = arrays_of(args).shape.seqlen_k - 1;
        }
    }
    // later: the direction less the first one.
    Real at(int query, int key, int later = 0) const {
        if constexpr (BIAS_DOT)
            return static_cast<Real>(to_accumulator(
                first[min(query, last_query) * stride_q + min(key, last_key) * stride_k
                      + later * stride_direction]));
        else
            return 0;
    }
};

// s' of one head in one direction. Tokens outside all packed sequences have no sink.
template <class Real, class Arguments>
inline Real sink_tangent_of(const Arguments& args, int direction, int head) {
    if constexpr (SINK_DOT) {
        if (PACKED && args.options.sequence == args.options.num_sequences) return 0;
        return static_cast<const Real*>(args.sink_dot)[
            direction * args.tangents.sink_dot_direction + head * args.tangents.sink_dot];
    } else {
        return 0;
    }
}
