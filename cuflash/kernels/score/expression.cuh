// The user's functions of one head, score_mod (SCORE_MOD) and mask_mod (MASK_MOD). This file is for
// calls without; for others cuflash/expressions/text.py writes it, with the same members.
//
// Any query and key may be passed, also past the arrays' ends. f and visible() are pure.
#pragma once
#include "score/visibility.cuh"

constexpr bool MASK_OF_BATCH = false, MASK_OF_HEAD = false;    // what the mask depends on

// The user's f of a scaled product or score.
template <class Real> struct ScoreExpression {
    template <class Arguments> void set_head(const Arguments&, int, int, int, int) {}
    // Whether it reads arrays by a pair's indices, and all of those of a range of pairs are inside.
    static constexpr bool READS = false;
    bool reads_inside(int, int, int, int) const { return true; }
    // f(scale s), and its slope. INSIDE: they are, and need no test.
    template <bool INSIDE = false> Real score(Real s, Real scale, int, int) const {
        return s * scale;
    }
    template <bool INSIDE = false> Real score(Real s, Real scale, int, int, Real& slope) const {
        slope = 1;
        return s * scale;
    }
    // Sums of (df/da) ds for every array a that has a gradient, over a lane's pairs of a tile, which
    // Pairs, a LaneGrid, tells; ds is the gradient of f(x) of query i and key j. finish_gradients
    // adds them to global memory. By whole warps.
    template <class Pairs> struct Gradients {};
    template <class Pairs>
    void add_gradients(Gradients<Pairs>&, const Pairs&, int, int, Real, Real) const {}
    template <class Pairs> void finish_gradients(Gradients<Pairs>&, const Pairs&) const {}
};

struct MaskExpression {
    template <class Arguments> void set_head(const Arguments&, int, int, int, int) {}
    bool visible(int, int) const { return true; }
    // Of queries [first_query, last_query] and keys [first_key, last_key]; PARTLY also means
    // unknown. WHOLE_WARP: called by all lanes with the same tile, otherwise by one.
    template <bool WHOLE_WARP> Visibility visibility(int, int, int, int) const {
        return Visibility::ALL;
    }
};
