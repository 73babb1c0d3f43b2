// A consumer warpgroup of forward.cu: 64 queries of a tile.
#pragma once
#include "sm90/forward_recompute.cuh"
#include "sm90/forward_scores.cuh"

// What steps do besides, as arguments of theirs: closures of plain steps are as if there were none.
struct NoStepOptions { static constexpr bool any = false; };
template <class A, class B, class C, class D, class E, class F> struct StepOptions {
    static constexpr bool any = true;
    const A& find_tile; const B& tiles_left; const C& begin_steps; const D& take_steps;
    const E& hide; const F& drop;
};
template <bool ANY, class A, class B, class C, class D, class E, class F>
__device__ __forceinline__ auto step_options(
    const A& find_tile, const B& tiles_left, const C& begin_steps, const D& take_steps,
    const E& hide, const F& drop) {
    if constexpr (ANY)
        return StepOptions<A, B, C, D, E, F>{
            find_tile, tiles_left, begin_steps, take_steps, hide, drop};
    else return NoStepOptions{};
}

__device__ __forceinline__ void compute_all(const Arguments& arguments,
                                            SharedPlan& shared) {
    auto&& shape = own_shape(arguments);
    // Known to be a warp's, and all that follows from it: so which tiles a warp is at, and their
    // descriptors, are computed once for 32 lanes, and the products need not fetch them from there.
    const int group = __shfl_sync(WHOLE_WARP, static_cast<int>(threadIdx.x / WARPGROUP), 0) - 1;
    const int lane = threadIdx.x % 32, group_row = group * GROUP_ROWS;
    const int warp_row = (threadIdx.x / 32 - 4) * 16, lane_row = warp_row + lane / 4;
    const float scale = fabsf(static_cast<float>(arguments.arrays.scale));
    // Never 0: 0 * inf is NaN.
    const float c = LINEAR ? fmaxf(scale * LOG2_E, 1.2e-38f) : LOG2_E;
    Mask<CAUSAL, WINDOW> mask{shape.seqlen_q, shape.seqlen_k};
    if constexpr (WINDOW) mask.window = window_of<WINDOW>(arguments);
    ScoreMod<float> steps(arguments);
    Pairs pairs(arguments, 0);
    Dropout<float> dropout(arguments);
    bool biases_come = false;                               // of the key tile at hand

    const u64 q_rows = descriptor(
        shared_address(&shared.q_then_out) + group_row * PANEL_ROW_BYTES, 0);
    const u64 k_tile = descriptor(shared_address(&shared.k), 0);
    const u64 v_tile = descriptor(shared_address(&shared.v), BLOCK_K * PANEL_ROW_BYTES);
    const u32 q_full = shared_address(&shared.q_full), q_empty = shared_address(&shared.q_empty);
    const u32 k_full = shared_address(&shared.k_full), k_empty = shared_address(&shared.k_empty);
    const u32 v_full = shared_address(&shared.v_full), v_empty = shared_address(&shared.v_empty);

    float s[S_COUNT], acc[O_COUNT], rescale[2];
    bool started = false;                                   // acc holds something
    bool exact = true;                                      // all rows so far
    u32 p[P_COUNT];
    Rows rows = no_rows();
    PipelineState<Q_STAGES> q;
    PipelineState<KV_STAGES> k, v{KV_STAGES - 1, 1};        // v: of P, the last key tile; k: next

    const auto await_turn = [&] {
        barrier_sync(FIRST_TURN + group, TURN_THREADS);
    };
    const auto pass_turn = [&] {
        barrier_arrive(FIRST_TURN + (group + 1) % MATH_WARPGROUPS, TURN_THREADS);
    };
    SlopeRows<SLOPES_IN_PRODUCT> slopes;
    const auto issue_scores = [&](int tile) {
        gemm_abt_ss<Element, NEGATE_SCORES ? -1 : 1, BLOCK_Q, BLOCK_K, HEAD_DIM>(
            s, advance(q_rows, q.index * static_cast<int>(sizeof(shared.q_then_out[0]))),
            advance(k_tile, k.index * static_cast<int>(sizeof(shared.k[0]))));
        slopes.multiply_add(s, tile * BLOCK_K, shared.slope_keys());
        wgmma_commit();
    };
    const auto issue_output = [&] {
        gemm_ab_rs<Element, BLOCK_K>(
            acc, p, advance(v_tile, v.index * static_cast<int>(sizeof(shared.v[0]))), started);
        wgmma_commit();
        started = true;
    };
    const auto await_output = [&] {
        wgmma_wait<0>();
        warpgroup_fence_operand(acc);
        if (lane == 0) mbarrier_arrive(v_empty + 8 * v.index);
    };

    // Of the query tile at hand: the lane's first row, and the key tiles that the warpgroup visits.
    // Of those that are loaded it may have no use for the last few. To leave them out it must have
    // waited for them, but without giving back the one that P waits for: KV_STAGES - 1 at most.
    int first_row, num_skipped;
    KeyTiles visited;
    int ids[2];                                             // of the lane's rows, with SEGMENTS
    int listed = 0;                                         // of the last key tile, if SPARSE_TILES
    const auto begin_tile = [&] {
        mbarrier_wait(q_full + 8 * q.index, q.phase);
        const Work& work = shared.work[work_slot(q)];
        if (work.queries.num_rows == 0) return false;
        first_row = work.queries.first + lane_row;
        set_lengths(shape, work.queries);
        set_lengths(mask, work.queries);
        visited = key_tiles(mask, work.queries.first + group_row, GROUP_ROWS);
        // Down to the block's first, which others may see.
        if constexpr (WINDOW) visited.first = first_key_tile(mask, work.queries.first);
        if (group_row >= work.queries.num_rows) visited.num_visited = visited.first + 1;
        num_skipped = min(work.num_visited - visited.num_visited, KV_STAGES - 1);
        visited.num_visited = work.num_visited - num_skipped;
        steps.set_head(arguments, work.queries.batch, work.queries.head);
        slopes.set_head(steps.slope, steps.scale,
                        work.queries.first + group_row + shape.seqlen_k - shape.seqlen_q);
        pairs.set_head(work.queries.head);
        dropout.set_head(work.queries.batch, work.queries.head);
        dropout.set_sequence(number_of(work.queries));
        if constexpr (PAIRWISE) pairs.batch = work.queries.batch;
        if constexpr (SEGMENTS)
            #pragma unroll
            for (int half = 0; half < 2; ++half)
                ids[half] = pairs.id_of_query(min(first_row + half * 8, shape.seqlen_q - 1));
        return true;
    };
    const auto skip_tiles = [&] {
        if constexpr (!SPARSE_TILES) for (int i = 0; i < num_skipped; ++i) {
            mbarrier_wait(k_full + 8 * k.index, k.phase);
            await_turn();
            pass_turn();
            if (lane == 0) mbarrier_arrive(k_empty + 8 * k.index);
            mbarrier_wait(v_full + 8 * k.index, k.phase);
            if (lane == 0) mbarrier_arrive(v_empty + 8 * k.index);
            k.next();
        }
    };

    // Of key tile `tile`. A single place of Q is given back after its last S.
    const auto scores_done = [&](int tile) {
        warpgroup_fence_operand(s);
        if (lane == 0) mbarrier_arrive(k_empty + 8 * k.index);
        if (Q_STAGES == 1 && tile == 0 && lane == 0) mbarrier_arrive(q_empty);
    };
    const auto mask_scores = [&](int tile) {
        if (tile < visited.num_full) return;
        apply_mask(s, mask, first_row, tile * BLOCK_K);
    };
    // What steps with OPTIONS do besides. They know their key tile when it has come.
    const auto find_tile = [&](int expected) {
        if constexpr (SPARSE_TILES) {
            listed = shared.beside.words[k.index];
            return listed >> TILE_SHIFT;
        } else {
            return expected;
        }
    };
    const auto tiles_left = [&](int tile) {
        return SPARSE_TILES ? (listed & LAST_BIT) == 0 : tile - visited.first;
    };
    const auto begin_steps = [&](int tile) {
        biases_come = load_biases(shared, steps, shape.seqlen_k, first_row, tile * BLOCK_K);
    };
    // Whether products are left as they are, which are slight.
    Origins origins;
    const auto take_steps = [&](int tile, auto may_leave) {
        if constexpr (SLOPES_IN_PRODUCT) {
            origins = {};
            if (slopes.side != Side::ACROSS) {
                const int past = first_row + shape.seqlen_k - shape.seqlen_q
                               - slopes.nearest_key(tile * BLOCK_K);
                for (int half = 0; half < 2; ++half)
                    origins.of[half] = steps.added(static_cast<float>(past + half * 8), 0.0f);
                origins.factor = steps.scale;
                return false;
            }
        }
        if constexpr (may_leave.value)
            if (steps.fits_tanh_poly3(s, fminf(rows.cm[0], rows.cm[1]))) return true;
        if constexpr (!LINEAR)
            apply_steps(
                s, steps, shared, biases_come, shape.seqlen_k - shape.seqlen_q, first_row,
                tile * BLOCK_K);
        if constexpr (BIASES_AHEAD)
            if (tile > visited.first) begin_steps(tile - 1);
        return false;
    };
    const auto hide = [&](int tile) {
        if constexpr (SEGMENTS)
            if ((listed & HIDDEN_BIT) != 0)
                hide_segments(s, shared.beside.ids(k), ids, (listed & ONE_ID_BIT) != 0);
        if constexpr (HAS_MASK) hide_pairs(s, pairs, shape, first_row, tile * BLOCK_K);
        if (visited.full(tile)) return;
        apply_mask(s, mask, first_row, tile * BLOCK_K);
    };
    const auto drop = [&](int tile) {
        if constexpr (DROPOUT) apply_dropout(s, dropout, first_row, tile * BLOCK_K);
    };
    const auto options =
        step_options<OPTIONS>(find_tile, tiles_left, begin_steps, take_steps, hide, drop);

    // The place of Q from which the warp's rows are on their way out, -1 if none: it is given back
    // a step later, when they surely have been read.
    int unread = -1;
    const auto release_place = [&] {
        if (unread >= 0 && lane == 0) {
            tma_store_wait_read<0>();
            mbarrier_arrive(q_empty + 8 * unread);
        }
        unread = -1;
    };

    // The rows of the query tile whose work is at `place`: out through the place of its Q, or from
    // the registers if there is only one, which is taken again.
    const auto finish = [&](int place) {
        const Queries queries = shared.work[place].queries;
        const ForwardArguments& arrays = arguments.arrays;
        exact &= normalise(
            arguments, acc, rows, c, lane_row, queries, lse_of(arrays, queries));
        if constexpr (Q_STAGES > 1) {
            const u32 tile = shared_address(&shared.q_then_out)
                           + place * static_cast<int>(sizeof(shared.q_then_out[0]));
            store_to_tile(tile + warp_row * PANEL_ROW_BYTES, acc);
            fence_async_proxy();
            __syncwarp();
            // Behind a packed sequence's last row comes the next one's first.
            const bool by_rows = PACKED && queries.num_rows < warp_row + 16;
            if (by_rows) {
                const i64 stride = arrays.out_stride.token;
                store_tile<16, HEAD_DIM_V, 32, BLOCK_Q>(
                    tile, warp_row,
                    reinterpret_cast<u16*>(out_of(arrays, queries) + warp_row * stride),
                    stride, queries.num_rows - warp_row, shape.head_dim_v, true, lane);
                __syncwarp();
            }
            if (lane == 0 && !by_rows && warp_row < queries.num_rows) {
                #pragma unroll
                for (int panel = 0; panel < num_panels(HEAD_DIM_V); ++panel)
                    tma_store(arguments.out_map,
                              tile + (panel * BLOCK_Q + warp_row) * PANEL_ROW_BYTES,
                              panel * PANEL_COLUMNS, queries.first_q + queries.first + warp_row,
                              queries.head, queries.batch);
                tma_store_commit();
            }
            unread = place;
        } else {
            const i64 stride = arrays.out_stride.token;
            store_to_array(out_of(arrays, queries) + lane_row * stride, stride, acc, lane_row,
                           queries.num_rows, shape.head_dim_v);
        }
        started = false;
        rows = no_rows();
    };

    // The first S of a query tile, alone; the rows of the one before go out meanwhile.
    const auto first_step = [&](auto meanwhile, auto options) {
        k = v;
        k.next();
        skip_tiles();
        int tile = visited.num_visited - 1;
        mbarrier_wait(k_full + 8 * k.index, k.phase);
        if constexpr (options.any) tile = options.find_tile(tile);
        await_turn();
        warpgroup_fence_operand(s);
        wgmma_fence();
        issue_scores(tile);
        pass_turn();
        meanwhile();
        if constexpr (options.any) options.begin_steps(tile);
        wgmma_wait<0>();
        if constexpr (options.any) {
            scores_done(options.tiles_left(tile));
            options.take_steps(tile, Bool<false>{});
            options.hide(tile);
        } else {
            scores_done(tile);
            mask_scores(tile);
        }
        softmax<true>(s, rows, c, rescale, origins);
        if constexpr (options.any) options.drop(tile);
        v = k;
        pack_pairs<Element>(p, s);
    };

    // One step: S of key tile `tile`, acc += P V of the one before. P becomes that of `tile`.
    // new_rows: the one before was the last of another query tile, whose work is at place `done`.
    const auto step = [&](int tile, auto masked, auto new_rows, int done, auto options) {
        k = v;
        k.next();
        if constexpr (new_rows.value) skip_tiles();
        mbarrier_wait(k_full + 8 * k.index, k.phase);
        if constexpr (options.any) tile = options.find_tile(tile);
        await_turn();
        warpgroup_fence_operand(acc);
        warpgroup_fence_operand(s);
        wgmma_fence();
        issue_scores(tile);
        mbarrier_wait(v_full + 8 * v.index, v.phase);
        wgmma_fence();
        issue_output();
        pass_turn();
        if constexpr (options.any && !(BIASES_AHEAD && !new_rows.value)) options.begin_steps(tile);
        wgmma_wait<1>();
        constexpr bool may_leave = SOFTCAP && !ALIBI && !BIAS && !masked.value;
        constexpr bool may_stay = may_leave
            || (options.any && !new_rows.value && !SOFTCAP && !DROPOUT);
        bool stays = false;                                 // m does
        if constexpr (options.any) {
            scores_done(options.tiles_left(tile));
            stays = options.take_steps(tile, Bool<may_leave>{});
            if constexpr (may_stay && !may_leave)           // before any pair is hidden by -inf
                stays = maxima_may_stay(s, rows, c, origins);
        } else {
            scores_done(tile);
        }
        if constexpr (new_rows.value) {
            await_output();
            finish(done);
        }
        if constexpr (masked.value && options.any) options.hide(tile);
        else if constexpr (masked.value) mask_scores(tile);
        // Warps go different ways, but those of a warpgroup wait for a product by one instruction:
        // before the ways or, where scores take longest, after them. What follows the wait is then
        // a third way, which all go.
        constexpr bool waits_before = may_stay && !(SOFTCAP || ALIBI);
        constexpr bool waits_after = may_stay && !waits_before;
        if constexpr (waits_before && !new_rows.value) await_output();
        // All that follows is written out for each way, so that what can be done while exponentials
        // are waited for is in one stream of instructions with them. (A function of it, called for
        // both, changes plain kernels.)
        #pragma unroll
        for (int way = 0; way < (waits_after ? 3 : may_stay ? 2 : 1); ++way) {
            const bool rescales = !stays;
            if (way < 2) {
                if (stays != (way == 1)) continue;
                if (rescales) softmax<masked.value || BIAS>(s, rows, c, rescale, origins);
                else if constexpr (may_leave)
                    softmax_of_old_maxima(s, rows, c, Poly3Scores{steps});
                else softmax_of_old_maxima(s, rows, c, origins);
                if constexpr (options.any) options.drop(tile);
                if (waits_after) continue;
            }
            if constexpr (!new_rows.value) {
                if constexpr (!waits_before) await_output();
                if (rescales)
                    #pragma unroll
                    for (int i = 0; i < O_COUNT; ++i) acc[i] *= rescale[i / 2 % 2];
                release_place();
            }
            v = k;
            pack_pairs<Element>(p, s);
        }
    };

    // The last P V, alone.
    const auto last_step = [&] {
        mbarrier_wait(v_full + 8 * v.index, v.phase);
        warpgroup_fence_operand(acc);
        wgmma_fence();
        issue_output();
        await_output();
    };

    // There are no more blocks than tiles; but of packed sequences others may have taken all.
    if constexpr (PACKED)
        if (!begin_tile()) return;
    if (group == MATH_WARPGROUPS - 1) pass_turn();
    if constexpr (!PACKED) begin_tile();
    first_step([] {}, options);
    for (;;) {
        if constexpr (SPARSE_TILES) {
            while ((listed & LAST_BIT) == 0) step(0, Bool<true>{}, Bool<false>{}, -1, options);
        } else {
            int tile = visited.num_visited - 2;
            for (; tile >= visited.num_full; --tile)
                step(tile, Bool<true>{}, Bool<false>{}, -1, options);
            for (; tile >= (WINDOW ? visited.first_full : 0); --tile)
                step(tile, Bool<false>{}, Bool<false>{}, -1, options);
            if constexpr (WINDOW)                           // whose other end cuts, too
                for (; tile >= visited.first; --tile)
                    step(tile, Bool<true>{}, Bool<false>{}, -1, options);
        }
        release_place();
        const int done = work_slot(q);
        if constexpr (Q_STAGES == 1) last_step();
        q.next();
        const bool more = begin_tile();
        if (!more) {
            if constexpr (Q_STAGES > 1) {
                last_step();
                barrier_sync(FIRST_ROWS_OUT + group, WARPGROUP);
            }
            finish(done);
            break;
        }
        if constexpr (Q_STAGES == 1)
            first_step([&] { finish(done); }, options);
        else
            step(visited.num_visited - 1, Bool<true>{}, Bool<true>{}, done, options);
    }
    if (group == 0) await_turn();                           // takes back the first turn
    if (Q_STAGES > 1 && lane == 0) tma_store_wait<0>();
    if (!exact) recompute_rows(arguments, warp_row, c, shared.work[work_slot(q)].queries.first);
}
