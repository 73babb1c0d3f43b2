// Score modifications of a lane's fragment: softcap, ALiBi slopes, biases and the user's function
// (score_mod.cuh), the derivatives of the scores, and the sums of dbias.
#pragma once
#include "sm90/backward_pair_bits.cuh"
#include "score/dbias.cuh"
#include "score/lane_grid.cuh"

// Loads a lane's float biases of a part, two keys of COUNT / 2 queries: of query 1 after the first
// next, then 8 after. Pairs past the array's end have the bias of another.
template <int COUNT>
__device__ __forceinline__ void load_float_biases(
    float (&biases)[COUNT], const ScoreMod<float>& score_mod, int query, int key) {
    constexpr int LAST = COUNT / 4 * 8 - 7;                 // query, from the first
    if (score_mod.bias_stride_k == 1 && query + LAST <= score_mod.last_query
            && key + 8 <= score_mod.last_key) {
        const Bias* row = score_mod.bias + (query * score_mod.bias_stride_q + key);
        #pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            biases[i] = to_accumulator(row[0]);
            biases[i + 1] = to_accumulator(row[8]);
            row += (i % 4 == 0 ? 1 : 7) * score_mod.bias_stride_q;
        }
    } else {
        #pragma unroll
        for (int i = 0; i < COUNT; ++i)
            biases[i] = score_mod.bias_of(query + i / 4 * 8 + i / 2 % 2, key + i % 2 * 8);
    }
}

// The same to the part's buffer.
__device__ __forceinline__ void load_part_of_floats(
    LanePairs& pairs, const ScoreMod<float>& score_mod, int part) {
    if constexpr (LanePairs::FLOATS)
        load_float_biases(pairs.floats[part % 2], score_mod,
                          pairs.query + part * (S_REGS / LanePairs::BIAS_PARTS / 4 * 8), pairs.key);
}

// Loads 16-bit biases; for a pair past the array's end, the bias of another pair. A warp has 16
// keys, from key - lane / 4 on. It reads 8 queries by 8 keys at a time, in each lane two keys that
// are neighbours in memory. apply_in_parts() transposes them to the lane's own pairs.
__device__ __forceinline__ void load_biases(LanePairs& pairs, const Arguments& args, int part = 0) {
    if constexpr (BIAS && sizeof(Bias) == 2) {
        constexpr int COUNT = sizeof(pairs.biases) / sizeof(u32);
        ScoreMod<float> score_mod(args);
        score_mod.set_head(args, pairs.batch, pairs.head);
        const int lane = threadIdx.x % 32, first_key = pairs.key - lane / 4;
        const int first_row = pairs.query - lane % 4 * 2 + part * (COUNT / 2 * 8);
        const int row = first_row + lane / 4, column = first_key + lane % 4 * 2;
        if (score_mod.has_chunks && first_key + 16 <= score_mod.last_key + 1
                && first_row + COUNT / 2 * 8 <= score_mod.last_query + 1) {
            const u32* words = reinterpret_cast<const u32*>(score_mod.chunks_of_bias(row, column));
            #pragma unroll
            for (int i = 0; i < COUNT; ++i)
                pairs.biases[i] = words[i / 2 * (score_mod.bias_stride_q * 4) + i % 2 * 4];
        } else {
            const u16* biases = reinterpret_cast<const u16*>(score_mod.bias);
            #pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                const int query = row + i / 2 * 8, key = column + i % 2 * 8;
                const u32 high = biases[score_mod.bias_index(query, key + 1)];
                pairs.biases[i] = biases[score_mod.bias_index(query, key)] | high << 16;
                if (i % 4 == 3) __syncwarp();               // limits loads in flight: registers
            }
        }
    } else if constexpr (LanePairs::FLOATS && LanePairs::BIAS_PARTS > 1) {
        ScoreMod<float> score_mod(args);
        score_mod.set_head(args, pairs.batch, pairs.head);
        load_part_of_floats(pairs, score_mod, 0);
        load_part_of_floats(pairs, score_mod, 1);
    }
}

