// In place of the user's score_mod, in calls without: what score/expression.cuh has of one.
//
// Any query and key may be passed, also past the arrays' ends. f is pure.
#pragma once
#include "common/types.cuh"

// The user's f of a scaled product or score.
template <class Real> struct ScoreExpression {
    template <class Arguments> void set_head(const Arguments&, int, int, int, int) {}
    // Whether it reads arrays by a pair's indices, and all of those of a range of pairs are inside.
    static constexpr bool READS = false;
    bool reads_inside(int, int, int, int) const { return true; }
    // Whether f(x) = x + added, which is affine in the key. Then edges(values, query, key) are such
    // that step(query, key), its derivative by the key, is the same for all pairs of a tile for
    // which no edge is 0 or changes its sign; an edge is affine in the query and in the key.
    static constexpr bool AFFINE = false;
    // Whether f is a function of the score, the pair and an OfDistance, which
    // of_distance(query, key) computes. Pairs with the same query - key share it: it may be passed
    // to score() last.
    static constexpr bool SHARES = false;
    // Of derivatives along directions: whether the slope depends on the score or on arrays that
    // move.
    static constexpr bool CURVED = false;
    // Up to which square of a score SMALL may be said of it: of none.
    static constexpr float SMALL_SQUARES = 0.0f;
    // f(scale s), and its slope. INSIDE: reads are inside, and need no test.
    template <bool INSIDE = false, bool SMALL = false>
    Real score(Real s, Real scale, int, int) const {
        return s * scale;
    }
    template <bool INSIDE = false, bool SMALL = false>
    Real score(Real s, Real scale, int, int, Real& slope) const {
        slope = 1;
        return s * scale;
    }
    // Sums of (df/da) ds for every array a that has a gradient, over a lane's pairs of a tile, told
    // by Pairs, a LaneGrid. ds is the gradient of f(x) of query i and key j. finish_gradients(), of
    // whole warps, adds the sums to global memory.
    template <class Pairs> struct Gradients {};
    template <class Pairs>
    void add_gradients(Gradients<Pairs>&, const Pairs&, int, int, Real, Real) const {}
    template <class Pairs> void finish_gradients(Gradients<Pairs>&, const Pairs&) const {}
    // With W_X, the tangent of x: what the tangents of arrays add to that of f(x), and the tangent
    // of the slope, in a direction.
    Real of_arrays(Real, Real, int, int, int) const { return 0; }
    Real slope_dot(Real, Real, int, int, int) const { return 0; }
    // Sums of (df/da) t + (df/da)' ds.
    template <class Pairs> void add_second_gradients(
        Gradients<Pairs>&, const Pairs&, int, int, Real, Real, Real, Real) const {}
};
