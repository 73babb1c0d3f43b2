// Score modifications: what happens to S = Q K^T before the softmax (docs/guide/options.md).
//
//     x = scale S,  x = cap tanh(x / cap),  x = x + (bias - slope |distance|),  x = f(x)
//
// distance = query + seqlen_k - seqlen_q - key: by how many tokens the key precedes the query. f is
// the user's score_mod (SCORE_MOD, expression.cuh), a function of the pair's indices too.
// Forward and backward call the same functions, so a pair has bitwise the same score in both.
// Exceptions: the division that scores() shares among neighbours, the softcap's polynomials
// (softcap.cuh), and ALiBi on tensor cores in sm90/forward.cu (alibi_mma.cuh).
//
// A call without SOFTCAP, ALIBI, BIAS and SCORE_MOD has LINEAR scores, scale S, which kernels may
// compute in other ways. Where scores BEND, dx / d(scale S) is not 1.
#pragma once
#include "score/affine.cuh"
#include "score/alibi.cuh"
#include "score/bias.cuh"
#include "score/expression.cuh"
#include "score/sink.cuh"
#include "score/softcap.cuh"

constexpr bool LINEAR = !SOFTCAP && !ALIBI && !BIAS && !SCORE_MOD;
constexpr bool BUILT_IN = SOFTCAP || ALIBI || BIAS;         // what comes before f
constexpr bool BENDS = SOFTCAP || SCORE_MOD;

template <class Real> struct SoftmaxScale { Real scale; };

// The derivatives of a pair's score x.
//
// by_product: dx / d(scale S). by_bias: dx / dbias, the slope of f. argument: x before f, where f
// has its other derivatives, and before_f its derivative by scale S; only with SCORE_MOD.
template <class Real> struct Derivatives {
    Real by_product = 1, by_bias = 1, argument = 0, before_f = 1;
};

// Whether the user's score reads arrays, inside alone, of queries [first_query, last_query] and
// keys [first_key, last_key].
template <class Mod>
__device__ __forceinline__ bool reads_inside(
    const Mod& score_mod, int first_query, int last_query, int first_key, int last_key) {
    if constexpr (SCORE_MOD)
        if constexpr (decltype(score_mod.user)::READS)
            return score_mod.user.reads_inside(first_query, last_query, first_key, last_key);
    return false;
}

// Whether the user's score is affine in the key, of the same.
template <class Mod>
__device__ __forceinline__ bool is_affine_score(
    const Mod& score_mod, int first_query, int last_query, int first_key, int last_key) {
    if constexpr (SCORE_MOD)
        return is_affine<float>(score_mod.user, first_query, last_query, first_key, last_key);
    return false;
}

// Calls compute(Bool<INSIDE>), INSIDE for a warp all of whose reads are inside the arrays. Whole
// warp; each lane's own pairs are those of queries [first_query, last_query] and keys
// [first_key, last_key].
template <class User, class Compute>
__device__ __forceinline__ void with_reads_tested(
    const User& user, int first_query, int last_query, int first_key, int last_key,
    Compute compute) {
    if constexpr (User::READS) {
        const bool inside = user.reads_inside(first_query, last_query, first_key, last_key);
        if (__ballot_sync(0xFFFFFFFFu, inside) == 0xFFFFFFFFu) return compute(Bool<true>{});
    }
    compute(Bool<false>{});
}

// Calls compute(Bool<SMALL>), SMALL for a warp all of whose N scores scale S are as small as
// SMALL_SQUARES says. Whole warp.
template <int N, class Mod, class Compute>
__device__ __forceinline__ void with_size_tested(
    const Mod& score_mod, const float (&products)[N], Compute compute) {
    if constexpr (SCORE_MOD)
        if constexpr (decltype(score_mod.user)::SMALL_SQUARES > 0) {
            constexpr float SQUARES = decltype(score_mod.user)::SMALL_SQUARES;
            // Less than infinity, which a sum of large squares may be.
            const float most = fminf(SQUARES / (score_mod.scale * score_mod.scale), 3e38f);
            if (squares_fit(products, most)) return compute(Bool<true>{});
        }
    compute(Bool<false>{});
}

