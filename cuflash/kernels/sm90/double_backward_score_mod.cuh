// sm90/double_backward.cu's scores with a user's f (SCORE_MOD), whose arrays do not move:
//
//     x = f(scale S),  P = exp(x - lse),  W = f_x X',  X' = scale (Q' K^T + Q K'^T)
//     T_X = f_x T + f_xx X' dS,  dS_X = f_x dS            (T and dS of simt/double_backward.cuh)
//
// f is called once, while the tensor cores compute W, dP and U. Once W is there, two numbers of a
// pair are left of P, f_x, f_xx and X':
//
//     B = f_x P,  C = P (f_x (W - b) + f_xx X')
//     dS_X = B (dP - D),  T_X = C (dP - D) + B (U - F)
#pragma once
#include "sm90/double_backward_scores.cuh"
#include "score/score_mod.cuh"

// Of a lane's fragment: f_x and f_xx, then B and C.
struct UserWeights { float slopes[S_REGS], bends[S_REGS]; };

// S^T becomes P^T. first_key: the lane's.
template <class Mod>
__device__ __forceinline__ void probabilities_of_user(
    float (&s)[S_REGS], UserWeights& user, const Mod& score_mod, const SecondRows& rows,
    int first_column, int first_key) {
    const int first_query = rows.q_start + first_column;
    if constexpr (SCORE_MOD) {
        const auto& f = score_mod.user;
        const auto apply = [&](auto inside) {
            #pragma unroll
            for (int i = 0; i < S_REGS; ++i) {
                const int query = first_query + i / 4 * 8 + i % 2, key = first_key + i / 2 % 2 * 8;
                s[i] = f.template score<decltype(inside)::value>(
                    s[i], score_mod.scale, query, key, user.slopes[i], user.bends[i]);
                limit_reads(f, i);
            }
        };
        with_reads_tested(f, first_query, first_query + (S_REGS / 4 - 1) * 8 + 1, first_key,
                          first_key + 8, apply);
    }
    // Both are computed here, and nothing that they are computed from stays in registers.
    if constexpr (ScoreExpression<float>::CURVED) {
        warpgroup_fence_operand(user.slopes);
        warpgroup_fence_operand(user.bends);
    }
    exponentiate(s, LaneRows<>(rows, first_column), LOG2_E);
}

// P (W - b), from X' / scale; slopes and bends become B and C.
__device__ __forceinline__ void weights_of_user(
    float (&w)[S_REGS], const float (&p)[S_REGS], UserWeights& user, float scale,
    const SecondRows& rows, int first_column) {
    with_statistic(rows.b, first_column, [&](int i, float b) {
        const float x_dot = w[i] * scale, slope = user.slopes[i];
        const float relative = fmaf(slope, x_dot, -b);
        user.bends[i] = p[i] * fmaf(slope, relative, user.bends[i] * x_dot);
        user.slopes[i] = p[i] * slope;
        w[i] = p[i] * relative;
    });
}

// dS_X, and dP - D from dP.
__device__ __forceinline__ void score_gradients_of_user(
    float (&ds)[S_REGS], float (&dp)[S_REGS], const UserWeights& user, const SecondRows& rows,
    int first_column) {
    with_statistic(rows.delta, first_column, [&](int i, float delta) {
        dp[i] -= delta;
        ds[i] = user.slopes[i] * dp[i];
    });
}

// T_X, from U; dp: dP - D.
__device__ __forceinline__ void second_score_gradients_of_user(
    float (&u)[S_REGS], const float (&dp)[S_REGS], const UserWeights& user,
    const SecondRows& rows, int first_column) {
    with_statistic(rows.product, first_column, [&](int i, float product) {
        u[i] = fmaf(user.bends[i], dp[i], user.slopes[i] * (u[i] - product));
    });
}
