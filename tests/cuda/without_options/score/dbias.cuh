// dbias.cuh for kernels of calls without options. What has no body is not to be called.
#pragma once
#include "common/types.cuh"

struct BiasGradient {
    template <class Arguments> void set_head(const Arguments&, int, int) {}
    void add(int query, int key, Accumulator<Element> ds) const;
    bool has_quads() const;
    void add_quad(int query, int key, const float (&ds)[4]) const;
    void add_masked(int query, int key) const;
    Accumulator<Element>* row(int query, int key) const;
};