// After pair i of a lane: limits the loads in flight, each of which needs registers.
template <class User> __device__ __forceinline__ void limit_reads(const User&, int i) {
    if (User::READS && i % 8 == 7) __syncwarp();
}

// Reads one in each 32 bytes of what pairs of COUNT distances share, those from query - first_key
// down, so that it is in L1 when a warp needs it: L2 takes longer than a tile's product. Whole
// warp.
template <int COUNT, class Mod>
__device__ __forceinline__ u32 read_ahead(const Mod& score_mod, int query, int first_key) {
    u32 word = 0;
    if constexpr (SCORE_MOD)
        if constexpr (decltype(score_mod.user)::SHARES && decltype(score_mod.user)::READS) {
            constexpr int STEP = (COUNT + 31) / 32;         // of a lane, in floats
            static_assert(STEP <= 8, "floats of 32 bytes");
            const auto shared =
                score_mod.user.of_distance(query, first_key + threadIdx.x % 32 * STEP);
            if constexpr (sizeof(shared) >= sizeof(word)) memcpy(&word, &shared, sizeof(word));
        }
    return word;
}
// Uses the word that read_ahead() read: the compiler would drop the read otherwise. The fence would
// change nothing, and does not run: no arithmetic makes a NaN of these bits.
__device__ __forceinline__ void use_word(u32 word) {
    if (word == 0x7FEDCBA9) __threadfence();
}

// The user's function of one head.
template <class Real, bool> struct UserScore { ScoreExpression<Real> user; };
template <class Real> struct UserScore<Real, false> {};

