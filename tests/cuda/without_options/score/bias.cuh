// bias.cuh for kernels of calls without options. What has no body is not to be called.
#pragma once
#include "common/constants.cuh"

struct BiasChunk { u32 words[4]; };

template <class Real> struct HeadBias {
    const Bias* bias;
    i64 bias_stride_q, bias_stride_k;
    int last_query, last_key;
    bool has_quads() const;
    template <class Arguments> void set_head(const Arguments&, int, int);
};