// Of what the warp's 16 keys read of the query tile: read_ahead(). Not of narrow heads, whose S
// takes no longer than the reads (docs/lab/expressions.md).
__device__ __forceinline__ u32 read_tile(const LanePairs& pairs, const Arguments& args) {
    if (HEAD_DIM <= 64) return 0;
    ScoreMod<float> score_mod(args);
    score_mod.set_head(args, pairs.batch, pairs.head);
    score_mod.set_user(args, pairs.batch, pairs.head, pairs.seqlen_q, pairs.seqlen_k);
    const int lane = threadIdx.x % 32;
    return read_ahead<BLOCK_Q + 16>(
        score_mod, pairs.query - lane % 4 * 2 + BLOCK_Q - 1, pairs.key - lane / 4);
}

// x becomes the user's function of scale x (SCORE_MOD), the derivative of x with it.
template <class Mod>
__device__ __forceinline__ void apply_user_score(
    float& x, float& derivative, const Mod& score_mod, float scale, int query, int key) {
    if constexpr (SCORE_MOD) {
        float slope;
        x = score_mod.user.score(x, scale, query, key, slope);
        derivative *= slope;
    }
}

// The same for all products, where no built-in modification comes first: scale S goes in. The
// lane's second key is 8 after the first, as queries of neighbouring elements are, so one distance
// is that of two elements.
template <class Mod>
__device__ __forceinline__ void apply_user_scores(
    float (&scores)[S_REGS], float (&derivatives)[S_REGS], const float (&products)[S_REGS],
    const Mod& score_mod, int query, int key) {
    const auto& user = score_mod.user;
    const auto apply = [&](auto inside, int i, const auto&... shared) {
        float slope;
        scores[i] = user.template score<decltype(inside)::value>(
            products[i], score_mod.scale, query + (i / 4 * 8 + i % 2), key + i / 2 % 2 * 8, slope,
            shared...);
        if constexpr (SCORES_BEND) derivatives[i] = slope;
    };
    with_reads_tested(
        user, query, query + (S_REGS / 4 - 1) * 8 + 1, key, key + 8, [&](auto inside) {
            if constexpr (decltype(score_mod.user)::SHARES) {
                #pragma unroll
                for (int j = -1; j < S_REGS / 4; ++j) {     // of the first key; j + 1 of the second
                    #pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        const auto shared = user.template of_distance<decltype(inside)::value>(
                            query + (j < 0 ? 0 : j * 8) + n, key + (j < 0 ? 8 : 0));
                        if (j >= 0) apply(inside, j * 4 + n, shared);
                        if (j + 1 < S_REGS / 4) apply(inside, j * 4 + 6 + n, shared);
                    }
                    if (j % 4 == 2) limit_reads(user, 7);
                }
            } else {
                #pragma unroll
                for (int i = 0; i < S_REGS; ++i) {
                    apply(inside, i);
                    limit_reads(user, i);
                }
            }
        });
}

