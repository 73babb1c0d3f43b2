// sm90/double_backward.cu's scores with a user's f (SCORE_MOD), whose arrays do not move:
//
//     x = f(scale S),  P = exp(x - lse),  W = f_x X',  X' = scale (Q' K^T + Q K'^T)
//     T_X = f_x T + f_xx X' dS,  dS_X = f_x dS            (T and dS of simt/double_backward.cuh)
//
// f is called once, while the tensor cores compute W, dP and U. f_x and f_xx stay in registers
// until T_X, or are constants, if they are alike for all pairs.
#pragma once
#include "sm90/double_backward_scores.cuh"
#include "score/score_mod.cuh"

// Of a lane's fragment: f_x, and f_xx, then f_xx X', which is how f_x moves.
struct Slopes { float slopes[S_REGS], bends[S_REGS]; };

// S^T becomes P^T. first_key: the lane's.
template <class Mod>
__device__ __forceinline__ void probabilities_of_user(
    float (&s)[S_REGS], Slopes& user, const Mod& score_mod, const SecondRows& rows,
    int first_column, int first_key) {
    const int first_query = rows.q_start + first_column;
    if constexpr (SCORE_MOD) {
        const auto& f = score_mod.user;
        const auto apply = [&](auto inside) {
            #pragma unroll
            for (int i = 0; i < S_REGS; ++i) {
                const int query = first_query + i / 4 * 8 + i % 2, key = first_key + i / 2 % 2 * 8;
                const float product = s[i];
                s[i] = f.template score<decltype(inside)::value>(
                    product, score_mod.scale, query, key, user.slopes[i]);
                // f_xx is how f_x moves with x.
                user.bends[i] =
                    f.slope_dot(rounded(product, score_mod.scale), 1.0f, query, key, 0);
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

// W - b, from X' / scale.
__device__ __forceinline__ void relative_tangents_of_user(
    float (&w)[S_REGS], Slopes& user, float scale, const SecondRows& rows, int first_column) {
    with_statistic(rows.b, first_column, [&](int i, float b) {
        const float x_dot = w[i] * scale;
        user.bends[i] *= x_dot;
        w[i] = fmaf(user.slopes[i], x_dot, -b);
    });
}

// dS by scale S, from dS.
__device__ __forceinline__ void score_gradients_of_user(
    float (&scaled)[S_REGS], const float (&ds)[S_REGS], const Slopes& user) {
    #pragma unroll
    for (int i = 0; i < S_REGS; ++i) scaled[i] = ds[i] * user.slopes[i];
}

// T_X, from T.
__device__ __forceinline__ void second_score_gradients_of_user(
    float (&t)[S_REGS], const float (&ds)[S_REGS], const Slopes& user) {
    #pragma unroll
    for (int i = 0; i < S_REGS; ++i) t[i] = fmaf(t[i], user.slopes[i], user.bends[i] * ds[i]);
}
