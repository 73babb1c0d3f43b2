// From S = Q K^T to scores, on a warpgroup's accumulator: score modifications, masks, dropout.
#pragma once
#include "sm90/forward_softmax.cuh"

// The warp's biases of a key tile begin to come to its place, if they come in chunks; whether they
// do. Other biases are read when they are added.
template <class Shared>
__device__ __forceinline__ bool load_biases(
    Shared& shared, const ScoreMod<float>& steps, int seqlen_k, int first_row, int k_start) {
    if constexpr (STAGED) {
        if (!steps.has_chunks || k_start + BIAS_CHUNKS * 8 > seqlen_k) return false;
        if constexpr (BIASES_AHEAD) __syncwarp();           // all lanes have read the last tile's
        const int lane = threadIdx.x % 32;
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
            const BiasChunk* chunks =
                steps.chunks_of_bias(first_row + half * 8, k_start + lane % 4 * 8);
            const u32 place = shared_address(
                &shared.beside.biases[threadIdx.x / 32 - 4][lane / 4 + half * 8][lane % 4]);
            #pragma unroll
            for (int i = 0; i < BIAS_CHUNKS; i += 4)
                cp_async_16(place + i * static_cast<u32>(sizeof(BiasChunk)), chunks + i);
        }
        cp_async_commit();
        return true;
    }
    return false;
}

// The lane's of them, as S lies: of_pair(pairs[key / 16][key / 8 % 2 * 2 + half], key % 2), keys
// counted from the lane's first.
template <class Shared>
__device__ __forceinline__ void await_biases(u32 (&pairs)[BLOCK_K / 16][4], Shared& shared) {
    cp_async_wait<0>();
    __syncwarp();
    const int lane = threadIdx.x % 32;
    const u32 row = shared_address(
        &shared.beside.biases[threadIdx.x / 32 - 4][lane % 16][lane / 16]);
    #pragma unroll
    for (int i = 0; i < BLOCK_K / 16; ++i)
        ldmatrix_x4(pairs[i], row + i * 2 * static_cast<u32>(sizeof(BiasChunk)));
}

// The scores of products; see ScoreMod.
template <class Shared>
__device__ __forceinline__ void apply_steps(
    float (&s)[S_COUNT], const ScoreMod<float>& steps, Shared& shared, bool biases_come, int shift,
    int first_row, int k_start) {
    const int first_key = k_start + threadIdx.x % 4 * 2;
    const float past = static_cast<float>(first_row + shift - first_key);
    const auto apply = [&](auto added) {                    // of half and key, from the first on
        if constexpr (SOFTCAP)
            if (steps.fits_tanh_poly4(s)) {
                #pragma unroll
                for (int i = 0; i < S_COUNT; ++i)
                    s[i] = steps.poly4_score(s[i]) + added(i / 2 % 2, i / 4 * 8 + i % 2);
                return;
            }
        // Four keys of a row next to one another.
        const auto place = [](int i) { return i / 8 * 8 + i / 2 % 2 * 4 + i / 4 % 2 * 2 + i % 2; };
        float scores[S_COUNT], derivatives[S_COUNT];
        #pragma unroll
        for (int i = 0; i < S_COUNT; ++i) scores[i] = s[place(i)];
        steps.scores<4>(
            scores, [&](int i) { return added(i / 4 % 2, i / 8 * 16 + i / 2 % 2 * 8 + i % 2); },
            derivatives);
        #pragma unroll
        for (int i = 0; i < S_COUNT; ++i) s[place(i)] = scores[i];
    };
    if constexpr (STAGED)
        if (biases_come) {
            u32 pairs[BLOCK_K / 16][4];
            await_biases(pairs, shared);
            return apply([&](int half, int key) {
                const u32 pair = pairs[key / 16][key / 8 % 2 * 2 + half];
                return steps.added(past + static_cast<float>(half * 8 - key),
                                   of_pair<Bias>(pair, key % 2));
            });
        }
    apply([&](int half, int key) {
        return steps.added(past + static_cast<float>(half * 8 - key),
                           steps.bias_of(first_row + half * 8, first_key + key));
    });
}

// S = -inf where the row's segment id is not the key's. one_id: all keys have the same.
__device__ __forceinline__ void hide_segments(
    float (&s)[S_COUNT], const int* ids_of_keys, const int (&ids)[2], bool one_id) {
    struct alignas(8) Two { int id[2]; };
    const Two* keys = reinterpret_cast<const Two*>(ids_of_keys) + threadIdx.x % 4;
    const int first = keys->id[0];
    const u32 other = __ballot_sync(WHOLE_WARP, ids[0] != first || ids[1] != first);
    if (one_id && other == 0) return;
    #pragma unroll
    for (int i = 0; i < S_COUNT / 4; ++i) {
        const Two two = keys[i * 4];
        #pragma unroll
        for (int x = 0; x < 4; ++x)
            if (two.id[x % 2] != ids[x / 2]) s[i * 4 + x] = -infinity();
    }
}

// S = -inf where the mask hides the pair.
__device__ __forceinline__ void hide_pairs(
    float (&s)[S_COUNT], const Pairs& pairs, const Shape& shape, int first_row, int k_start) {
    const int first_key = k_start + threadIdx.x % 4 * 2;
    if constexpr (HAS_MASK)
        #pragma unroll
        for (int i = 0; i < S_COUNT / 2; ++i) {
            const int key = min(first_key + i / 2 * 8 + i % 2, shape.seqlen_k - 1);
            #pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int query = min(first_row + half * 8, shape.seqlen_q - 1);
                if (!pairs.keeps(query, key)) s[i / 2 * 4 + half * 2 + i % 2] = -infinity();
            }
        }
}

// S = -inf where the row does not see the key.
__device__ __forceinline__ void apply_mask(
    float (&s)[S_COUNT], const Mask<CAUSAL, WINDOW>& mask, int first_row, int k_start) {
    const int first_key = k_start + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int seen = max(mask.num_keys(first_row + half * 8) - first_key, 0);
        const int count = seen / 8 * 2 + min(seen % 8, 2);  // of the lane's columns
        const int before = WINDOW ? max(mask.first_key(first_row + half * 8) - first_key, 0) : 0;
        const int left_out = before / 8 * 2 + min(before % 8, 2);
        #pragma unroll
        for (int word = 0; word < (S_COUNT + 63) / 64; ++word) {
            const int bits = count - word * 32;
            u32 visible = bits >= 32 ? ~0u : (1u << max(bits, 0)) - 1;
            const int hidden = left_out - word * 32;
            if (WINDOW) visible &= hidden >= 32 ? 0u : ~0u << max(hidden, 0);
            #pragma unroll
            for (int i = word * 32; i < min(word * 32 + 32, S_COUNT / 2); ++i)
                if ((visible >> i % 32 & 1) == 0)
                    s[i / 2 * 4 + half * 2 + i % 2] = -infinity();
        }
    }
}

// P = 0 where dropout drops the pair, and the others larger.
__device__ __forceinline__ void apply_dropout(
    float (&p)[S_COUNT], const Dropout<float>& dropout, int first_row, int k_start) {
    constexpr int PAIRS = 8;                                // of keys, looked at together
    const int first_key = k_start + threadIdx.x % 4 * 2;
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