// The same with built-in modifications. fits_poly4: all products of the warp fit
// (ScoreMod::fits_tanh_poly4). One division serves two keys of a query, except with DBIAS: a NaN of
// a masked pair must not reach the gradient of a bias.
__device__ __forceinline__ void apply_in_parts(
    float (&scores)[S_REGS], float (&derivatives)[S_REGS], const float (&products)[S_REGS],
    const Arguments& args, LanePairs& pairs, const ScoreMod<float>& score_mod, bool fits_poly4) {
    constexpr int COUNT = S_REGS / LanePairs::BIAS_PARTS;
    if (LanePairs::BIAS_PARTS == 1) load_part_of_floats(pairs, score_mod, 0);
    #pragma unroll
    for (int part = 0; part < LanePairs::BIAS_PARTS; ++part) {
        // Element i of the part in the fragment: the two keys of a query become neighbours.
        const auto position = [&](int i) {
            return part * COUNT + i / 4 * 4 + i / 2 % 2 + i % 2 * 2;
        };
        if constexpr (BIAS && sizeof(Bias) == 2) {
            if (part > 0) load_biases(pairs, args, part);
            #pragma unroll
            for (u32& pair : pairs.biases) pair = movmatrix_transposed(pair);
        }
        float part_scores[COUNT], part_derivatives[COUNT];
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) part_scores[i] = products[position(i)];
        const auto added = [&](int i) {
            const int query = part * (COUNT / 4 * 8) + i / 4 * 8 + i / 2 % 2, key = i % 2 * 8;
            float bias = 0.0f;
            if constexpr (BIAS && sizeof(Bias) == 2)
                bias = of_pair<Bias>(pairs.biases[i / 4 * 2 + i % 2], i / 2 % 2);
            else if constexpr (BIAS)
                bias = pairs.floats[part % 2][i];
            return score_mod.addend(
                static_cast<float>(pairs.distance) + static_cast<float>(query - key), bias);
        };
        if (fits_poly4) {
            if constexpr (SOFTCAP) score_mod.poly4_scores(part_scores, added, part_derivatives);
        } else {
            score_mod.scores<DBIAS ? 1 : 2>(part_scores, added, part_derivatives);
        }
        if (part + 2 < LanePairs::BIAS_PARTS) load_part_of_floats(pairs, score_mod, part + 2);
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int query = part * (COUNT / 4 * 8) + i / 4 * 8 + i / 2 % 2, key = i % 2 * 8;
            apply_user_score(part_scores[i], part_derivatives[i], score_mod, 1.0f,
                             pairs.query + query, pairs.key + key);
            if (SCORE_MOD && i % 32 == 31) __syncwarp();    // limits loads in flight: registers
        }
        #pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            scores[position(i)] = part_scores[i];
            derivatives[position(i)] = part_derivatives[i];
        }
    }
}

// Raw products S become scores and their derivatives.
__device__ __forceinline__ void scores_and_derivatives(
    float (&scores)[S_REGS], float (&derivatives)[S_REGS], const float (&products)[S_REGS],
    const Arguments& args, LanePairs& pairs, bool fits_poly4) {
    ScoreMod<float> score_mod(args);
    score_mod.set_head(args, pairs.batch, pairs.head);
    score_mod.set_sequence(args, pairs.batch, pairs.head);
    if constexpr (SCORE_MOD && PACKED)
        score_mod.set_user(args, pairs.batch, pairs.head, pairs.seqlen_q, pairs.seqlen_k);
    if constexpr (SCORE_MOD && !SOFTCAP && !ALIBI && !BIAS)
        apply_user_scores(scores, derivatives, products, score_mod, pairs.query, pairs.key);
    else
        apply_in_parts(scores, derivatives, products, args, pairs, score_mod, fits_poly4);
}

// Where all pairs are visible: S^T becomes P^T times the derivative of the score, and p is P^T
// rounded. Each element is finished before the next begins, so that derivatives and P^T are not all
// in registers at once. weigh(product, query, key, lse): of a lane's query and key from its first.
struct Weight { float p, slope; };
template <class Rows, class Weigh>
__device__ __forceinline__ void compute_p_by_element(
    float (&s)[S_REGS], u32 (&p)[S_REGS / 2], const Rows& rows, Weigh weigh) {
    const u32 lane_lse = rows.lse.address();
    #pragma unroll
    for (int j = 0; j < S_REGS / 4; ++j) {
        float lse[2], weights[4];
        rows.lse.read(lane_lse, j, lse);
        #pragma unroll
        for (int i = 0; i < 4; ++i) {
            const Weight weight = weigh(s[j * 4 + i], j * 8 + i % 2, i / 2 * 8, lse[i % 2]);
            weights[i] = weight.p;
            s[j * 4 + i] = weight.p * weight.slope;
        }
        p[j * 2] = pack<Element>(weights[0], weights[1]);
        p[j * 2 + 1] = pack<Element>(weights[2], weights[3]);
    }
}

