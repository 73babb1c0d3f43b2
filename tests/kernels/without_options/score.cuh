// score.cuh for kernels of calls without options. What has no body is not to be called.
#pragma once
#include "elements.cuh"

constexpr bool LINEAR = true;
constexpr int NO_HEAD = -1;

template <class Real> struct Steps {
    Real scale;

    template <class Arguments>
    explicit Steps(const Arguments& all) : scale(static_cast<Real>(arrays_of(all).scale)) {}
    template <class Arguments> void set_head(const Arguments&, int, int) {}
    Real bias_of(int, int) const { return 0; }
    Real score(Real product, Real, Real) const { return rounded(product, scale); }
    Real score(Real product, Real, Real, Real& derivative) const {
        derivative = 1;
        return rounded(product, scale);
    }
};

template <class Real> struct WithSink {
    Real top, sum, rescale;
    WithSink(Real m, Real l, Real sink);
};

template <class Real, class Arguments> Real sink_of(const Arguments& arguments, int head);
