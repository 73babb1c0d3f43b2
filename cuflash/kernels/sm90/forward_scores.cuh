// Score modifications and masks of S = Q K^T, and dropout of P, on a consumer warpgroup's
// accumulator: element i is in the lane's row i / 2 % 2, and its key is i / 4 * 8 + i % 2 counted
// from the lane's first. first_row: the lane's first query. k_start: the tile's first key.
#pragma once
#include "sm90/forward_work.cuh"
#include "sm90/score_mask.cuh"

// ---- Bias ----

// Starts the copy of the warp's biases of a key tile to shared memory. False if the array does not
// allow 16-byte chunks: then biases are read from global memory when they are added.
template <class Shared>
__device__ __forceinline__ bool load_biases(
    Shared& shared, const ScoreMod<float>& score_mod, int seqlen_k, int first_row, int k_start) {
    if constexpr (STAGED_BIAS) {
        if (!score_mod.has_chunks || k_start + BIAS_CHUNKS * 8 > seqlen_k) return false;
        if constexpr (BIAS_PREFETCH) __syncwarp();          // all lanes have read the last tile's
        const int lane = threadIdx.x % 32;
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const BiasChunk* chunks =
                score_mod.chunks_of_bias(first_row + half * 8, k_start + lane % 4 * 8);
            const u32 row = shared_address(
                &shared.extras.biases[threadIdx.x / 32 - 4][lane / 4 + half * 8][lane % 4]);
            #pragma unroll
            for (int i = 0; i < BIAS_CHUNKS; i += 4)
                cp_async_16(row + i * static_cast<u32>(sizeof(BiasChunk)), chunks + i);
        }
        cp_async_commit();
        return true;
    }
    return false;
}

// Waits for the copy and reads the lane's biases, in the layout of S: with keys counted from the
// lane's first, the bias of `key` is of_pair(pairs[key / 16][key / 8 % 2 * 2 + half], key % 2).
template <class Shared>
__device__ __forceinline__ void wait_for_biases(u32 (&pairs)[BLOCK_K / 16][4], Shared& shared) {
    cp_async_wait<0>();
    __syncwarp();
    const int lane = threadIdx.x % 32;
    const u32 row = shared_address(
        &shared.extras.biases[threadIdx.x / 32 - 4][lane % 16][lane / 16]);
    #pragma unroll
    for (int i = 0; i < BLOCK_K / 16; ++i)
        ldmatrix_x4(pairs[i], row + i * 2 * static_cast<u32>(sizeof(BiasChunk)));
}

// ---- Score modifications ----

// S = Q K^T becomes scores (ScoreMod). added(half, key): the ALiBi term plus the bias of a pair,
// keys counted from the lane's first.
template <class Added>
__device__ __forceinline__ void apply_score_mod_adding(
    float (&s)[S_COUNT], const ScoreMod<float>& score_mod, const Added& added) {
    if constexpr (SOFTCAP)
        if (score_mod.fits_tanh_poly4(s)) {
            #pragma unroll
            for (int i = 0; i < S_COUNT; ++i)
                s[i] = score_mod.poly4_score(s[i]) + added(i / 2 % 2, i / 4 * 8 + i % 2);
            return;
        }
    // scores<4> shares a division among four consecutive elements: element() makes them four keys
    // of one row.
    const auto element = [](int i) { return i / 8 * 8 + i / 2 % 2 * 4 + i / 4 % 2 * 2 + i % 2; };
    float scores[S_COUNT], derivatives[S_COUNT];
    #pragma unroll
    for (int i = 0; i < S_COUNT; ++i) scores[i] = s[element(i)];
    score_mod.scores<4>(
        scores, [&](int i) { return added(i / 4 % 2, i / 8 * 16 + i / 2 % 2 * 8 + i % 2); },
        derivatives);
    #pragma unroll
    for (int i = 0; i < S_COUNT; ++i) s[element(i)] = scores[i];
}

// The same, computing slopes and biases. bias_staged: load_biases() has started their copy.
template <class Shared>
__device__ __forceinline__ void apply_built_in(
    float (&s)[S_COUNT], const ScoreMod<float>& score_mod, Shared& shared, bool bias_staged,
    int shift, int first_row, int k_start) {
    const int first_key = lane_key(k_start);
    const float past = static_cast<float>(first_row + shift - first_key);
    if constexpr (STAGED_BIAS)
        if (bias_staged) {
            u32 pairs[BLOCK_K / 16][4];
            wait_for_biases(pairs, shared);
            return apply_score_mod_adding(s, score_mod, [&](int half, int key) {
                const u32 pair = pairs[key / 16][key / 8 % 2 * 2 + half];
                return score_mod.addend(past + static_cast<float>(half * 8 - key),
                                       of_pair<Bias>(pair, key % 2));
            });
        }
    if constexpr (BIAS && sizeof(Bias) == 4)
        if (score_mod.has_pairs && k_start + BLOCK_K <= score_mod.last_key + 1) {
            BiasPair biases[2][BLOCK_K / 8];
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const BiasPair* row = score_mod.pairs_of_bias(first_row + half * 8, first_key);
                #pragma unroll
                for (int i = 0; i < BLOCK_K / 8; ++i) biases[half][i] = row[i * 4];
            }
            return apply_score_mod_adding(s, score_mod, [&](int half, int key) {
                return score_mod.addend(past + static_cast<float>(half * 8 - key),
                                       biases[half][key / 8].at[key % 2]);
            });
        }
    apply_score_mod_adding(s, score_mod, [&](int half, int key) {
        return score_mod.addend(past + static_cast<float>(half * 8 - key),
                               score_mod.bias_of(first_row + half * 8, first_key + key));
    });
}

