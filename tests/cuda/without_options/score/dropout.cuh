// dropout.cuh for kernels of calls without options. What has no body is not to be called.
#pragma once
#include "common/constants.cuh"

template <class Real> struct Dropout {
    Real factor;

    template <class Arguments> explicit Dropout(const Arguments&) {}
    void set_head(int, int) {}
    void set_sequence(int) {}
    template <int COUNT> u32 kept_bits(int query, int key) const;
    Real z_of(u32 kept, int n) const;
    u32 kept_of_four(int query, int key) const;
    Real z(int, int) const { return 1; }
};

template <int M, int N, class Real, class F>
void for_each_kept(const Dropout<Real>& dropout, int query, int key, F f);

template <class Real, int N>
void apply_dropout(Real (&x)[N][4], int half, u32 kept, const Dropout<Real>& dropout);

template <class Real, int M, int N>
void apply_dropout(Real (&x)[M][N][4], const Dropout<Real>& dropout, int query, int key);
