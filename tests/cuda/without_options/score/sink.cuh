// sink.cuh for kernels of calls without options. What has no body is not to be called.
#pragma once
#include "common/softmax.cuh"

constexpr int NO_HEAD = -1;

template <class Real> inline Real lse_of_row(Real m, Real l) {
    if (l == 0) return -Real(infinity());
    const bool overflows = l != l && m * Real(1.4426950408889634) == Real(infinity());
    return overflows ? Real(infinity()) : m + log(l);
}

template <class Real> struct WithSink {
    Real top, sum, rescale;
    WithSink(Real m, Real l, Real sink);
};

template <class Real, class Arguments> Real sink_of(const Arguments& args, int head);
