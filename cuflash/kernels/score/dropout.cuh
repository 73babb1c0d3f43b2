// Dropout (DROPOUT): P times Z, where Z is 0 or 1 / (1 - probability). Which pairs are kept is a
// function of seed, batch, head, query and key alone (docs/guide/options.md).
//
// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, doi:10.1145/2063384.2063405): word key % 4 of the
// counter (key / 4, query, head, batch) decides. A packed sequence counts as a batch.
#pragma once
#include "common/constants.cuh"

inline u32 high_word(u32 a, u32 b) { return static_cast<u32>((static_cast<u64>(a) * b) >> 32); }

struct Words { u32 x[4]; };

inline Words philox(Words counter, u32 key0, u32 key1) {
    u32 (&c)[4] = counter.x;
    #pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u32 a = 0xD2511F53u, b = 0xCD9E8D57u;
        const u32 high_a = high_word(a, c[0]), high_b = high_word(b, c[2]);
        const Words next = {{high_b ^ c[1] ^ key0, b * c[2], high_a ^ c[3] ^ key1, a * c[0]}};
        counter = next;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return counter;
}

// One head's dropout.
template <class Real> struct Dropout {
    u32 key0, key1, batch, head, drop_below;
    Real factor;                                            // Z of a pair that is kept

    template <class Arguments> explicit Dropout(const Arguments& args) {
        if constexpr (DROPOUT) {
            key0 = static_cast<u32>(args.seed);
            key1 = static_cast<u32>(args.seed >> 32);
            drop_below = args.options.drop_below;
            factor = static_cast<Real>(args.options.keep_factor);
            if constexpr (PACKED) batch = args.options.sequence;
        }
    }
    // For kernels whose blocks take one packed sequence after another.
    void set_sequence(int sequence) {
        if constexpr (DROPOUT && PACKED) batch = sequence;
    }
    void set_head(int new_batch, int new_head) {
        if constexpr (DROPOUT) {
            if constexpr (!PACKED) batch = new_batch;
            head = new_head;
        }
    }

    // The words of a query and the four keys from key / 4 * 4 on.
    Words words_of(int query, int key) const {
        return philox({{static_cast<u32>(key) / 4, static_cast<u32>(query), head, batch}},
                      key0, key1);
    }

    // Whether the pairs of a query with keys key and key + 1 are kept. key is even.
    void keeps(int query, int key, bool& first, bool& second) const {
        const Words words = words_of(query, key);
        first = (key % 4 == 0 ? words.x[0] : words.x[2]) >= drop_below;
        second = (key % 4 == 0 ? words.x[1] : words.x[3]) >= drop_below;
    }

    // COUNT such pairs of keys, 8 keys apart: bits 2 n and 2 n + 1 belong to pair n. The loop is
    // not unrolled, which would take more registers than there are.
    template <int COUNT> u32 kept_bits(int query, int key) const {
        static_assert(COUNT <= 16, "a word has 32 bits");
        u32 bits = 0;
        #pragma unroll 1
        for (int n = 0; n < COUNT; ++n) {
            bool first, second;
            keeps(query, key + n * 8, first, second);
            bits |= (first ? 1u : 0u) << (n * 2) | (second ? 2u : 0u) << (n * 2);
        }
        return bits;
    }

    // Z of the pair that bit n of kept_bits() is of.
    Real z_of(u32 kept, int n) const { return (kept >> n) & 1 ? factor : Real(0); }

    // The pairs of a query with keys key .. key + 3, key being a multiple of 4: bit n is 1 if the
    // n-th is kept.
    u32 kept_of_four(int query, int key) const {
        const Words words = words_of(query, key);
        u32 bits = 0;
        #pragma unroll
        for (int n = 0; n < 4; ++n) bits |= (words.x[n] >= drop_below ? 1u : 0u) << n;
        return bits;
    }

    // Z of a pair.
    Real z(int query, int key) const {
        if constexpr (!DROPOUT) return 1;
        bool kept[2];
        keeps(query, key & ~1, kept[0], kept[1]);
        return (key % 2 == 0 ? kept[0] : kept[1]) ? factor : Real(0);
    }
};

// A lane's pairs in M x N C fragments of 16 queries and 8 keys. Calls f(i, half, kept) for each of
// its queries, with kept_bits<N>() of it. query, key: the lane's first pair.
template <int M, int N, class Real, class F>
inline void for_each_kept(const Dropout<Real>& dropout, int query, int key, F f) {
    #pragma unroll
    for (int i = 0; i < M; ++i)
        #pragma unroll
        for (int half = 0; half < 2; ++half)
            f(i, half, dropout.template kept_bits<N>(query + i * 16 + half * 8, key));
}

// x becomes x Z, for one of the lane's queries: 0 where dropout drops the pair, larger elsewhere.
template <class Real, int N>
inline void apply_dropout(Real (&x)[N][4], int half, u32 kept, const Dropout<Real>& dropout) {
    #pragma unroll
    for (int j = 0; j < N; ++j)
        #pragma unroll
        for (int n = 0; n < 2; ++n) x[j][half * 2 + n] *= dropout.z_of(kept, j * 2 + n);
}

// For all of them.
template <class Real, int M, int N>
inline void apply_dropout(
    Real (&x)[M][N][4], const Dropout<Real>& dropout, int query, int key) {
    for_each_kept<M, N>(dropout, query, key, [&](int i, int half, u32 kept) {
        apply_dropout(x[i], half, kept, dropout);
    });
}