// With SOFTCAP, where all products fit the polynomial.
template <class Rows>
__device__ __forceinline__ void compute_p_poly4(
    float (&s)[S_REGS], u32 (&p)[S_REGS / 2], const Rows& rows, const ScoreMod<float>& score_mod,
    int distance) {
    compute_p_by_element(s, p, rows, [&](float x, int query, int key, float lse) {
        const float score = x * score_mod.poly4_factor_log2(x), t = score_mod.poly4_tanh(score);
        const float offset = query - key;
        const float added = ALIBI
            ? fmaf(score_mod.addend(static_cast<float>(distance) + offset, 0.0f), LOG2_E, -lse)
            : -lse;
        return Weight{exp2_approx(score + added), fmaf(-t, t, 1.0f)};
    });
}

// With SCORE_MOD alone.
template <class Rows, class Mod>
__device__ __forceinline__ void compute_p_of_user(
    float (&s)[S_REGS], u32 (&p)[S_REGS / 2], const Rows& rows, const Mod& score_mod,
    int first_query, int first_key) {
    compute_p_by_element(s, p, rows, [&](float score, int query, int key, float lse) {
        float slope = 1.0f;
        apply_user_score(score, slope, score_mod, score_mod.scale, first_query + query,
                         first_key + key);
        return Weight{exp2_approx(fmaf(score, LOG2_E, -lse)), slope};
    });
}

// A lane's pairs, of which query_of(i) and key_of(i) are those of element i of its fragment.
using FragmentPairs = LaneGrid<LaneAxis<S_REGS / 2, 2, 8, 0x03>, LaneAxis<2, 1, 8, 0x1C>>;
constexpr int query_of(int i) { return i / 4 * 2 + i % 2; }
constexpr int key_of(int i) { return i / 2 % 2; }

// Adds dS^T, 0 at masked pairs, to the gradients of the user's arrays, which do not depend on
// scores.
__device__ __forceinline__ void add_dmods(
    const float (&ds)[S_REGS], const Arguments& args, const LanePairs& pairs) {
    if constexpr (DMOD) {
        ScoreMod<float> score_mod(args);
        score_mod.set_head(args, pairs.batch, pairs.head);
        score_mod.set_user(args, pairs.batch, pairs.head, pairs.seqlen_q, pairs.seqlen_k);
        const FragmentPairs grid{pairs.query, pairs.key};
        ScoreMod<float>::ArraySums<FragmentPairs> sums;
        #pragma unroll
        for (int i = 0; i < S_REGS; ++i)
            score_mod.add_gradients(sums, grid, query_of(i), key_of(i), {}, ds[i]);
        score_mod.finish_gradients(sums, grid);
    }
}

// Adds dS^T, 0 at masked pairs, to the sums of dbias, and then multiplies it by the derivatives of
// the scores. These are NaN where a score is, also at masked pairs: zeroes are skipped.
// STORES_DBIAS: a store fills a sector, 8 neighbouring keys of a query.
__device__ __forceinline__ void add_dbias(
    float (&ds)[S_REGS], const float (&derivatives)[S_REGS], const Arguments& args,
    const LanePairs& pairs) {
    if constexpr (DBIAS) {
        BiasGradient dbias;
        dbias.set_head(args, pairs.batch, pairs.head);
        float* sum = dbias.sums + (pairs.query * dbias.stride_q + pairs.key * dbias.stride_k);
        #pragma unroll
        for (int i = 0; i < S_REGS / 2; ++i) {              // queries
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float of_pair = ds[i / 2 * 4 + half * 2 + i % 2];
                float* target = sum + half * 8 * dbias.stride_k;
                if constexpr (STORES_DBIAS) {
                    const int query = i / 2 * 8 + i % 2, key = half * 8;
                    if (query < dbias.num_queries - pairs.query && key < dbias.num_keys - pairs.key)
                        *target = of_pair;
                } else {
                    reduce_add_nonzero(target, of_pair);
                }
            }
            sum = opaque(sum + (i % 2 == 0 ? 1 : 7) * dbias.stride_q);
        }
        if constexpr (SOFTCAP)
            #pragma unroll
            for (int i = 0; i < S_REGS; ++i)
                if (ds[i] != 0.0f) ds[i] *= derivatives[i];
    }
}
