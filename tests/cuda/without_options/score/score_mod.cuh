// score_mod.cuh for kernels of calls without options. What has no body is not to be called.
#pragma once
#include "common/elements.cuh"
#include "score/bias.cuh"
#include "score/expression.cuh"
#include "score/sink.cuh"

constexpr bool LINEAR = true, BUILT_IN = false, BENDS = false;

template <class Mod>
__device__ __forceinline__ bool reads_inside(const Mod&, int, int, int, int) { return false; }
template <class Mod>
__device__ __forceinline__ bool is_affine_score(const Mod&, int, int, int, int) { return false; }
inline void use_word(u32) {}
template <int, class Mod> __device__ __forceinline__ u32 read_ahead(const Mod&, int, int) {
    return 0;
}
template <class User, class Compute>
void with_reads_tested(const User&, int, int, int, int, Compute);
template <class User> void limit_reads(const User&, int);

template <class Real> struct Derivatives { Real by_product = 1, by_bias = 1, argument = 0; };

template <class Real> struct ScoreMod {
    Real scale;

    template <class Arguments>
    explicit ScoreMod(const Arguments& args) : scale(static_cast<Real>(arrays_of(args).scale)) {}
    template <class Arguments> void set_head(const Arguments&, int, int) {}
    template <class Arguments> void set_sequence(const Arguments&, int, int) {}
    template <class Arguments> void set_user(const Arguments&, int, int, int, int) {}
    Real bias_of(int, int) const { return 0; }
    bool has_row(int) const;
    const Bias* row_of_bias(int, int) const;
    template <int STEP, int N> void load_biases(Real (&)[N], int, int) const;
    Real slope;
    bool has_chunks;
    const BiasChunk* chunks_of_bias(int, int) const;
    Real addend(Real, Real) const;
    template <int GROUP, int N, class Additive>
    void scores(Real (&)[N], Additive, Real (&)[N]) const;
    template <int N> bool fits_tanh_poly4(const float (&)[N]) const;
    template <int N> bool fits_tanh_poly3(const float (&)[N], float) const;
    float poly3_factor_log2(float) const;
    float poly4_score(float) const;
    float poly4_factor_log2(float) const;
    float poly4_tanh(float) const;
    Real score(Real product, Real, int, int) const { return rounded(product, scale); }
    Real score(Real product, Real, int, int, Derivatives<Real>& derivatives) const {
        derivatives.by_product = 1;
        return rounded(product, scale);
    }
    Real score(Real, Real, Real, int, int) const;
    Real score(Real, Real, Real, int, int, Derivatives<Real>&) const;
    template <class Pairs>
    using ArraySums = typename ScoreExpression<Real>::template Gradients<Pairs>;
    template <class Pairs>
    void add_gradients(ArraySums<Pairs>&, const Pairs&, int, int, const Derivatives<Real>&,
                       Real) const {}
    template <class Pairs> void finish_gradients(ArraySums<Pairs>&, const Pairs&) const {}
};
