// sm90/double_backward.cu's warpgroups of scores: from S, W, dP and U to the rounded tiles of
// weights that the other warpgroups multiply.
#pragma once
#include "sm90/double_backward_producer.cuh"
#include "sm90/double_backward_score_mod.cuh"
#include "sm90/backward_roles.cuh"

constexpr bool SCORES_MOVE = Q_DOT || K_DOT;
constexpr int SCORE_COLUMNS = BLOCK_Q / SCORE_WARPGROUPS;   // queries of a warpgroup's scores

// A product that has been waited for; 0 if nothing in it moves, so that none was issued.
template <bool MOVES> __device__ __forceinline__ void complete(float (&product)[S_REGS]) {
    if constexpr (MOVES) warpgroup_fence_operand(product);
    else
        #pragma unroll
        for (float& x : product) x = 0.0f;
}

struct ScoreRole {
    const Arguments& args;
    SharedPlan& shared;
    const int start;                                        // the warpgroup's first query in a tile
    const int thread = threadIdx.x % WARPGROUP, lane = thread % 32, warp_row = thread / 32 * 16;
    const int first_column = start + lane % 4 * 2;          // the lane's
    const float scale_log2 = static_cast<float>(args.arrays.scale) * LOG2_E;
    const u64 k = descriptor(shared_address(&shared.k), 0);
    const u64 k_dot = descriptor(shared_address(&shared.k_dot), 0);
    const u64 v = descriptor(shared_address(&shared.v), 0);
    const u64 v_dot = descriptor(shared_address(&shared.v_dot), 0);

    __device__ __forceinline__ void publish_rounded(
        const float (&x)[S_REGS], const void* tile, const void* full) const {
        u32 rounded[S_REGS / 2];
        pack_pairs<Element>(rounded, x);
        publish(shared_address(tile), shared_address(full), rounded, warp_row, lane, start);
    }

    // Issue the matmuls of the scores of a query tile's queries, in the order in which they are
    // waited for: S.
    __device__ __forceinline__ void issue_s(const IterationStage& stage, float (&s)[S_REGS]) const {
        const int i = stage.q.index;
        mbarrier_wait(shared_address(&shared.q_full[i]), stage.q.phase);
        issue_scores<HEAD_DIM>(s, k, queries(&shared.q[i]));
    }
    // W.
    __device__ __forceinline__ void issue_w(const IterationStage& stage, float (&w)[S_REGS]) const {
        const int n = stage.others.index;
        if constexpr (Q_DOT)
            mbarrier_wait(shared_address(&shared.q_dot_full[n]), stage.others.phase);
        if constexpr (SCORES_MOVE)
            issue_tangents(w, k, k_dot, queries(&shared.q[stage.q.index]),
                           queries(&shared.q_dot[n]));
    }
    // Before dP and U, and before the row statistics, which come with dO.
    __device__ __forceinline__ void wait_for_dout(const IterationStage& stage) const {
        mbarrier_wait(shared_address(&shared.dout_full[stage.others.index]), stage.others.phase);
    }
    __device__ __forceinline__ void issue_dp(
        const IterationStage& stage, float (&dp)[S_REGS]) const {
        issue_scores<HEAD_DIM_V>(dp, v, queries(&shared.dout[stage.others.index]));
    }
    __device__ __forceinline__ void issue_u(const IterationStage& stage, float (&u)[S_REGS]) const {
        if constexpr (V_DOT)
            issue_scores<HEAD_DIM_V>(u, v_dot, queries(&shared.dout[stage.others.index]));
    }
    // The descriptor of the warpgroup's queries of a tile.
    __device__ __forceinline__ u64 queries(const void* tile) const {
        return descriptor(shared_address(tile) + start * PANEL_ROW_BYTES, 0);
    }

    // P (W - b) to shared memory, once the weights of the stage before are read.
    __device__ __forceinline__ void publish_product(
        const IterationStage& stage, const float (&p)[S_REGS], const float (&w)[S_REGS]) const {
        const int n = stage.others.index;
        u32 rounded[S_REGS / 2];
        round_product(rounded, p, w);
        mbarrier_wait(shared_address(&shared.weights_empty[n]), stage.others.phase ^ 1);
        publish(shared_address(&shared.pw[n]), shared_address(&shared.pw_full[n]), rounded,
                warp_row, lane, start);
    }

