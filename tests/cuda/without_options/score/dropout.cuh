// dropout.cuh for kernels of calls without options. What has no body is not to be called.
#pragma once
#include "common/types.cuh"

template <class Real> struct Dropout {
    Real factor;

    template <class Arguments> explicit Dropout(const Arguments&) {}
    void set_head(int, int) {}
    void set_sequence(int) {}
    template <int COUNT> u32 kept_bits(int query, int key) const;
    u32 kept_of_four(int query, int key) const;
    Real z(int, int) const { return 1; }
};