// The products S, or the scores of built-in modifications, become the user's function of them
// (SCORE_MOD). INSIDE: as ScoreExpression::score. The lane's second row is 8 after the first, as
// keys of neighbouring elements are, so one distance is that of two elements.
template <bool INSIDE, class Mod>
__device__ __forceinline__ void apply_user_score(
    float (&s)[S_COUNT], const Mod& score_mod, int first_row, int k_start) {
    const int first_key = lane_key(k_start);
    const float scale = BUILT_IN ? 1.0f : score_mod.scale;
    const auto& user = score_mod.user;
    const auto apply = [&](int i, const auto&... shared) {
        s[i] = user.template score<INSIDE>(
            s[i], scale, first_row + i / 2 % 2 * 8, first_key + (i / 4 * 8 + i % 2), shared...);
    };
    if constexpr (decltype(score_mod.user)::SHARES) {
        #pragma unroll
        for (int j = -1; j < S_COUNT / 4; ++j)              // of the first row; j + 1 of the second
            #pragma unroll
            for (int n = 0; n < 2; ++n) {
                const auto shared = user.template of_distance<INSIDE>(
                    first_row + (j < 0 ? 8 : 0), first_key + (j < 0 ? 0 : j * 8) + n);
                if (j >= 0) apply(j * 4 + n, shared);
                if (j + 1 < S_COUNT / 4) apply(j * 4 + 6 + n, shared);
            }
    } else {
        #pragma unroll
        for (int i = 0; i < S_COUNT; ++i) apply(i);
    }
}

// The same of a tile for which is_affine() holds: f(x) = x + g, where g of (query, key) is g of
// (query, nearest) + step (key - nearest). The first term, the same for all keys, becomes the
// offset of the lane's row in `score`; S becomes the rest. `nearest` is the key with the largest g,
// and so with most of the weight: there little is added to S, and little rounded off.
template <class Score, class Mod>
__device__ __forceinline__ void apply_affine_score(
    float (&s)[S_COUNT], Score& score, const Mod& score_mod, int first_row, int k_start) {
    const float scale = BUILT_IN ? 1.0f : score_mod.scale;
    const float step = score_mod.user.step(first_row, k_start);
    const int nearest = k_start + (step > 0.0f ? BLOCK_K - 1 : 0);
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        score.set(half, score_mod.user.added(first_row + half * 8, nearest), 1.0f);
    const float of_first = step * static_cast<float>(lane_key(k_start) - nearest);
    #pragma unroll
    for (int i = 0; i < S_COUNT; ++i)
        s[i] = fmaf(s[i], scale, fmaf(step, static_cast<float>(i / 4 * 8 + i % 2), of_first));
}

// S = Q K^T becomes scores: the built-in modifications, then the user's.
template <bool INSIDE, class Shared>
__device__ __forceinline__ void apply_score_mod(
    float (&s)[S_COUNT], const ScoreMod<float>& score_mod, Shared& shared, bool bias_staged,
    int shift, int first_row, int k_start) {
    if constexpr (BUILT_IN)
        apply_built_in(s, score_mod, shared, bias_staged, shift, first_row, k_start);
    if constexpr (SCORE_MOD) apply_user_score<INSIDE>(s, score_mod, first_row, k_start);
}

// ---- Masks: S = -inf where a pair is masked ----

// Masks pairs of unequal segment ids. one_id: all keys of the tile have the same id.
__device__ __forceinline__ void apply_segment_mask(
    float (&s)[S_COUNT], const int* key_ids, const int (&row_ids)[2], bool one_id) {
    struct alignas(8) IdPair { int id[2]; };
    const IdPair* keys = reinterpret_cast<const IdPair*>(key_ids) + threadIdx.x % 4;
    const int first = keys->id[0];
    const u32 differs = __ballot_sync(WHOLE_WARP, row_ids[0] != first || row_ids[1] != first);
    if (one_id && differs == 0) return;
    #pragma unroll
    for (int i = 0; i < S_COUNT / 4; ++i) {
        const IdPair pair = keys[i * 4];
        #pragma unroll
        for (int x = 0; x < 4; ++x)
            if (pair.id[x % 2] != row_ids[x / 2]) s[i * 4 + x] = -infinity();
    }
}

// ---- Dropout ----

// P = 0 for dropped pairs; the others are scaled up.
__device__ __forceinline__ void apply_dropout(
    float (&p)[S_COUNT], const Dropout<float>& dropout, int first_row, int k_start) {
    constexpr int PAIRS = 8;                                // of keys, in one call of kept_bits
    const int first_key = lane_key(k_start);
    #pragma unroll
    for (int half = 0; half < 2; ++half)
        #pragma unroll
        for (int first = 0; first < S_COUNT / 4; first += PAIRS) {
            const u32 kept =
                dropout.kept_bits<PAIRS>(first_row + half * 8, first_key + first * 8);
            #pragma unroll
            for (int i = first * 2; i < min((first + PAIRS) * 2, S_COUNT / 2); ++i)
                p[i / 2 * 4 + half * 2 + i % 2] *=
                    (kept >> (i - first * 2) & 1) != 0 ? dropout.factor : 0.0f;
        }
}