    // One query tile. `key`: the lane's first.
    __device__ __forceinline__ void iterate(
        const IterationStage& stage, const Mask<CAUSAL, WINDOW>& mask, const MaskBounds& bounds,
        int key) const {
        const int n = stage.others.index;
        const SecondRows& rows = shared.rows[n];
        float s[S_REGS], w[S_REGS], dp[S_REGS], u[S_REGS];
        issue_s(stage, s);
        issue_w(stage, w);
        wait_for_dout(stage);
        issue_dp(stage, dp);
        issue_u(stage, u);
        const bool is_cut = cuts(bounds.first_full, bounds.end_full, rows.q_start);
        const int query = rows.q_start + first_column;      // the lane's first

        wgmma_wait<1 + SCORES_MOVE + V_DOT>();              // S
        warpgroup_fence_operand(s);
        exponentiate(s, LaneRows<>(rows, first_column), scale_log2);
        if (is_cut) zero_masked(s, mask, bounds, query);

        wgmma_wait<1 + V_DOT>();                            // W
        complete<SCORES_MOVE>(w);
        relative_tangents(w, rows, first_column);
        if (is_cut) zero_masked(w, mask, bounds, query);
        publish_product(stage, s, w);

        wgmma_wait<V_DOT>();                                // dP
        warpgroup_fence_operand(dp);
        score_gradients(dp, s, rows, first_column);
        if (is_cut) zero_masked(dp, mask, bounds, query);
        publish_rounded(dp, &shared.ds[n], &shared.ds_full[n]);

        wgmma_wait<0>();                                    // U
        complete<V_DOT>(u);
        second_score_gradients(u, s, w, dp, rows, first_column);
        __syncwarp();
        mbarrier_arrive_if(lane == 0, shared_address(&shared.dout_empty[n]));
        if (is_cut) zero_masked(u, mask, bounds, query);
        publish_rounded(u, &shared.t[n], &shared.t_full[n]);
    }

    // The same with the user's f. dP and U are issued when W has become a part of the weights: the
    // other warpgroup of scores, if there is one, keeps the tensor cores busy. What f is of masked
    // pairs, NaN perhaps, is zeroed in each tile of weights.
    __device__ __forceinline__ void iterate_user(
        const IterationStage& stage, const Mask<CAUSAL, WINDOW>& mask, const MaskBounds& bounds,
        int batch, int key) const {
        const int n = stage.others.index;
        const SecondRows& rows = shared.rows[n];
        float s[S_REGS], w[S_REGS], dp[S_REGS], u[S_REGS];
        issue_s(stage, s);
        issue_w(stage, w);
        wait_for_dout(stage);
        const bool is_cut = cuts(bounds.first_full, bounds.end_full, rows.q_start);
        const int query = rows.q_start + first_column;      // the lane's first
        ScoreMod<float> score_mod(args);
        score_mod.set_head(args, batch, rows.head);
        UserWeights user;

        wgmma_wait<SCORES_MOVE>();                          // S
        warpgroup_fence_operand(s);
        probabilities_of_user(s, user, score_mod, rows, first_column, key);

        wgmma_wait<0>();                                    // W
        complete<SCORES_MOVE>(w);
        weights_of_user(w, s, user, score_mod.scale, rows, first_column);
        issue_dp(stage, dp);
        issue_u(stage, u);
        if (is_cut) zero_masked(w, mask, bounds, query);
        mbarrier_wait(shared_address(&shared.weights_empty[n]), stage.others.phase ^ 1);
        publish_rounded(w, &shared.pw[n], &shared.pw_full[n]);

        wgmma_wait<V_DOT>();                                // dP
        warpgroup_fence_operand(dp);
        score_gradients_of_user(w, dp, user, rows, first_column);
        if (is_cut) zero_masked(w, mask, bounds, query);
        publish_rounded(w, &shared.ds[n], &shared.ds_full[n]);

        wgmma_wait<0>();                                    // U
        complete<V_DOT>(u);
        second_score_gradients_of_user(u, dp, user, rows, first_column);
        __syncwarp();
        mbarrier_arrive_if(lane == 0, shared_address(&shared.dout_empty[n]));
        if (is_cut) zero_masked(u, mask, bounds, query);
        publish_rounded(u, &shared.t[n], &shared.t_full[n]);
    }

    __device__ __forceinline__ void run() const {
        const Shape& shape = args.arrays.shape;
        const Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k, {}};
        IterationStage stage;
        for (WorkState state;; ++state.count) {
            const WorkTile work = acquire_work_tile(shared, state);
            if (work.tile < 0) break;
            __syncwarp();
            release_work_tile(shared, state, lane == 0);
            const QueryTiles tiles = query_tiles(args, work.tile, NoSequence{});
            const int key = work.tile * BLOCK_K + warp_row + lane / 4;
            const MaskBounds bounds(mask, tiles, key);
            int remaining = QueryTileIterator(args, tiles, work).remaining;
            mbarrier_wait(shared_address(&shared.k_full), state.kv_phase());
            mbarrier_wait(shared_address(&shared.v_full), state.kv_phase());
            for (; remaining > 0; --remaining, stage.next())
                if constexpr (SCORE_MOD) iterate_user(stage, mask, bounds, work.batch, key);
                else iterate(stage, mask, bounds, key);
            mbarrier_arrive_if(lane == 0, shared_address(&shared.kv_empty));
        }
    }
};