// One head's score modifications.
template <class Real>
struct ScoreMod : SoftmaxScale<Real>, Softcap<Real>, Alibi<Real>, HeadBias<Real>,
                  UserScore<Real, SCORE_MOD> {
    using SoftmaxScale<Real>::scale;

    template <class Arguments>
    explicit ScoreMod(const Arguments& args)
        : SoftmaxScale<Real>{static_cast<Real>(arrays_of(args).scale)}, Softcap<Real>(args) {}

    template <class Arguments> void set_head(const Arguments& args, int batch, int head) {
        Alibi<Real>::set_head(args, batch, head);
        HeadBias<Real>::set_head(args, batch, head);
        if constexpr (SCORE_MOD) {
            const Shape& shape = arrays_of(args).shape;
            if constexpr (PACKED)
                set_user(args, args.options.sequence, head, shape.seqlen_q, shape.seqlen_k);
            else
                set_user(args, batch, head, shape.seqlen_q, shape.seqlen_k);
        }
    }
    // After set_head(), in kernels whose blocks take one packed sequence after another.
    template <class Arguments>
    void set_user(const Arguments& args, int sequence, int head, int seqlen_q, int seqlen_k) {
        if constexpr (SCORE_MOD) this->user.set_head(args, sequence, head, seqlen_q, seqlen_k);
    }

    // bias - slope |distance|
    Real addend(Real distance, Real bias) const {
        if constexpr (ALIBI && BIAS) return fma(-this->slope, fabs(distance), bias);
        else if constexpr (ALIBI) return rounded(-this->slope, fabs(distance));
        else return bias;
    }

    // All but f: N products S become scores x. Any other modification belongs here, and its
    // derivative with it.
    //
    // additive(i): the addend of the i-th. derivative: dx / d(scale S). With a softcap,
    // GROUP neighbours share one division: if one S is NaN, all scores of its group are.
    template <int GROUP, int N, class Additive>
    void scores(Real (&x)[N], Additive additive, Real (&derivative)[N]) const {
        if constexpr (SOFTCAP) this->template cap<GROUP>(x, derivative, scale);
        #pragma unroll
        for (int i = 0; i < N; ++i) {
            if constexpr (!SOFTCAP) derivative[i] = 1;
            if constexpr (!SOFTCAP && !ALIBI && !BIAS) x[i] = rounded(x[i], scale);
            else if constexpr (!SOFTCAP) x[i] = fma(x[i], scale, additive(i));
            else if constexpr (ALIBI || BIAS) x[i] += additive(i);
        }
    }

    // The same for a warp's products that fits_tanh_poly4() accepts.
    template <int N, class Additive>
    void poly4_scores(float (&x)[N], Additive additive, float (&derivative)[N]) const {
        #pragma unroll
        for (int i = 0; i < N; ++i) {
            const float capped = this->poly4_score(x[i]), t = capped * this->inverse_softcap;
            derivative[i] = fmaf(-t, t, 1.0f);
            x[i] = capped + additive(i);
        }
    }

    // The score of one product. SMALL: with_size_tested().
    template <bool SMALL = false>
    Real score(
        Real product, Real distance, int query, int key, Derivatives<Real>& derivatives) const {
        return score<SMALL>(product, this->bias_of(query, key), distance, query, key, derivatives);
    }
    template <bool SMALL = false>
    Real score(Real product, Real bias, Real distance, int query, int key,
               Derivatives<Real>& derivatives) const {
        Real x[1] = {product}, slope_of_x[1];
        scores<1>(x, [&](int) { return addend(distance, bias); }, slope_of_x);
        derivatives.by_product = slope_of_x[0];
        if constexpr (SCORE_MOD) {
            derivatives.argument = x[0];
            derivatives.before_f = slope_of_x[0];
            x[0] = BUILT_IN
                ? this->user.score(x[0], Real(1), query, key, derivatives.by_bias)
                : this->user.template score<false, SMALL>(
                      product, scale, query, key, derivatives.by_bias);
            derivatives.by_product *= derivatives.by_bias;
        }
        return x[0];
    }
    // g' = d^2 x / d(scale S)^2 = -2 g tanh(scale S / cap) / cap of one product.
    Real curvature(Real product) const {
        if constexpr (SOFTCAP) {
            Real capped[1] = {product}, slope[1];
            this->template cap<1>(capped, slope, scale);
            const Real tanh_by_cap = capped[0] * this->inverse_softcap * this->inverse_softcap;
            return -2 * tanh_by_cap * slope[0];
        } else {
            return 0;
        }
    }

    // Sums of a lane's pairs of a tile for the gradients of the user's arrays (DMOD). ds: the
    // gradient of the score of query i and key j of `pairs` (lane_grid.cuh), 0 of a masked pair.
    template <class Pairs>
    using ArraySums = typename ScoreExpression<Real>::template Gradients<Pairs>;
    template <class Pairs>
    void add_gradients(ArraySums<Pairs>& sums, const Pairs& pairs, int i, int j,
                       const Derivatives<Real>& derivatives, Real ds) const {
        if constexpr (DMOD) this->user.add_gradients(sums, pairs, i, j, derivatives.argument, ds);
    }
    // The same of second gradients, at a pair whose score moves: `motion` is that of tangents.cuh.
    template <class Pairs, class Motion>
    void add_second_gradients(ArraySums<Pairs>& sums, const Pairs& pairs, int i, int j,
                              const Motion& motion, Real t, Real ds) const {
        if constexpr (DMOD)
            this->user.add_second_gradients(
                sums, pairs, i, j, motion.argument, motion.x_dot, t, ds);
    }
    // After a tile's pairs, by whole warps.
    template <class Pairs> void finish_gradients(ArraySums<Pairs>& sums, const Pairs& pairs) const {
        if constexpr (DMOD) this->user.finish_gradients(sums, pairs);
    }
    Real score(Real product, Real distance, int query, int key) const {
        return score(product, this->bias_of(query, key), distance, query, key);
    }
    Real score(Real product, Real bias, Real distance, int query, int key) const {
        Real x[1] = {product}, slope_of_x[1];
        scores<1>(x, [&](int) { return addend(distance, bias); }, slope_of_x);
        if constexpr (SCORE_MOD && BUILT_IN) return this->user.score(x[0], Real(1), query, key);
        else if constexpr (SCORE_MOD) return this->user.score(product, scale, query, key);
        else return x[0];
    }
};
