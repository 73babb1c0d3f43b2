// Tangents of the scores: how they change in one direction, in which q, k, bias, sink and arrays of
// the user's f may move with the velocities Q', K', B', s' and a' (docs/guide/derivatives.md).
//
//     X' = scale (Q' K^T + Q K'^T),  W = f_x (g X' + B') + sum f_a a'
//
// g: the slope of a softcap; f_x, f_a: of f (score_mod.cuh, expression.cuh); without them 1, 1, 0.
#pragma once
#include "common/constants.cuh"
#include "common/elements.cuh"
#include "score/score_mod.cuh"

constexpr bool SCORES_MOVE = Q_DOT || K_DOT || BIAS_DOT || MOD_DOT;

// Where one head of a direction's tangents (directions, batch, seqlen, heads, columns) begins.
inline const Element* head_start(
    const void* array, const DirectionStrides& stride, int direction, int batch, int head) {
    return static_cast<const Element*>(array)
         + direction * stride.direction + batch * stride.batch + head * stride.head;
}

// Whether the slopes by scale S move.
template <class Real> constexpr bool CURVES = SOFTCAP || ScoreExpression<Real>::CURVED;

// Of a pair, for second derivatives: W; how the slopes g f_x, by scale S, and f_x, by a bias, move;
// the argument of f, and its tangent.
template <class Real> struct PairMotion {
    Real w, bend = 0, bias_bend = 0, argument = 0, x_dot = 0;
};

// Of a pair, T and dS by scale S and T by a bias:
//     T_B = f_x T + f_x' dS,  T_X = g T_B + g' f_x dS X',  dS_X = g f_x dS
template <class Real> struct SecondScores {
    Real tx, ds, t_bias;
    SecondScores(Real t, Real ds, Real slope, Real slope_of_bias, const PairMotion<Real>& motion)
        : tx(t), ds(ds), t_bias(t) {
        if constexpr (BENDS) {
            tx = slope * t;
            this->ds = slope * ds;
        }
        if constexpr (SCORE_MOD) t_bias = slope_of_bias * t;
        if constexpr (CURVES<Real>) tx += motion.bend * ds;
        if constexpr (ScoreExpression<Real>::CURVED) t_bias += motion.bias_bend * ds;
    }
};

// How one head's scores move in one direction. As in bias.cuh, pairs past the arrays' ends read the
// last row's or column's B'.
template <class Real> struct HeadTangent {
    int direction;
    const Bias* first;
    i64 stride_q, stride_k, stride_direction;
    int last_query, last_key;

    template <class Arguments>
    HeadTangent(const Arguments& args, int direction, int batch, int head)
        : direction(direction) {
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
    // W. later: the direction less the first one.
    Real of(const ScoreMod<Real>& score_mod, const Derivatives<Real>& derivatives, Real x_dot,
            int query, int key, int later = 0) const {
        Real w = x_dot;
        if constexpr (BENDS) w *= derivatives.by_product;
        if constexpr (BIAS_DOT) {
            const Real bias_dot = at(query, key, later);
            w += SCORE_MOD ? derivatives.by_bias * bias_dot : bias_dot;
        }
        if constexpr (MOD_DOT)
            w += score_mod.user.of_arrays(
                derivatives.argument, 0, query, key, direction + later);
        return w;
    }
    PairMotion<Real> motion(
        const ScoreMod<Real>& score_mod, const Derivatives<Real>& derivatives, Real product,
        Real x_dot, int query, int key) const {
        PairMotion<Real> found{of(score_mod, derivatives, x_dot, query, key)};
        if constexpr (SOFTCAP) {
            found.bend = score_mod.curvature(product) * x_dot;
            if constexpr (SCORE_MOD) found.bend *= derivatives.by_bias;
        }
        if constexpr (SCORE_MOD) {
            found.argument = derivatives.argument;
            found.x_dot = (SOFTCAP ? derivatives.before_f * x_dot : x_dot) + at(query, key);
            if constexpr (ScoreExpression<Real>::CURVED) {
                found.bias_bend = score_mod.user.slope_dot(
                    found.argument, found.x_dot, query, key, direction);
                found.bend += SOFTCAP ? derivatives.before_f * found.bias_bend : found.bias_bend;
            }
        }
        return found;
    }

    // B'.
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
