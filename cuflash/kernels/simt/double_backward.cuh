// Shared by the two kernels of a double backward on CUDA cores: what one pair contributes.
//
// The cotangents of dq, dk, dv, dbias and dsink are a direction, in which scores move with W, lse
// with b and O with ddO (simt/jvp.cu, score/tangents.cuh). With P, dP and D of backward.cuh and
//
//     U = dO ddV^T,  F = rowsum(dO * ddO)
//     T = P ((dP - D) (W - b) + U - F)             the gradient by scores
//
// and with T_X and g dS, those by scale S (score/tangents.cuh: T and dS without score
// modifications), the second gradients are (docs/guide/derivatives.md; F = E + b D there)
//
//     d2Q = scale ((g dS) ddK + T_X K),  d2K = scale ((g dS)^T ddQ + T_X^T Q)
//     d2V = (P (W - b))^T dO
//
// Dropout's Z multiplies dP, U and, for d2V, P. As in backward.cuh the mask alone says which pairs
// take part.
#pragma once
#include "simt/backward.cuh"
#include "score/tangents.cuh"

// delta: D. product: F.
struct SecondQuery { Real lse, delta, b, product; };

// Of a pair: S = q k, X' / scale = ddq k + q ddk, dP = dO v, U = dO ddv.
struct Products { Real s, x_dot, dp, u; };

// Of a pair: T_X, g dS, T by a bias, and what d2V takes: Z P (W - b); T, dS, how the score moves.
struct SecondWeight {
    Real tx, ds, t_bias, p_dot, t, ds_of_score;
    PairMotion<Real> motion;
};

// The weights of query i and key j; shift = seqlen_k - seqlen_q.
inline SecondWeight second_weight_of(
    const Products& products, const SecondQuery& query, const LseRests<Real>& rests,
    const HeadOptions<Real>& options, const HeadTangent<Real>& tangent, int i, int j,
    int shift) {
    const ScoreMod<Real>& score_mod = options.score_mod;
    Derivatives<Real> derivatives;
    const Real x = score_mod.score(products.s, Real(i + shift - j), i, j, derivatives);
    const Real slope = derivatives.by_product;
    const Real p = exp(x - query.lse - rests.of(i, query.lse)), z = options.dropout.z(i, j);
    const Real x_dot = score_mod.scale * products.x_dot;
    const PairMotion<Real> motion =
        tangent.motion(score_mod, derivatives, products.s, x_dot, i, j);
    const Real relative = motion.w - query.b;               // W - b
    const Real ds = p * ((DROPOUT ? z * products.dp : products.dp) - query.delta);
    const Real t = ds * relative + p * ((DROPOUT ? z * products.u : products.u) - query.product);
    const Real p_dot = p * relative;
    const SecondScores<Real> second(t, ds, slope, derivatives.by_bias, motion);
    return {second.tx, second.ds, second.t_bias, DROPOUT ? z * p_dot : p_dot, t, ds, motion};
}

// One head's pieces of all arrays.
struct SecondHead : Head {
    const Element *q_dot, *k_dot, *v_dot;
    const Real *b, *product;

    SecondHead(const Arguments& args, int batch, int head) : Head(args, batch, head) {
        const Shape& shape = arrays_of(args).shape;
        const TangentNumbers& moves = args.tangents;
        const int kv_head = head / (shape.num_heads_q / shape.num_heads_kv);
        q_dot = head_start(args.q_dot, moves.q_dot, 0, batch, head);
        k_dot = head_start(args.k_dot, moves.k_dot, 0, batch, kv_head);
        v_dot = head_start(args.v_dot, moves.v_dot, 0, batch, kv_head);
        const i64 row = (i64(batch) * shape.num_heads_q + head) * rows_of_head(args);
        b = static_cast<const Real*>(args.lse_dot) + row;
        product = static_cast<const Real*>(args.delta_dot) + row;
    }

    SecondQuery query(int i) const {
        return {effective_lse(lse[i]), delta[i], b[i], product[i]};
    }

    // Tiles of Q, ddQ and dO; of K, ddK, V and ddV. What does not move has no cotangent.
    template <class Shared>
    void load_queries(Shared& shared, const Arguments& args, int start) const {
        const BackwardArguments& a = arrays_of(args);
        const Shape& shape = a.shape;
        load_tile<BLOCK_Q, HEAD_DIM>(
            shared.q, q, a.q_stride.token, start, shape.seqlen_q, shape.head_dim);
        load_tile<BLOCK_Q, HEAD_DIM_V>(
            shared.dout, dout, a.dout_stride.token, start, shape.seqlen_q, shape.head_dim_v);
        if constexpr (Q_DOT) load_tile<BLOCK_Q, HEAD_DIM>(
            shared.q_dot, q_dot, args.tangents.q_dot.token, start, shape.seqlen_q,
            shape.head_dim);
    }
    template <class Shared>
    void load_keys(Shared& shared, const Arguments& args, int start) const {
        const BackwardArguments& a = arrays_of(args);
        const Shape& shape = a.shape;
        load_tile<BLOCK_K, HEAD_DIM>(
            shared.k, k, a.k_stride.token, start, shape.seqlen_k, shape.head_dim);
        load_tile<BLOCK_K, HEAD_DIM_V>(
            shared.v, v, a.v_stride.token, start, shape.seqlen_k, shape.head_dim_v);
        if constexpr (K_DOT) load_tile<BLOCK_K, HEAD_DIM>(
            shared.k_dot, k_dot, args.tangents.k_dot.token, start, shape.seqlen_k,
            shape.head_dim);
        if constexpr (V_DOT) load_tile<BLOCK_K, HEAD_DIM_V>(
            shared.v_dot, v_dot, args.tangents.v_dot.token, start, shape.seqlen_k,
            shape.head_dim_v);
    }
};
